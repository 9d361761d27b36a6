#!/usr/bin/env bash
# Runs the fused kernels on a small layer and router under compute-sanitizer: memcheck, then racecheck.
# Needs a CUDA GPU. Arguments: a Python (default: python3). COMPUTE_SANITIZER names another tool.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${1:-python3}"
tool="${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}"
if [ ! -x "$tool" ]; then
  echo "there is no compute-sanitizer at $tool; name it in COMPUTE_SANITIZER" >&2
  exit 2
fi
# Torch keeps memory it has freed, which would hide a read past the end of a tensor.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 NMOE_KERNELS_TUNING=off
# Compiled before, so that the tool watches kernels and not a compiler.
"$python" infra/bench/small_run.py
for check in memcheck racecheck; do
  echo "== $check"
  "$tool" --tool "$check" --error-exitcode 9 --print-limit 20 "$python" infra/bench/small_run.py
done
