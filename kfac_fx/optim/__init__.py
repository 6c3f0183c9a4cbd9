"""What a step of `KFAC` is made of."""
