"""One JSON line a log record on stderr: time, level, logger, event, and fields that are ids, lengths and causes.

Owns the format. No caller may pass prompt text, token ids or generated text.
"""

from __future__ import annotations

import json
import logging
import sys
import time

LEVELS = ("debug", "info", "warning", "error")


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object; `fields` given through `event` stand beside the standard keys."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str) -> None:
    """Send this process's records of `level` and above to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def event(logger: logging.Logger, level: int, name: str, **fields: object) -> None:
    """Log a named event with its fields."""
    logger.log(level, name, extra={"fields": fields})
