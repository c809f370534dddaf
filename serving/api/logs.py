"""Log formats: readable lines, or one JSON object per line. Both include the fields of a request."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any, Literal


class TextFormatter(logging.Formatter):
    """`12:30:01 INFO serving.requests request request_id=... status=200`"""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={value}" for name, value in getattr(record, "fields", {}).items())
        line = f"{clock} {record.levelname:<7} {_escaped(record.getMessage() + fields)}"
        if record.exc_info is None:
            return line
        return "\n".join([line, *map(_escaped, self.formatException(record.exc_info).splitlines())])


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the fields of the request."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info is not None:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up_logging(form: Literal["text", "json"]) -> None:
    """Sends the program's and the HTTP server's logs to stderr in this format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name, level in (("serving", logging.INFO), ("checkpoints", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def _escaped(text: str) -> str:
    """Returns `text` on one line, with control characters escaped, because paths and names come from clients."""
    return _CONTROL.sub(lambda control: control[0].encode("unicode_escape").decode(), text)
