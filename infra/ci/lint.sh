#!/usr/bin/env bash
# Style, format, strict types of the four packages, and no registry's host in a commit.
set -euo pipefail
cd "$(dirname "$0")/../.."
. infra/ci/setup.sh
sync_environment
uv run --no-sync ruff check .
uv run --no-sync ruff format --check .
uv run --no-sync mypy
bash infra/ci/no-hosts.sh
