"""Recording: one batch becomes sums over its cases. Here are the emitted module, the ways to run it, and its proofs.

A *tap* stands on the output of every use, and its backward returns the statistics as the gradients of zero *probes*
(`taps`). So a recording is `autograd.grad(outputs, probes, cotangent)`, and the forward compiles with `fullgraph=True`.
A and G are both computed in the backward, so a non-reentrant checkpoint records once. A tap closes over literals and
functions only, because Dynamo can wrap neither a module nor a registration in the closure of an `autograd.Function`.

**Modes.** *Sampled* statistics have a forward and a backward of their own, over a chosen fraction of the batch.
Products of two cases are zero in expectation, so it does not matter whether cases meet. The *exact* modes send all
sources back (`recorder`); where cases meet, every row of the loss is a source of its own, and full and diagonal blocks
come from whole gradients. The *empirical* Fisher is recorded in the training backward: the probes are leaves, and the
user's `loss.backward()` fills their `.grad`.

**Several uses** of one weight, as the steps of a recurrent layer, are summed up together (`recorder`): few rows take
as long as many, and a recurrent layer has a few at each of its steps. **Evaluations** at other parameters, as the
checks of a step need them, run torch's own kernels of recurrent layers instead of their steps (`equivalence`).

**Padding.** Masked rows are in neither A nor G nor `count`. The Fisher's outputs are constants at padding positions, so
sampled targets send nothing back from there, and a case is counted only if its outputs change with the real values. So
the statistics are those of every sequence on its own.

**Samples of rows.** A recording draws two numbers for them. They enter the taps as buffers, which the forward copies,
so the emitted module stays a function of its inputs.

**Comparisons.** A step compares the outputs of its recording with those of the user's own forward behind it
(`equivalence`). There is no such forward where the graph replaces it ("empirical"), where a part of the batch is
recorded, where a compiler, cuDNN or TF32 computes in another way, where data parallelism sends buffers around before a
forward, in a quadratic model between recordings, and for a `FisherEstimator`. There `OutputWatch.due` chooses
recordings, and two more forwards that leave no trace are compared; for a `FisherEstimator` one more with the recording
itself, where both have the same kernels. A step whose recordings differ changes nothing, as a
step that is not finite. Several processes add their results up, so that none goes on alone.

**Precision.** Products of factors are in float32 whatever the user allowed. In a compiled training step they follow the
setting of the user's backward. Under autocast a layer rounds its input to the precision of its output, so its rows are
the rounded ones. The proof of the first batch runs in full precision, convolutions included, because rounding to TF32
is as large as the errors that it looks for. Its memory is that of a training step, one gradient more, and three times
the largest matrix; a test counts the bytes, and `benchmarks/proof_memory.py` measures larger models.

**Convolutions** have a way to the second moment of patches without the patches (`passes.layers.conv`). CUDA multiplies
halves so fast that patches take less time than the many operations of this way, so they are made there. Compiled code
on CUDA makes them in every precision, because inductor of torch 2.11 compiles this way to other numbers without an
error (seen for kernels of 3 with padding; "aot_eager" and the CPU are right).

**Paths** (`captures`). A call that takes another path through the model is another capture. It adds registrations to
those that there are, and has statistics of its own alone, so blocks of other paths stay as they are. While parameters
are in no capture, training forwards look for a capture that has them, because a block must have factors before its
first step: a gradient that has arrived cannot be recorded.

**Freezing** needs no capture (`model_checks`). While all parameters of a registration are frozen, its statistics pause,
and no more of its block changes than the inverse. If a parameter is trained for the first time, the model is captured
anew. Blocks of the same registrations go on. New ones have stacks of their own, are recorded and decomposed at once,
and then follow the schedule of a first step. A forward while everything is frozen is no part of a step.

**Divided models** (`emitted_submodules`, `passes.divide`). The model's own forward runs, with each captured submodule
replaced by its graph; probes add up over all calls.

- A new kind of call is captured when it is met, and a submodule is proved when it first runs. In the training forward a
  call that no graph serves runs as it is; that forward records nothing, and the call is captured afterwards.
- These submodules stay Python, because Python may read what they leave: those whose children are called from outside
  (`vae.encode(x)`), those that set attributes or write into parameters, those with user hooks inside, and calls on
  parameters that functional_call put in. The hooks of a captured submodule run in Python around it.
- Operations of Python that read parameters run as graphs, too (`passes.divide`). Three kinds of them do not, and
  leave their parameters generic: those of values that change when they are recomputed (random numbers, writes, another
  autocast), arguments of submodules and of autograd.Functions, and those that would make a registration ambiguous. A
  look at autograd's graph finds reads that were missed, which is an error.
- c is averaged over all batches, also those without rows; A and G are averaged over the batches with rows.
- Checkpoints run the function that they wrap, or the backward would run the original forward again.
- The sizes of the padding mask that are cases and positions are found in the example, so they must differ from all
  other sizes there (`masks`).
"""
