"""Recording with a divided model, whose submodules were captured one by one."""
