#!/usr/bin/env bash
# What a machine with one CUDA GPU should tell, in order of worth, within a budget:
#
#     benchmarks/on_device.sh [folder] [seconds]
#
# Every part writes its JSON into the folder (default benchmarks/results) as it goes, and ends with an entry of
# on_device.json: its command, exit status, seconds and last output. So a run that is cut off loses nothing. A part that
# no longer fits into the seconds (default 540) is skipped, and its entry says so. Uses the active python3, or PYTHON;
# installs nothing. DEVICE=cpu QUICK=1 shows on any machine that every part runs: toys, no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
out=${1:-benchmarks/results}
budget=${2:-540}
quick=()
[[ -n ${QUICK:-} ]] && quick=(--quick)
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# note NAME STATUS SECONDS COMMAND...: an entry of on_device.json.
note() {
    "$python" - "$out/on_device.json" "$log" "$@" <<'NOTE'
import json, sys
from pathlib import Path

path, log = map(Path, sys.argv[1:3])
name, status, seconds, *command = sys.argv[3:]
record = json.loads(path.read_text()) if path.exists() else {}
output = log.read_text(errors="replace")[-20_000:]
record[name] = {"command": " ".join(command), "status": status, "seconds": int(seconds), "output": output}
path.write_text(json.dumps(record, indent=1) + "\n")
NOTE
}

# part NAME LEAST MOST COMMAND...: run a command if LEAST seconds are left, for at most MOST.
part() {
    local name=$1 least=$2 most=$3 start=$SECONDS status=0
    shift 3
    local left=$((budget - SECONDS))
    : >"$log"
    if ((left < least)); then
        echo "== $name: skipped, $left of the $least seconds that it needs are left"
        note "$name" "skipped: $left of the $least seconds that it needs were left" 0 "$@"
        return
    fi
    echo "== $name: $*"
    timeout --kill-after=5 $((left < most ? left : most)) "$@" >"$log" 2>&1 || status=$?
    tail -n 40 "$log"
    local said="exit $status"
    ((status == 124 || status == 137)) && said="stopped after $((SECONDS - start)) seconds"
    echo "== $name: $said, $((SECONDS - start)) seconds"
    note "$name" "$said" $((SECONDS - start)) "$@"
}

tests=("$python" -m pytest -v -p no:benchmark -p no:cacheprovider --tb=short -m cuda)
if "$python" -c "import xdist" 2>/dev/null; then
    several=(-n "${WORKERS:-8}")
    core="not inductor"
else # one after another: what compiles takes most of the time
    several=()
    core="not inductor and not cudagraphs"
fi
bases=benchmarks.decompositions

"$python" -c "import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU')"
part "steps of GPT-2" 30 100 "$python" -m benchmarks.device_step --device "$device" --models gpt2 --backends eager \
    --out "$out/device_step.json" "${quick[@]}"
part "steps of ResNet-50" 30 90 "$python" -m benchmarks.device_step --device "$device" --models resnet50 \
    --backends eager --out "$out/device_step.json" "${quick[@]}"
part "trainings" 25 100 "$python" -m benchmarks.device_training --device "$device" \
    --out "$out/device_training.json" "${quick[@]}"
part "tests with new bounds" 10 70 "${tests[@]}" tests/cuda/test_cuda.py tests/cuda/test_backends_on_cuda.py \
    -k "(those_of_the_cpu and (language or weight_norm)) or (twenty_steps and default)"
part "products of bases" 10 40 "$python" -m benchmarks.basis_products --device "$device" \
    --out "$out/basis_products.json" "${quick[@]}"
part "checks with and without TF32" 15 45 "$python" -m benchmarks.check_precision --device "$device" \
    --out "$out/check_precision.json" "${quick[@]}"
part "tests" 30 120 "${tests[@]}" "${several[@]}" tests/cuda -k "$core"
part "decompositions" 15 60 "$python" -m $bases --device "$device" --widths 768 2304 3072 --stacks 1 4 12 \
    --methods Cholesky eigh "orthogonal iteration" --seconds 35 --out "$out/decompositions_of_bases.json" "${quick[@]}"
echo "== $SECONDS seconds; the results are in $out"
