"""What a `LayerCollection` is made of: registration by hand, on nodes of a graph."""
