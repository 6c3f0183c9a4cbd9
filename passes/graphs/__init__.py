"""Reading and writing graphs: operations and their spellings, what a node depends on, and sizes.

Values never change when a graph is written. An operation in place, in a part of a tensor, has memory of its own
afterwards, so a product of the same numbers may round in another order because of other strides.
"""
