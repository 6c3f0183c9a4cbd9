"""Moving averages of statistics, in stacks of equals, and their decompositions."""
