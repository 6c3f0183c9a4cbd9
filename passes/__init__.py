"""The compiler: graph in, graph out. Knows torch.fx and nothing of the runtime; installs as `kfac_fx.passes`.

`pipeline` has the passes in their order. A pass is a function from a Program to a Program (`ir`); no pass imports
another one. Everything that names a private function of torch is in `torch_private`.

**Shifts.** Class tokens, sinks, positions and tables of relative positions are shifts with one gradient per case.
Expanding to the number of cases yields an activation. A class token is therefore a bias that is added to zero, with the
tap on the expanded tensor.

**Towers** are mini-batches that one graph computes. Each is a use with cases of its own. They add up in the factors as
cases do, and the gradient of a case is not summed over them.
"""

import sys

if __name__ == "passes":  # imported from a checkout's root: one set of modules under both names, never a second copy
    import kfac_fx.passes  # noqa: F401, TID251

    for _name in [name for name in sys.modules if name.split(".")[:2] == ["kfac_fx", "passes"]]:
        sys.modules[_name.removeprefix("kfac_fx.")] = sys.modules[_name]

# Every submodule is imported here, or a later `import passes.x` would be a second copy after all.
from . import errors, ir, layers, pipeline, rewrite, trace

__all__ = ["errors", "ir", "layers", "pipeline", "rewrite", "trace"]
