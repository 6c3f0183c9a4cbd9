#!/usr/bin/env bash
# Everything that needs a GPU: the CUDA tests, then the demo, whatever became of the tests. Uses the active python3, not
# .venv, because a GPU machine brings its own torch; installs nothing. Arguments go to pytest: `tests/run_cuda.sh -n 8`,
# where pytest-xdist is there, compiles for eight tests at once; `-k "not inductor and not cudagraphs"` for none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
"$python" - <<'CHECK'
import sys
try:
    import torch
except ModuleNotFoundError:
    sys.exit(f"{sys.executable} has no torch: activate the environment that drives the GPU, or set PYTHON")
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} of {sys.executable} sees no CUDA device")
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
CHECK
status=0
"$python" -m pytest -q -p no:benchmark -m cuda tests/cuda "$@" || status=$?
"$python" -m kfac_fx demo --device cuda || status=$?
exit "$status"
