"""Log set-up. Nothing here or in the server logs prompts, answers or keys."""

from __future__ import annotations

import json
import logging
import sys
import time

_TEXT = "%(asctime)s %(levelname)-7s %(name)s  %(message)s"

LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
"""Accepted level names; ``trace`` is uvicorn's and means debug here."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line for ``record``."""
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging(level: str = "info", json_lines: bool = False) -> None:
    """Send Qiao's and uvicorn's log to standard error. Calling it again replaces the handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json_lines else logging.Formatter(_TEXT, datefmt="%H:%M:%S"))
    number = logging.DEBUG if level == "trace" else getattr(logging, level.upper())
    # uvicorn's information lines repeat what the server says itself
    for name, lowest in (("qiao", 0), ("uvicorn", logging.WARNING if number >= logging.INFO else 0)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(max(number, lowest))
        logger.propagate = False
