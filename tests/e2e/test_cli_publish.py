"""`eventbus publish`: one event, many events, and nobody who gets them."""

from __future__ import annotations

import json
import signal

import pytest

from eventbus import Bus, Delivery, Service

from .conftest import DEADLINE, Cli

URL = "sqlite:///bus.db"


async def received(cli: Cli, number: int) -> list[Delivery]:
    """What a service of prefix wms gets."""
    import anyio

    found: list[Delivery] = []
    service = Service("wms-reader")

    @service.on("#")
    async def keep(delivery: Delivery) -> None:
        found.append(delivery)

    async with Bus(f"sqlite:///{cli.folder}/bus.db") as bus, bus.serving(service):
        with anyio.fail_after(DEADLINE):
            while len(found) < number:
                await anyio.sleep(0.01)
    return found


@pytest.fixture
async def subscribed(cli: Cli) -> None:
    """bus.db with a service that gets events of prefix wms."""
    async with Bus(f"sqlite:///{cli.folder}/bus.db") as bus:
        await bus.provision(Service("wms-reader"))


async def test_one_event_with_all_its_attributes(cli: Cli, subscribed: None) -> None:
    """Everything that can be typed arrives, and the data to the byte."""
    text = '{"a": 1.50, "nome": "São"}'
    options = "--key k --tenant t --id i --correlation-id c --header shop=7 --header x=a=b --ttl 1h --source wms-api"
    done = cli("publish", "order.created", text, *options.split(), "--url", URL)
    assert (done.returncode, done.stdout, done.stderr) == (0, "published order.created i to wms\n", "")
    [delivery] = await received(cli, 1)
    event = delivery.event
    assert (event.type, event.key, event.tenant, event.id) == ("order.created", "k", "t", "i")
    assert (event.correlation_id, event.source) == ("c", "wms-api")
    assert (event.body, event.content_type) == (text.encode(), "application/json")
    assert dict(event.headers) == {"shop": "7", "x": "a=b"}
    assert event.expires_at is not None
    assert (event.expires_at - event.time).total_seconds() == 3600


async def test_data_from_standard_input_and_from_a_file(cli: Cli, subscribed: None) -> None:
    """`-` and `@file`."""
    cli.write("data.json", "[2]\n")
    assert cli("publish", "a", "-", "--prefix", "wms", "--url", URL, input="[1]\n").returncode == 0
    assert cli("publish", "a", "@data.json", "--prefix", "wms", env={"EVENTBUS_URL": URL}).returncode == 0
    assert cli("publish", "a", "--prefix", "wms", "--url", URL).returncode == 0
    assert [delivery.event.data for delivery in await received(cli, 3)] == [[1], [2], None]


def test_no_subscriber_is_said_and_is_no_error(cli: Cli) -> None:
    """The event went nowhere: the prefix, and how to choose another, is on stderr."""
    done = cli("publish", "a", "1", "--url", URL, "--json")
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert (result["status"], result["subscribed"], result["prefix"]) == ("stored", False, "default")
    assert "prefix 'default'" in done.stderr
    assert "--prefix" in done.stderr
    assert "--source" in done.stderr


@pytest.mark.parametrize(
    ("env", "options", "prefix"),
    [
        ({}, [], "default"),
        ({"EVENTBUS_SOURCE": "wms-api"}, [], "wms"),
        ({"EVENTBUS_SOURCE": "wms-api", "EVENTBUS_PREFIX": "crm"}, [], "crm"),
        ({"EVENTBUS_PREFIX": "crm"}, ["--source", "wms-api"], "wms"),
        ({"EVENTBUS_PREFIX": "crm"}, ["--source", "wms-api", "--prefix", "x"], "x"),
    ],
)
def test_to_whom(cli: Cli, env: dict[str, str], options: list[str], prefix: str) -> None:
    """What was typed goes before the environment, a prefix before a source."""
    done = cli("publish", "a", *options, "--url", URL, "--json", env=env)
    assert json.loads(done.stdout)["prefix"] == prefix


def test_settings_of_the_broker_from_the_environment(cli: Cli) -> None:
    """EVENTBUS_SQLITE__... works without a bus.toml too."""
    done = cli("publish", "a", "--url", URL, env={"EVENTBUS_SQLITE__LEASE": "soon"})
    assert done.returncode == 2
    assert "sqlite.lease = 'soon'" in done.stderr


async def test_lines(cli: Cli, subscribed: None) -> None:
    """Each line is one event; empty lines are none; no progress bar in a pipe."""
    cli.write("many.jsonl", "".join(f'{{"n": {n}}}\n\n' for n in range(1234)) + '{"n": 1234}')
    done = cli("publish", "n", "@many.jsonl", "--lines", "--prefix", "wms", "--url", URL, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"published": 1235, "prefix": "wms", "unsubscribed": 0}
    numbers = sorted(delivery.event.data["n"] for delivery in await received(cli, 1235))  # type: ignore[index]
    assert numbers == list(range(1235))


def test_a_file_where_the_type_belongs_is_no_success(cli: Cli) -> None:
    """Nothing would be published, and it would say so as if that was meant."""
    cli.write("events.jsonl", "{}\n")
    done = cli("publish", "--lines", "events.jsonl", "--prefix", "wms")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'events.jsonl' is a file, not a type: eventbus publish TYPE @events.jsonl --lines" in done.stderr


def test_lines_stop_at_a_bad_one(cli: Cli) -> None:
    """What stands before the bad line is published, and said to be."""
    done = cli("publish", "n", "--lines", "--url", URL, input="1\n2\n{oops\n4\n")
    assert done.returncode == 2
    assert done.stdout == "published 2 n to default\n"
    assert "error: line 3: the data is not JSON" in done.stderr
    assert "2 were published" in done.stderr


async def test_lines_are_published_as_they_come_and_ctrl_c_says_how_many(cli: Cli, subscribed: None) -> None:
    """A pipe that stays open: what came is published at once, and SIGINT ends the command cleanly."""
    process = cli.popen("publish", "n", "-", "--lines", "--prefix", "wms", "--url", URL)
    try:
        assert process.stdin is not None
        process.stdin.write("1\n2\n3\n")
        process.stdin.flush()
        await _until_ready(cli, 3)
        process.send_signal(signal.SIGINT)
        process.wait(DEADLINE)
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (1, "published 3 n to wms\n")
    assert "error: stopped; 3 were published" in err


async def _until_ready(cli: Cli, number: int) -> None:
    import anyio

    async with Bus(f"sqlite:///{cli.folder}/bus.db") as bus:
        with anyio.fail_after(DEADLINE):
            while (await bus.stats(Service("wms-reader"))).ready < number:
                await anyio.sleep(0.02)
