#!/usr/bin/env bash
# From nothing to a verdict: installs into .venv, checks format, lint and types, runs all CPU tests.
#   scripts/test.sh                     everything
#   scripts/test.sh --setup-only        the installation alone
#   scripts/test.sh tests/unit -k text  arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

need_chromium() { # the tests of the page drive Debian's; 113 MB to fetch, 414 MB installed, 17 s
  local install='apt-get install -y --no-install-recommends chromium'
  if [ -x /usr/bin/chromium ]; then return; fi
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || fail "tests/e2e/test_page.py needs Chromium: $install"
  printf '==> installing Chromium\n' >&2
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive $install; } >&2 || fail "Chromium can't be had: $install"
}

bash scripts/setup_venv.sh dev,demo
need_chromium
if [ "${1:-}" = --setup-only ]; then exit 0; fi

# Idle torch threads that spin would steal the two cores from each other; no test asks the model hub.
export OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1
.venv/bin/ruff format --check
.venv/bin/ruff check
.venv/bin/mypy
exec .venv/bin/python -m pytest -m "not gpu" "$@"
