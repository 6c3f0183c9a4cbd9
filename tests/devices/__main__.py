"""All walks in a process of their own; prints what went wrong in each as JSON. Arguments: parts of their names."""

from __future__ import annotations

import json
import sys
import warnings

from tests.devices import accelerator

if __name__ == "__main__":
    accelerator.install()
    from tests.devices.walks import WALKS, WRONG, outcome

    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    walks = WALKS | {name: walk for name, (walk, _) in WRONG.items()}
    print(
        json.dumps({n: outcome(walk) for n, walk in walks.items() if any(part in n for part in sys.argv[1:] or [""])})
    )
