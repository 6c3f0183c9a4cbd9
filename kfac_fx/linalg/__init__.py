"""Linear algebra: matrices, operators, vectors by name, shards of them, the processes that have these, and checks of
arguments. A registration is known here as the names and the matrix of its parameters; only the checks see models.
"""
