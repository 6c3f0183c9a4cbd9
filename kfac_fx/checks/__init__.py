"""What must hold of a model and of its graph: likeness, the registration proof, what has not changed since."""
