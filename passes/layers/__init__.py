"""One declaration a layer, a file a family."""
