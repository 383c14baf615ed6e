#!/usr/bin/env bash
# From nothing to an answer: installs into .venv, prepares SmolLM2-135M-Instruct, serves it, asks, shows what ran, stops.
#   scripts/demo.sh                     asks for the capital of France
#   scripts/demo.sh "another question"
#   scripts/demo.sh --keep              leaves the server up and tells how to talk to it
set -euo pipefail
cd "$(dirname "$0")/.."
case " $* " in *" -h "* | *" --help "*)
  sed -n '2,5s/^# //p' scripts/demo.sh
  exit 0 ;;
esac

bash scripts/setup_venv.sh demo
model=.cache/smollm2-135m-instruct
.venv/bin/python scripts/prepare_smollm2.py --target "$model" >/dev/null
exec .venv/bin/python scripts/demo.py --model "$model" "$@"
