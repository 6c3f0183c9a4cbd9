"""Tensors: matrices, operators, vectors by the names of parameters, processes, and checks of arguments.

Nearly all of it knows no model. `vectors` reads from registrations which part of a parameter a piece is, `w[0:64]`, and
is the only place where whole vectors are split and joined. `sharded` tells the units of FSDP2 in a model what to drop.

**Sharded parameters** (FSDP2, `sharded`). The model is compiled with whole parameters and sharded then, because a
capture runs the model on values. `fully_shard` replaces the parameters by DTensors, and swaps these with whole tensors
inside of its units. So a sharded model is compared with the compiled one by names, shapes and dtypes.

- The user's forwards run the units as they are. A recording, a check and the empirical Fisher run the graph, which
  knows no units and needs no more of FSDP2 than its DTensors (`recording.emitted`).
- Gradients meet the inverses as whole tensors: in every process or, with owners, in that of the owner. There one
  all-to-all brings the gradients of all shards, and another one takes the products back.
- Shards are filled up to equal lengths, so that no process asks another one for sizes.
- In a checkpoint the rows of a divided block are DTensors of the matrix [g, o, i].
"""
