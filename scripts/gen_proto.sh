#!/usr/bin/env bash
# Regenerates the committed protobuf and gRPC modules under proto/greenlane (or under $1) from the .proto files.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-proto}
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
"$python" -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  proto/greenlane/engine/v1/engine.proto proto/greenlane/text/v1/text.proto
