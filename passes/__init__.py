"""The compiler: graph in, graph out. Knows torch.fx and nothing of the runtime; installs as `kfac_fx.passes`."""

import sys

if __name__ == "passes":  # imported from a checkout's root: one set of modules under both names, never a second copy
    import kfac_fx.passes  # noqa: F401, TID251

    for _name in [name for name in sys.modules if name.split(".")[:2] == ["kfac_fx", "passes"]]:
        sys.modules[_name.removeprefix("kfac_fx.")] = sys.modules[_name]

# Every submodule is imported here, or a later `import passes.x` would be a second copy after all.
from . import errors, ir, layers, pipeline, rewrite, trace

__all__ = ["errors", "ir", "layers", "pipeline", "rewrite", "trace"]
