"""Logs of `eventbus run`: lines for people, or JSON objects, on stderr."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Literal, TypeAlias

from eventbus.cli.output import clean
from eventbus.redaction import redact

LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


def configure(form: LogFormat, level: LogLevel) -> None:
    """Send everything that is logged, by the bus and by the handlers, to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class TextLines(logging.Formatter):
    """`12:00:00.123 WARNING retry_scheduled service=wms-cincout ...`"""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback below it if there is one."""
        moment = datetime.fromtimestamp(record.created).astimezone()
        name = "" if record.name == "eventbus" else f"{record.name}: "
        text = f"{moment:%H:%M:%S}.{int(record.msecs):03d} {record.levelname:7} {name}{clean(record.getMessage())}"
        if record.exc_info and record.exc_info[0] is not None:
            text += "\n" + self.formatException(record.exc_info)
        return redact(text)


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, event, and the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        """The object."""
        row: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": os.getpid(),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, Mapping):
            row["event"] = getattr(record, "event", record.getMessage())
            row.update((name, _redacted(value)) for name, value in fields.items() if value is not None)
        else:
            row["message"] = redact(record.getMessage())
        if record.exc_info and record.exc_info[0] is not None:
            row["exception"] = redact(self.formatException(record.exc_info))
        return json.dumps(row, ensure_ascii=False, default=str)


def _redacted(value: object) -> object:
    return redact(value) if isinstance(value, str) else value
