"""The Fisher over batches, its spectrum, and what needs both: scores of training examples, solves, files."""
