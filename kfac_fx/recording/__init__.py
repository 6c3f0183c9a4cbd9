"""Running an emitted module on a batch, and what comes out of it."""
