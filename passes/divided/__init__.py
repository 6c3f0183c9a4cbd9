"""Models that no single graph holds: their submodules are captured one by one."""
