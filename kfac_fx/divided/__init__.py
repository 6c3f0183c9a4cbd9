"""Recording with models whose submodules were captured one by one."""
