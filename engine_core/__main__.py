"""`python -P -m engine_core engine | worker`: the engine core's processes."""

from __future__ import annotations

import sys

from engine_core.cli import main

sys.exit(main(sys.argv[1:]))
