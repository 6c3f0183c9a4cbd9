"""What `trace`, `divide` and `submodules` are made of: what happens while a model is traced, and at its border."""
