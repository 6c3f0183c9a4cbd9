"""Linear algebra: matrices, operators, vectors by name, shards of them, the processes that have these, and checks of
arguments. A registration is known here as the names and the matrix of its parameters; only the checks see models.

**Sharded parameters** (FSDP2, `processes`). The model is compiled with whole parameters and sharded then, because a
capture runs the model on values. `fully_shard` replaces the parameters by DTensors, and swaps these with whole tensors
inside of its units. So a sharded model is compared with the compiled one by names, shapes and dtypes.

- The user's forwards run the units as they are. A recording, a check and the empirical Fisher run the graph, which
  knows no units and needs no more of FSDP2 than its DTensors (`recording.emitted`).
- Gradients meet the inverses as whole tensors: in every process or, with owners, in that of the owner. There one
  all-to-all brings the gradients of all shards, and another one takes the products back.
- Hybrid sharding repeats the shards: owners are those of one replica, and sums of a batch are also added up over the
  processes that own the same blocks.
- Processes of tensor parallelism have the same cases. Their statistics are added up over all processes as if they had
  others, which counts every case equally often, so no factor knows of them. Inner products of vectors count an element
  once that several processes have.
- Shards are filled up to equal lengths, so that no process asks another one for sizes.
- In a checkpoint the rows of a divided block are DTensors of the matrix [g, o, i].
"""
