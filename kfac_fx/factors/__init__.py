"""Moving averages of statistics, stacked over blocks of equal shape, and their decompositions."""
