"""Secrets in an error text reach neither the dead letter, nor the logs, nor the command line."""

from __future__ import annotations

import json
import logging

import anyio
import pytest

from eventbus import Bus, Event, RetryPolicy, Service, park

from .conftest import DEADLINE, Cli

URL = ("--url", "sqlite:///bus.db")
SECRETS = {
    "a password in a URL": ("cannot reach postgres://app:hunter2secret@db.internal/orders", "hunter2secret"),
    "a bearer token": ("upstream refused Authorization: Bearer abc.DEF-123_456", "abc.DEF-123_456"),
    "a signed URL": (
        "GET https://files.example/x?X-Amz-Signature=0a1b2c3d4e5f&X-Amz-Date=1 gave 403",
        "0a1b2c3d4e5f",
    ),
    "a query with a SAS signature": ("PUT https://s.blob.example/c?sv=1&sig=Zm9vYmFy%3D failed", "Zm9vYmFy%3D"),
}


class Failing:
    """A service whose handler raises, or answers, with the text; once retried and once parked at once."""

    def __init__(self, text: str) -> None:
        self.service = Service("wms-a", retry=RetryPolicy(max_retries=1, delay=0.0))

        @self.service.on("raise")
        async def fail(event: Event) -> None:
            raise ConnectionError(text)

        @self.service.on("answer")
        async def answer(event: Event) -> object:
            return park(text)


@pytest.mark.parametrize(("text", "secret"), SECRETS.values(), ids=SECRETS)
async def test_no_secret_of_an_error_is_told(
    cli: Cli, caplog: pytest.LogCaptureFixture, text: str, secret: str
) -> None:
    """x-final-error and every other header, log texts, their fields and tracebacks, and all that the CLI prints."""
    caplog.set_level(logging.DEBUG)
    service = Failing(text).service
    async with Bus(f"sqlite:///{cli.folder}/bus.db", source="wms-x") as bus, bus.serving(service):
        for type in ("raise", "answer"):
            await bus.publish(type, id=type)
        letters = bus.dead_letters(service)
        with anyio.fail_after(DEADLINE):
            while await letters.count() < 2:
                await anyio.sleep(0.01)
        for letter in [letter async for letter in letters.all()]:
            assert letter.error
            assert "***" in letter.error
            assert secret not in json.dumps(letter.row())
            assert secret not in repr(letter.story)
            assert secret not in repr(letter.entry()) + repr(letter.dlq_metadata())
        assert secret not in repr(await letters.stats("fingerprint"))
    assert len(caplog.records) > 2
    for record in caplog.records:
        assert secret not in record.getMessage()
        assert secret not in repr(record.__dict__.get("fields"))
        assert secret not in logging.Formatter().format(record)
    for command in (["list"], ["show", "raise"], ["stats", "--by", "fingerprint"], ["export"]):
        for form in ([], ["--json"]):
            name, *rest = command
            done = cli("dlq", name, "wms-a", *rest, *URL, *form)
            assert done.returncode == 0
            assert secret not in done.stdout + done.stderr


def test_a_running_service_logs_no_secret(cli: Cli) -> None:
    """The process that a user starts, tracebacks and causes included."""
    text, secret = SECRETS["a password in a URL"]
    cli.write(
        "app.py",
        "from eventbus import RetryPolicy, Service\n"
        "wms = Service('wms-a', retry=RetryPolicy(max_retries=0))\n"
        "@wms.on('#')\n"
        "async def fail(event: object) -> None:\n"
        f"    raise ConnectionError({text!r}) from ValueError({text!r})\n",
    )
    worker = cli.start("run", "app:wms", *URL, "--log", "json")
    worker.wait_for("started")
    assert cli("publish", "a", *URL, "--source", "wms-x").returncode == 0
    worker.wait_for("message_parked")
    assert worker.end() == 0
    assert secret not in "".join(worker.text)


def test_a_url_with_a_password_is_never_printed(cli: Cli) -> None:
    """Not when the broker is not reachable, and not when the URL is wrong."""
    urls = (
        "amqp://app:hunter2secret@127.0.0.1:1/",
        "nonsense://app:hunter2secret@host",
        "redis://:hunter2secret@127.0.0.1:1",
    )
    for url in urls:
        done = cli("dlq", "count", "wms-a", "--url", url)
        assert done.returncode in (2, 3)
        assert "hunter2secret" not in done.stdout + done.stderr
