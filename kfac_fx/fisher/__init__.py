"""The Fisher: factors averaged over batches, blocks made of them, their inverses, and the processes that keep them."""
