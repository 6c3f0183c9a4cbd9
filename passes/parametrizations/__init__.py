"""What may stand between a parameter and its layer's matrix: one module for each mechanism."""
