#!/usr/bin/env bash
# Shows on one GPU what can be shown nowhere else; writes scripts/bench/results/h200-*. See scripts/gpu_check.sh --help.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python=python3
if [ -x "$root/.venv/bin/python" ]; then python="$root/.venv/bin/python"; fi
export PYTHONPATH="$root:$root/proto${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$python" -P "$root/scripts/gpu_check.py" "$@"
