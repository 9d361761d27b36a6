#!/usr/bin/env bash
# Installs all that the tests need and runs them: the README's second command.
# Arguments go to pytest, as in `infra/ci/test.sh tests/data -x`.
set -euo pipefail
cd "$(dirname "$0")/../.."
. infra/ci/setup.sh
install_browser
sync_environment
# One thread a worker: two workers share two cores, and results do not depend on the machine.
export OMP_NUM_THREADS=1
uv run --no-sync pytest -n 2 --dist worksteal -m "not gpu" "$@"
