"""Parametrizations, one module for each mechanism that may stand between a parameter and its layer's matrix.

`passes.parametrization` has the table of them, and each module shows the graph before and after. Some rules hold for
all:

- A use keeps its node, so the emitted graph stays equal to the model bit for bit.
- A multiple of a parameter scales the rows. A constant that is added to it changes nothing.
- Pieces, `w[0:64]`, are parameters of their own to blocks and reports. A parameter that cannot be cut stays whole, and
  is generic if a use would have needed a part.
- Where rows and gradient rows omit a part of the gradient, only Kronecker approximations are available, the report says
  so, and the proof adds the part (`remainder`).
- A parameter that is a matrix in one use and reaches another one through its Jacobian stays generic, because the two
  kinds of rows have nothing in common. So does one that reaches the weight in a way that no module here knows.
- A factor of a Hadamard product has rows of positions times outputs times rank numbers.
"""
