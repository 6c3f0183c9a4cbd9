"""A spectrum that knows its model: corrected eigenvalues, scores of training examples, and solves."""
