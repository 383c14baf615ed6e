"""`python -P -m engine_core engine | worker`: the engine core's processes."""

from __future__ import annotations

import sys

from engine_core.cli import main
from telemetry.output import flush_or_forget

status = main(sys.argv[1:])
flush_or_forget()
sys.exit(status)
