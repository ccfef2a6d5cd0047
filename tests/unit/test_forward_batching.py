"""Many events in one POST: the request, an answer for each or one for all, and which batches are halved."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from standardwebhooks.webhooks import Webhook

from eventbus import Service
from eventbus.event import Event
from eventbus.forward import Answer, Endpoint, SendFailed
from eventbus.forward.batching import build_batch, outcomes_of_answer, worth_halving
from eventbus.policy import judge
from eventbus.service import BatchWindow
from eventbus.settlement import Delivery, History
from eventbus.status import ConsumerStatus, Outcome
from eventbus.testing import TestBus

URL = "http://127.0.0.1:9/events"
JSON = {"content-type": "application/json"}


def delivery(id: str = "1", data: object = None, retries: int = 0) -> Delivery:
    event = Event("order.created", data if data is not None else {"id": id}, id=id, source="/wms", tenant="acme")
    return Delivery(event, "wms-cincout", "q", history=History(retries=retries), max_attempts=3)


def answered(entries: object, status: int = 200) -> Answer:
    return Answer(status, JSON, json.dumps(entries).encode())


def test_the_official_package_reads_every_event_of_a_batch():
    """Each element is a structured CloudEvent of its own, with its attempt beside its attributes."""
    headers, body = build_batch([delivery("a b", {"n": 1.10}), delivery("2", retries=2)])
    assert dict(headers)["content-type"] == "application/cloudevents-batch+json"
    assert dict(headers)["x-eventbus-batch-size"] == "2"
    assert dict(headers)["x-eventbus-service"] == "wms-cincout"
    first, second = json.loads(body)
    assert (first["eventbusattempt"], first["eventbusmaxattempts"], first["eventbuslastattempt"]) == (1, 3, False)
    assert (second["eventbusattempt"], second["eventbuslastattempt"]) == (3, True)
    read = [
        from_http_event(HTTPMessage({"content-type": "application/cloudevents+json"}, json.dumps(entry).encode()))
        for entry in (first, second)
    ]
    assert [event.get_id() for event in read] == ["a b", "2"]
    assert read[0].get_data() == {"n": 1.1}
    assert read[0].get_extension("tenant") == "acme"


def test_an_extension_cannot_speak_of_the_attempt():
    """What we say of it stands there once, whatever the publisher calls its own extensions."""
    event = Event("t", {"n": 1}, source="/", extensions={"eventbusattempt": "9", "colour": "red"})
    _, body = build_batch([Delivery(event, "svc", "q")])
    [pairs] = json.loads(body, object_pairs_hook=list)
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names))
    assert (dict(pairs)["eventbusattempt"], dict(pairs)["colour"]) == (1, "red")


def test_bodies_that_are_not_json_travel_as_base64():
    """A batch is JSON, whatever its events are."""
    event = Event("t", b"\x00\xff", content_type="application/octet-stream", source="/")
    _, body = build_batch([Delivery(event, "svc", "q")])
    assert json.loads(body)[0]["data_base64"] == "AP8="


def test_the_key_of_a_batch_is_that_of_its_events():
    """The same events have the same idempotency key, others another one."""
    keys = [dict(build_batch(batch)[0])["idempotency-key"] for batch in ([delivery("1")], [delivery("1", retries=1)])]
    assert keys[0] == keys[1]
    assert dict(build_batch([delivery("2")])[0])["idempotency-key"] != keys[0]


def test_an_answer_for_each():
    """Status, error text, Retry-After and verdict of its own; in whatever order."""
    batch = [delivery("1"), delivery("2"), delivery("3"), delivery("4")]
    answer = answered(
        [
            {"id": "4", "status": 422, "verdict": "park", "error": {"code": 7}},
            {"id": "2", "status": 429, "retry_after": 9},
            {"id": "1", "status": 201},
            {"id": "3", "status": 500, "error": "no  db; password=hunter2"},
            {"id": "stranger", "status": 500},
        ]
    )
    outcomes = outcomes_of_answer(answer, batch, now=0.0)
    assert outcomes == [
        Outcome(status=201),
        Outcome(status=429, retry_after=9.0),
        Outcome(status=500, reason="no db; password=***"),
        Outcome(status=422, verdict=ConsumerStatus.PARK, reason='{"code": 7}'),
    ]


def test_an_event_that_is_left_out_is_not_done():
    """Whoever speaks of some must speak of all: silence is no success."""
    outcomes = outcomes_of_answer(answered([{"id": "1", "status": 200}]), [delivery("1"), delivery("2")], now=0.0)
    assert isinstance(outcomes, list)
    assert judge(outcomes[1])[0] is ConsumerStatus.DROP
    assert "leaves this event out" in outcomes[1].reason


@pytest.mark.parametrize(
    "entries",
    [[], [1, 2], [{"id": "1"}], [{"status": 200}], [{"id": "1", "status": "ok"}], [{"id": "1", "status": True}], {}],
)
def test_another_list_is_one_answer_for_all(entries):
    """An endpoint may answer with whatever JSON it likes: only a list of ids and statuses is one for each."""
    outcomes = outcomes_of_answer(answered(entries, 202), [delivery("1")], now=0.0)
    assert outcomes == Outcome(status=202)


@pytest.mark.parametrize("body", [b'[{"id": "1", "status": 2', b"[" + b" " * 64 * 1024])
def test_a_broken_list_is_no_success(body):
    """Cut off in the middle, by the endpoint or by our limit: nobody knows what it wanted to say."""
    outcome = outcomes_of_answer(Answer(200, JSON, body), [delivery("1")], now=0.0)
    assert isinstance(outcome, Outcome)
    assert isinstance(outcome.error, SendFailed)
    assert judge(outcome)[0] is ConsumerStatus.DROP


@pytest.mark.parametrize(
    ("outcome", "halved"),
    [
        (Outcome(status=200), False),
        (Outcome(status=400), True),
        (Outcome(status=413), True),
        (Outcome(status=500), True),
        (Outcome(status=307), True),
        *((Outcome(status=status), False) for status in (409, 425, 429, 502, 503, 504)),
        (Outcome(status=400, verdict=ConsumerStatus.PARK), False),
        (Outcome(error=SendFailed("refused", "x")), False),
    ],
)
def test_what_one_event_may_have_caused_is_halved(outcome, halved):
    """Not what tells how the endpoint is, and not what it said in so many words."""
    assert worth_halving(outcome) is halved


class Batches:
    """A sender that answers by a function of the events of a batch, and keeps what was sent."""

    def __init__(self, answer: Callable[[list[str]], Answer]) -> None:
        self.answer = answer
        self.sent: list[list[str]] = []
        self.requests: list[tuple[dict[str, str], bytes]] = []

    async def post(self, url: str, headers: Sequence[tuple[str, str]], body: bytes, *, timeout: float) -> Answer:
        ids = [entry["id"] for entry in json.loads(body)]
        self.sent.append(ids)
        self.requests.append((dict(headers), body))
        return self.answer(ids)

    async def aclose(self) -> None: ...


def forwarding(**options: object) -> Service:
    service = Service("wms-cincout")
    service.forward("#", to=URL, mode="batch", **options)  # type: ignore[arg-type]
    return service


async def publish(bus: TestBus, number: int) -> None:
    await bus._buses["wms"].publish_many([Event("t", {}, id=str(count), source="/") for count in range(number)])
    await bus.settle()


async def test_a_hundred_events_are_one_post_and_the_rest_waits_for_its_window():
    """Size and time are those of the batch window."""
    sender = Batches(lambda ids: Answer(200, {}))
    async with TestBus(forwarding(batch=BatchWindow(size=100, timeout=2.0)), sender=sender) as bus:
        await publish(bus, 250)
        assert sorted(map(len, sender.sent)) == [100, 100]
        await bus.advance(2)
        assert sorted(map(len, sender.sent)) == [50, 100, 100]
        assert not bus.parked


async def test_each_event_of_a_batch_has_its_own_fate():
    """Done, tried again, parked; the retry comes in another batch."""

    def answer(ids: list[str]) -> Answer:
        statuses = {"0": 200, "1": 404, "2": 500 if len(ids) > 1 else 200}
        return answered([{"id": id, "status": statuses[id], "error": f"about {id}"} for id in ids])

    sender = Batches(answer)
    async with TestBus(forwarding(status={404: "park"}), sender=sender) as bus:
        await publish(bus, 3)
        await bus.advance(1)
        assert [(letter.id, letter.error, letter.status) for letter in bus.parked] == [("1", "404: about 1", 404)]
        await bus.advance(10)
        assert sender.sent == [["0", "1", "2"], ["2"]]


async def test_one_bad_event_does_not_spoil_the_others():
    """A batch that is refused is halved until the one is found that is refused alone."""
    sender = Batches(lambda ids: Answer(400 if "5" in ids else 200, {}))
    async with TestBus(forwarding(status={400: "park"}), sender=sender) as bus:
        await publish(bus, 8)
        await bus.advance(1)
        assert [(letter.id, letter.status) for letter in bus.parked] == [("5", 400)]
        # The first half of eight was fine, so the other is not sent as a whole again.
        assert [len(ids) for ids in sender.sent] == [8, 4, 2, 1, 1, 2]


async def test_fail_all_does_not_halve():
    """One answer for all, as it stands."""
    sender = Batches(lambda ids: Answer(400 if "5" in ids else 200, {}))
    service = forwarding(status={400: "park"}, batch=BatchWindow(size=100, on_error="fail-all"))
    async with TestBus(service, sender=sender) as bus:
        await publish(bus, 8)
        await bus.advance(1)
        assert len(bus.parked) == 8
        assert len(sender.sent) == 1


async def test_a_batch_is_signed_as_a_whole():
    """The official package verifies the bytes that were sent."""
    sender = Batches(lambda ids: Answer(200, {}))
    async with TestBus(forwarding(sign="whsec_c2VjcmV0"), sender=sender) as bus:
        await publish(bus, 3)
        await bus.advance(1)
    ((headers, body),) = sender.requests
    # The clock of a test bus stands still, at about now.
    Webhook("whsec_c2VjcmV0").verify(body, headers)


async def test_an_open_breaker_holds_batches_back_at_no_cost():
    """Ten failed posts, then silence, then one probe."""

    def fail(ids: list[str]) -> Answer:
        raise SendFailed("refused", "nobody", connected=False)

    sender = Batches(fail)
    async with TestBus(forwarding(batch=BatchWindow(size=1)), sender=sender) as bus:
        await publish(bus, 100)
        assert len(sender.sent) in (10, 11)  # two at a time
        await bus.advance("1h")
        assert not bus.parked
        sender.answer = lambda ids: Answer(200, {})
        await bus.advance("10m")
        assert (await bus._buses["wms"].stats("wms-cincout")).ready == 0
        assert {id for ids in sender.sent for id in ids} == {str(count) for count in range(100)}
        assert not bus.parked


def test_batch_settings_need_batch_mode():
    """A window without batches would be ignored, and nothing is ignored."""
    with pytest.raises(Exception, match="goes with mode='batch' only"):
        Service("a-b").forward("#", to=URL, batch=BatchWindow())


def test_a_batch_endpoint_says_so():
    """In its repr."""
    assert repr(Endpoint(URL, mode="batch")).endswith("mode='batch')")
