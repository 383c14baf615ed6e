"""One JSON line a log record on stderr: time, level, logger, message, and of an exception its type and places.

Owns the format. An exception's own text is left out, whoever logged it: it may quote a request.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from frontend.api_errors import where

NOISY = ("uvicorn", "asyncio", "grpc", "httpcore", "urllib3", "filelock")
"""Libraries whose informative records tell nothing about this server."""


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = where(record.exc_info[1])
        return json.dumps(line, default=str)


def configure(level: str) -> None:
    """Send this process's records of `level` and above to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
