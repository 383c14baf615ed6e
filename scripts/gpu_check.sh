#!/usr/bin/env bash
# Shows on one GPU what can be shown nowhere else; writes scripts/bench/results/h200-*.json*. See gpu_check.py --help.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root:$root/proto${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -P "$root/scripts/gpu_check.py" "$@"
