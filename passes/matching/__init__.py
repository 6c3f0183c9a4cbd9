"""What `expressions` and `match` are made of: the way from a parameter to its use."""
