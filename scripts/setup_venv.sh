#!/usr/bin/env bash
# Makes .venv and installs this tree into it with the pinned versions: setup_venv.sh EXTRAS, e.g. "demo" or "dev,demo".
# Quick when nothing changed: a stamp in .venv holds the hash of what the installation depends on.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:?usage: setup_venv.sh EXTRAS}

say() { printf '==> %s\n' "$*" >&2; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

served_python() { "$1" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 12)))' >/dev/null 2>&1; }

find_python() {
  local candidate
  for candidate in python3 python3.12 python3.11; do
    if served_python "$candidate"; then
      printf '%s' "$candidate"
      return
    fi
  done
  fail "Python 3.11 or 3.12 is needed; on Debian 12: apt install python3 python3-venv"
}

stamp_value() { # whatever changes this value makes the installation stale; the path, since an editable install holds it
  { pwd && .venv/bin/python -VV && cat pyproject.toml constraints.txt; } | sha256sum | cut -d ' ' -f 1
}

if ! served_python .venv/bin/python; then
  python=$(find_python)
  "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
    fail "this Python can't make virtual environments; on Debian: apt install python3-venv"
  say "making .venv with $("$python" -V)"
  rm -rf .venv
  "$python" -m venv .venv
fi

value=$(stamp_value)
for stamp in ".venv/.installed-$extras" ".venv/.installed-dev,demo"; do # the second has everything
  if [ "$(cat "$stamp" 2>/dev/null)" = "$value" ]; then exit 0; fi
done
say "installing greenlane[$extras] into .venv (several minutes the first time)"
.venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$extras]" >&2
printf '%s\n' "$value" >".venv/.installed-$extras"
