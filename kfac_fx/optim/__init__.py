"""The parts of a step of `KFAC`, and the check of the trained loss at its first step."""
