"""The lean sender once more, on uvloop, whose transports and timers are not asyncio's: `eventbus run` uses it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator

import pytest
import test_forward_hostile
import test_forward_http
from http_support import Server, a_sender
from test_forward_hostile import server  # noqa: F401 - a fixture

from eventbus.forward import Sender

uvloop = pytest.importorskip("uvloop")
# The hook that is to take the fixture's place is one for a whole session, not for one module.
pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy:pytest.PytestDeprecationWarning")


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy()  # type: ignore[no-any-return]


@pytest.fixture
async def sender(server: Server) -> AsyncIterator[Sender]:  # noqa: F811
    async with a_sender("lean", max_connections=5) as made:
        yield made


@pytest.fixture
def kind() -> str:
    return "lean"


# Its lookup of names cannot be replaced by a test; the rest must hold word for word.
_NOT_HERE = ("test_an_unknown_host_is_a_dns_failure",)
for _module in (test_forward_http, test_forward_hostile):
    for _name, _test in list(vars(_module).items()):
        if _name in _NOT_HERE or not _name.startswith("test_"):
            continue
        if {"sender", "kind"} & inspect.signature(_test).parameters.keys():
            globals()[_name] = _test


async def test_this_is_uvloop() -> None:
    """The fixture above has its effect."""
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
