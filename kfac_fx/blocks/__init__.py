"""Fisher blocks: operators made of factors."""
