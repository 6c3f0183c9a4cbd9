#!/usr/bin/env bash
# Everything that needs a GPU: the CUDA tests, then the demo. Uses the active python3, not .venv, because a GPU machine
# brings its own torch; installs nothing. Arguments go to pytest, e.g. `tests/run_cuda.sh -k optimizer`.
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
"$python" -m pytest -q -m cuda "$@"
"$python" -m kfac_fx.cli demo --device cuda
