"""Walks in a process of their own; prints what went wrong in each, and its seconds, as JSON. Arguments: their names."""

from __future__ import annotations

import json
import sys
import time
import warnings

from tests.devices import accelerator

if __name__ == "__main__":
    accelerator.install()
    from tests.devices.walks import WALKS, WRONG, outcome

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    walks, found = WALKS | WRONG, {}
    for name in sys.argv[1:] or walks:
        start = time.process_time()
        found[name] = outcome(walks[name]), round(time.process_time() - start, 1)
    print(json.dumps(found))
