"""Reading and writing graphs: operations and their spellings, what a node depends on, sizes, cases."""
