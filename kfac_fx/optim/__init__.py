"""`KFAC`: the step, the update rules, checks, schedules, the checkpoint, metrics and figures.

`step` is one step, `rule` says what an update rule is, and `rules` has those of the library. Here are the reasons that
no single module has.

**Rules.** The step asks a rule by what its class declares, and never by its name: a rule of a user has the checkpoint,
the division among processes, the guard and the metrics that the library's rules have.

**Steps.** `step(closure)` always calls the closure, because trainers run the first micro-batches of a step themselves
and the last one in the step. A statistic belongs to the gradient that came with it, so forwards whose gradients the
step does not get are no part of it (`forwards`). `evaluate` is another argument, because a closure that computes
gradients cannot be told from one that returns the loss alone.

**State.** torch.distributed.checkpoint makes the state of a fresh optimizer by a step with zero gradients. So such a
step before the first batch changes nothing.

**Metrics** are a pair of hooks around `step`. Hooks cannot see the seconds of a phase, so a step measures these itself,
and only while a `Metrics` is attached. The change of the parameters is the one that happened: clipping, weight decay,
undone steps and skipped steps all enter it.

**Compiled updates.** The products with inverses, the whole step of "regular" and "adam", and all that "eigen_moments"
does between gradient and direction depend on nothing that the host reads, so a backend compiles them. torch makes no
CUDA graph of a function that writes into tensors that may lie elsewhere in the next call. So the vectors, roots and
bases of an optimizer are marked as tensors that stay where they are.

**On CUDA** a plain step of the default in float32 is another program for the same formula (`padded_step`; tests compare
the two). If a tensor that its CUDA graph reads moves, or a decision of the host changes, the next step runs as it is,
and the one after it is captured. `benchmarks/launches.py` counts what a step launches, without a GPU.

**Means.** A gradient whose squares overflow skips the whole step. Left out of one block alone, it would give that block
other weights than the rest, and every group operations of its own. On a CPU the host reads conditions, such as whether
a step is finite, because that costs nothing there. Other devices compute both cases.

**Several processes** are micro-batches that run at once (`linalg.processes`). DistributedDataParallel averages the
gradients. The first step compares their norms, because processes that train apart with common factors would be wrong
without an error. A loss that is a mean over the cases of all processes is scaled by the number of processes. The
curvature of a batch is averaged by cases.
"""
