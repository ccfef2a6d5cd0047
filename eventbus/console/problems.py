"""The one shape of errors (RFC 9457): what happened, and what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from pydantic import ValidationError
from starlette.responses import Response
from typing_extensions import TypedDict

from eventbus.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    EventBusError,
    InvalidEvent,
    UnknownLetter,
    UnknownService,
)
from eventbus.redaction import redact

MEDIA_TYPE: Final = "application/problem+json"


class ProblemBody(TypedDict):
    """What a client reads."""

    type: str
    title: str
    status: int
    detail: str
    help: str


class Problem(Exception):
    """A request that is not carried out: `code` for programs, `detail` and `help` for people."""

    def __init__(
        self, status: int, code: str, detail: str, help: str = "", *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.help = status, code, detail, help
        self.headers = dict(headers or {})

    def body(self) -> ProblemBody:
        """The answer's body; whatever the texts quote, no secret is in it."""
        return {
            "type": f"urn:eventbus:problem:{self.code}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": redact(self.detail),
            "help": redact(self.help),
        }

    def response(self) -> Response:
        """The answer."""
        return Response(json.dumps(self.body()), self.status, self.headers, MEDIA_TYPE)


def of_error(error: EventBusError) -> Problem:
    """The problem an error of the bus stands for."""
    text = str(error)
    if isinstance(error, UnknownService):
        return Problem(404, "unknown-queue", text, "GET /admin/dlq/queues lists the queues there are")
    if isinstance(error, UnknownLetter):
        return Problem(404, "unknown-message", text, "it may have been re-driven or purged; list the messages again")
    if isinstance(error, (ConfigError, InvalidEvent)):
        return Problem(422, "not-possible", text, "correct the request; /openapi.json says what is allowed")
    if isinstance(error, BrokerUnavailable):
        return Problem(
            503, "broker-unavailable", text, "try again when the broker answers", headers={"retry-after": "5"}
        )
    if isinstance(error, BrokerError):
        return Problem(409, "broker-refused", text, "nothing was lost; see what the broker says and try again")
    return Problem(409, "refused", text)


def of_validation(error: ValidationError, where: str) -> Problem:
    """The problem with a query or a body that does not fit its model: all of it, on one line."""
    wrong = []
    for details in error.errors(include_url=False, include_input=False, include_context=False):
        path = ".".join(str(step) for step in details["loc"])
        wrong.append(f"{path}: {details['msg']}" if path else details["msg"])
    text = "; ".join(wrong[:10])
    return Problem(400, "bad-request", f"{where}: {text}", "correct the request; /openapi.json says what is allowed")
