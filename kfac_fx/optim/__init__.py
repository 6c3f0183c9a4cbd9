"""The parts of a step of `KFAC`."""
