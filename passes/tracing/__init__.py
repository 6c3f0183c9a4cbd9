"""Capture: how a model is traced, and what happens while it is.

With example inputs `torch.export` traces the model, non-strict, with `Dim.AUTO` for every dimension. The dimensions of
images behind the first two are fixed until another size is seen, because free heights and widths make torch.export
several times as slow. Without example inputs torch.fx traces down to torch's own modules; a model that this cannot
trace whole is captured at the first training forward. All that is no tensor is part of the key of a capture: training
flags, dtypes, devices, autocast, structure. A shape guard that fails causes one more capture. Capture takes ten to
sixty times as long as all passes (`benchmarks/compile_time.py`).

**Random numbers and checkpoints.** Branches on random numbers are taken if their outcome is certain, as with a dropout
rate of 0. Reentrant checkpoints are captured as the function that they wrap. Random numbers of Python and numpy, and
objects that hide tensors, are refused, because a graph would keep their present values.

**Attributes** (`effects`, `settings`). Those that are changed from outside are part of the key: a temperature, an
attribute of a class, a hook, another forward. If forward itself sets attributes, two forwards in a row must compute the
same, must not count, and must not write into a parameter. Otherwise the model is divided, so that its Python code runs.

**Values from outside** (`settings`) are followed through containers, objects, arrays, functools.partial,
weak references and context variables, to any depth. Deeper than two levels only the attributes that some function names
count, so that a trainer that hangs on the model is not read. Values that forward itself changes are put back after
every trace and proof, and a capture does not depend on them. If a second forward changes them again, that is an effect,
as are prints, hooks of the user and writes into arguments; the empirical Fisher cannot be recorded in training then.
The garbage collector waits during a trace, because the functions that it calls are no part of forward. Not seen are C
extensions that keep state, files, clocks, settings of torch other than autocast and the default dtype, and attributes
deep inside of objects whose names are computed.

**autograd.Functions** (`functions`) keep their own backward.

- A Function may mix cases, as batch normalization does. The gradient row of a case is then that of the loss summed over
  all cases, in the graph and in the model.
- A backward that is not linear in the gradient, as one that clips it, sees the gradients of summed losses here.
- Gradients flow to arguments that are tensors, and not to tensors inside of lists.
- Three kinds are refused by name, and the model is divided around them: those that write into their arguments, those
  that need numbers to compute their shapes, and those that read tensors of the model that are no arguments, because
  their backward could send gradients there unseen. All are refused where forward takes derivatives, and without inputs.
- Where a compiler refuses a Function, recordings run without that compiler.

**Derivatives by the inputs** (`trace`). A weight then has a use in the value and transposed uses in the
derivatives; the bias has a use in the value only. Each input size is captured separately. A second trace with one more
case shows which tensors have one row per case. Convolutions and norms have their own backward operations, which read
their parameters again, so these parameters are generic if the layer is differentiated.

**Recurrent layers** (`substitutes`) are one operation in a trace, because tracing 100 steps takes a hundred times as
long. `unroll` writes the steps out. The dropout between layers draws the same numbers as torch does on the CPU. cuDNN
draws other ones, so graph and model are compared without cuDNN there.
"""
