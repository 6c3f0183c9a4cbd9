"""The compiler: graph in, graph out. Knows torch.fx and nothing of the runtime; installs as `kfac_fx.passes`.

`pipeline` has the passes in their order. A pass is a function from a Program to a Program (`ir`); no pass imports
another one. Everything that names a private function of torch is in `torch_private`.

**Cases.** The dimension of the cases is a symbolic size. The user's `batch_dim` says it; else layers of torch that have
`batch_first`, and recurrent cells, tell it while they are traced; else it is the first by convention. In the last case
the first batch shows whether the outputs mix along it. Divided models have their cases first.

**Counting.** `check` counts the edges from PURE nodes to activations: a parameter, through operations on parameters
only, that enters an operation that depends on the batch, or a layer that is applied to a constant or to another
parameter. Every use is such an edge. It reads no matches, so it finds what the matcher missed.

**Shifts.** Class tokens, sinks, positions and tables of relative positions are shifts with one gradient per case.
Expanding to the number of cases yields an activation. A class token is therefore a bias that is added to zero, with the
tap on the expanded tensor.

**Towers** are mini-batches that one graph computes. Each is a use with cases of its own. They add up in the factors as
cases do, and the gradient of a case is not summed over them.

**Wide sides.** The side that makes the Fisher's own outputs (a vocabulary) keeps its diagonal, because its second
moment is diagonal up to rank one. One-hot inputs keep theirs. Other sides keep diagonal blocks in the memory of a dense
factor of width `dense_limit` (`choose`).
"""

import sys

if __name__ == "passes":  # imported from a checkout's root: one set of modules under both names, never a second copy
    import kfac_fx.passes  # noqa: F401, TID251

    for _name in [name for name in sys.modules if name.split(".")[:2] == ["kfac_fx", "passes"]]:
        sys.modules[_name.removeprefix("kfac_fx.")] = sys.modules[_name]

# Every submodule is imported here, or a later `import passes.x` would be a second copy after all.
from . import errors, ir, layers, pipeline, rewrite, trace

__all__ = ["errors", "ir", "layers", "pipeline", "rewrite", "trace"]
