#!/usr/bin/env bash
# Everything that needs a CUDA device, in one go (under five minutes): scripts/check_gpu.sh [python]
# Runs the tests marked `gpu` and the overhead benchmark on the device's host; needs torch with CUDA, pytest, and this
# checkout on the path. Prints what ran and where.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$python" - <<'PY'
import torch
assert torch.cuda.is_available(), "no CUDA device: nothing here can run"
print("torch", torch.__version__, "on", torch.cuda.get_device_name())
PY
timeout 240 "$python" -m pytest -q -m gpu -o filterwarnings=default tests
