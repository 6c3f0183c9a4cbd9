"""The captures of one model, whole or in submodules."""
