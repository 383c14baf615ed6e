#!/usr/bin/env bash
# From nothing to a verdict: installs into .venv, checks format, lint and types, runs all CPU tests.
#   scripts/test.sh                     everything
#   scripts/test.sh --setup-only        the installation alone
#   scripts/test.sh tests/unit -k text  arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup_venv.sh dev,demo
if [ "${1:-}" = --setup-only ]; then exit 0; fi

# Idle torch threads that spin would steal the two cores from each other; no test asks the model hub.
export OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1
.venv/bin/ruff format --check
.venv/bin/ruff check
.venv/bin/mypy
exec .venv/bin/python -m pytest -m "not gpu" "$@"
