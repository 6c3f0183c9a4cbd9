"""Recording: the emitted module, the ways to run it on a batch, and the statistics that come out of it."""
