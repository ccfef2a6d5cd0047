"""The endpoint over a sender that plays a script: what it sends, what it makes of answers, when it does not send."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
from standardwebhooks.webhooks import Webhook

from eventbus.errors import ConfigError
from eventbus.event import Event
from eventbus.forward import BREAKER_OPEN, ENDPOINT_DOWN, Answer, Auth, Breaker, Endpoint, SendFailed, Signer
from eventbus.policy import DEFAULT_POLICY, Park, Policy, Requeue, Retry, RetryPolicy, decide, judge
from eventbus.settlement import Delivery, History
from eventbus.status import ConsumerStatus

URL = "http://127.0.0.1:9/events"
REFUSED = SendFailed("refused", "nobody listens", connected=False)


class ScriptedSender:
    """Answers by a function that a test may change; keeps what it was asked."""

    def __init__(self, answer: Callable[[], Answer]) -> None:
        self.answer = answer
        self.requests: list[tuple[str, dict[str, str], bytes, float]] = []
        self.closed = 0

    async def post(self, url: str, headers: Sequence[tuple[str, str]], body: bytes, *, timeout: float) -> Answer:
        self.requests.append((url, dict(headers), body, timeout))
        return self.answer()

    async def aclose(self) -> None:
        self.closed += 1


class Time:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def answering(status: int, **headers: str) -> ScriptedSender:
    return ScriptedSender(lambda: Answer(status, {name.replace("_", "-"): value for name, value in headers.items()}))


def failing(failure: BaseException = REFUSED) -> ScriptedSender:
    def fail() -> Answer:
        raise failure

    return ScriptedSender(fail)


def delivery(retries: int = 0, max_attempts: int = 11) -> Delivery:
    event = Event("order.created", {"n": 1}, id="o 1", source="/wms")
    return Delivery(event, "wms-cincout", "q", history=History(retries=retries), max_attempts=max_attempts)


async def test_an_event_is_posted_and_the_status_comes_back():
    """URL, timeout, CloudEvents headers and body go to the sender; its status is the outcome."""
    sender = answering(202)
    outcome = await Endpoint(URL, timeout="10s", sender=sender)(delivery())
    (request,) = sender.requests
    assert (request[0], request[2], request[3]) == (URL, b'{"n":1}', 10.0)
    assert request[1]["ce-type"] == "order.created"
    assert request[1]["x-eventbus-attempt"] == "1"
    assert outcome.status == 202


@pytest.mark.parametrize("sign", ["whsec_c2VjcmV0", ["whsec_bmV3", "whsec_c2VjcmV0"], Signer("whsec_c2VjcmV0")])
@pytest.mark.parametrize("mode", ["binary", "structured", "raw"])
async def test_a_signed_request_is_verified_by_the_official_package(mode, sign):
    """The signature is over the id and the body as they are sent."""
    sender = answering(200)
    await Endpoint(URL, mode=mode, sign=sign, sender=sender)(delivery())
    ((_, headers, body, _),) = sender.requests
    Webhook("whsec_c2VjcmV0").verify(body, headers)
    assert headers["webhook-id"] == headers["idempotency-key"] == "o%201"


async def test_the_authorization_is_sent_and_never_shown():
    """Neither the repr nor what an endpoint echoes back holds it."""
    sender = ScriptedSender(lambda: Answer(403, {"content-type": "text/plain"}, b"bad key s3cr3t-t0k3n"))
    endpoint = Endpoint(URL, auth=Auth.bearer("s3cr3t-t0k3n"), sign="whsec_c2VjcmV0", sender=sender)
    outcome = await endpoint(delivery())
    assert sender.requests[0][1]["authorization"] == "Bearer s3cr3t-t0k3n"
    assert outcome.reason == "bad key ***"
    assert "s3cr3t" not in repr(endpoint)
    assert "c2Vj" not in repr(endpoint)


async def test_no_answer_is_an_outcome_with_an_error():
    """The retry loop, by the rule for exceptions."""
    outcome = await Endpoint(URL, sender=failing())(delivery())
    assert outcome.error is REFUSED
    assert judge(outcome)[0] is ConsumerStatus.DROP
    assert isinstance(decide(outcome, delivery(), DEFAULT_POLICY), Retry)


async def open_breaker(endpoint: Endpoint) -> None:
    for _ in range(10):
        await endpoint(delivery())
    assert endpoint.breaker is not None
    assert endpoint.breaker.state == "open"


@pytest.mark.parametrize("sender", [failing(), answering(500), answering(503)], ids=["refused", "500", "503"])
async def test_ten_failures_open_the_breaker_and_events_wait_unsent(sender):
    """The eleventh is not sent; it is told to come back when the breaker opens, at no cost."""
    time = Time()
    endpoint = Endpoint(URL, sender=sender, now=time)
    await open_breaker(endpoint)
    sent = len(sender.requests)
    time.now += 2.0
    outcome = await endpoint(delivery(retries=10))
    assert len(sender.requests) == sent
    assert (outcome.verdict, outcome.reason) == (ConsumerStatus.REQUEUE, BREAKER_OPEN)
    assert outcome.retry_after == pytest.approx(3.0)
    settlement = decide(outcome, delivery(retries=10), DEFAULT_POLICY, now=time.now)
    assert isinstance(settlement, Requeue)
    assert 3.0 <= settlement.delay <= 3.75


@pytest.mark.parametrize("status", [200, 302, 400, 404, 409, 425, 429])
async def test_answers_below_500_never_open_it(status):
    """The endpoint is alive; what it thinks of events is another matter."""
    endpoint = Endpoint(URL, sender=answering(status))
    for _ in range(50):
        await endpoint(delivery())
    assert endpoint.breaker is not None
    assert endpoint.breaker.state == "closed"


async def test_a_good_probe_closes_it():
    """One event is sent when the time is up; after its success all are."""
    time, sender = Time(), answering(500)
    endpoint = Endpoint(URL, sender=sender, now=time)
    await open_breaker(endpoint)
    time.now += 5.0
    sender.answer = lambda: Answer(200, {})
    assert (await endpoint(delivery())).status == 200
    assert (await endpoint(delivery())).status == 200


@pytest.mark.parametrize("sender", [failing(), answering(502), answering(503), answering(504)])
async def test_an_endpoint_that_is_down_for_an_hour_parks_nothing(sender):
    """Not even a lonely event on its last attempt, which is every probe: a probe that finds nobody is free."""
    time = Time()
    endpoint = Endpoint(URL, sender=sender, now=time)
    await open_breaker(endpoint)
    end = time.now + 3600
    while time.now < end:
        outcome = await endpoint(delivery(retries=10))
        settlement = decide(outcome, delivery(retries=10), DEFAULT_POLICY, now=time.now)
        assert isinstance(settlement, Requeue)
        assert outcome.reason.startswith((BREAKER_OPEN, ENDPOINT_DOWN))
        time.now += settlement.delay
    assert 10 + 50 < len(sender.requests) < 10 + 75
    sender.answer = lambda: Answer(200, {})
    time.now += 60
    assert (await endpoint(delivery(retries=10))).status == 200


@pytest.mark.parametrize("kind", ["reset", "timeout"])
async def test_a_last_attempt_that_reached_the_endpoint_parks(kind):
    """The event was sent and may be what broke the connection: neighbours are not held up for it."""
    endpoint = Endpoint(URL, sender=failing(SendFailed(kind, "")))
    outcome = await endpoint(delivery(retries=2, max_attempts=3))
    assert isinstance(decide(outcome, delivery(retries=2, max_attempts=3), Policy(RetryPolicy(max_retries=2))), Park)
    assert endpoint.breaker is not None
    assert endpoint.breaker.state == "closed"


async def test_a_probe_that_is_answered_with_500_costs_its_attempt():
    """500 is the endpoint's word on this event: an event that always gets it is parked in the end."""
    time = Time()
    endpoint = Endpoint(URL, sender=answering(500), now=time)
    await open_breaker(endpoint)
    time.now += 5.0
    outcome = await endpoint(delivery(retries=10))
    assert (outcome.status, outcome.verdict) == (500, None)
    assert isinstance(decide(outcome, delivery(retries=10), DEFAULT_POLICY), Park)


async def test_a_failed_probe_waits_at_least_as_long_as_the_endpoint_asks():
    """Retry-After on a 503 counts beside the breaker's own time."""
    time = Time()
    endpoint = Endpoint(URL, sender=answering(503, retry_after="300"), now=time)
    await open_breaker(endpoint)
    time.now += 5.0
    assert (await endpoint(delivery())).retry_after == 300.0


async def test_the_verdict_header_counts_for_a_probe_too():
    """An endpoint that says park is obeyed, whatever the breaker's state."""
    time, sender = Time(), answering(503)
    endpoint = Endpoint(URL, sender=sender, now=time)
    await open_breaker(endpoint)
    time.now += 5.0
    sender.answer = lambda: Answer(503, {"x-eventbus-verdict": "park"})
    assert (await endpoint(delivery())).verdict is ConsumerStatus.PARK


async def test_one_probe_at_a_time():
    """While it is on its way the others wait a moment, unsent."""
    time, sender = Time(), answering(500)
    endpoint = Endpoint(URL, sender=sender, now=time)
    await open_breaker(endpoint)
    time.now += 5.0
    sent, release = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedSender):
        async def post(self, *args, **kwargs) -> Answer:
            sent.set()
            await release.wait()
            return Answer(200, {})

    endpoint._sender = Slow(sender.answer)
    probe = asyncio.create_task(endpoint(delivery()))
    await sent.wait()
    other = await endpoint(delivery())
    assert (other.reason, other.retry_after) == (BREAKER_OPEN, 1.0)
    release.set()
    assert (await probe).status == 200


@pytest.mark.parametrize("error", [asyncio.CancelledError(), RuntimeError("a bug in a sender")])
async def test_a_probe_that_ends_without_a_result_makes_room_for_the_next(error):
    """A cancelled probe, or a sender that breaks its contract, does not lock the endpoint out for ever."""
    time, sender = Time(), answering(500)
    endpoint = Endpoint(URL, sender=sender, now=time)
    await open_breaker(endpoint)
    time.now += 5.0
    sender.answer = failing(error).answer
    with pytest.raises(type(error)):
        await endpoint(delivery())
    sender.answer = lambda: Answer(200, {})
    assert (await endpoint(delivery())).status == 200


@pytest.mark.parametrize("off", [None, False])
async def test_without_a_breaker_every_event_is_sent(off):
    """What `breaker = false` in bus.toml comes to."""
    sender = answering(500)
    endpoint = Endpoint(URL, breaker=off, sender=sender)
    for _ in range(30):
        await endpoint(delivery())
    assert len(sender.requests) == 30


def test_a_breaker_of_ones_own_is_used():
    """Its numbers are a setting."""
    breaker = Breaker(failures=3)
    assert Endpoint(URL, breaker=breaker).breaker is breaker


async def test_a_shared_sender_is_used_and_left_open():
    """The bus makes one for all endpoints, and closes it itself."""
    shared, own = answering(200), answering(201)
    first, second = Endpoint(URL), Endpoint(URL, sender=own)
    for endpoint in (first, second):
        await endpoint.open(shared)
    assert (await first(delivery())).status == 200
    assert (await second(delivery())).status == 201
    for endpoint in (first, second):
        await endpoint.aclose()
    assert (shared.closed, own.closed) == (0, 0)


async def test_a_sender_made_by_the_endpoint_is_closed_by_it(monkeypatch):
    """Without a shared one it makes its own; opened again, it makes another."""
    made: list[ScriptedSender] = []

    def make(*settings: object) -> ScriptedSender:
        made.append(answering(200))
        return made[-1]

    monkeypatch.setattr("eventbus.forward.endpoint.default_sender", make)
    endpoint = Endpoint(URL)
    for _ in range(2):
        await endpoint.open()
        await endpoint.open()
        await endpoint(delivery())
        await endpoint.aclose()
        await endpoint.aclose()
    assert [sender.closed for sender in made] == [1, 1]


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("", "whole URL"),
        ("/events", "whole URL"),
        ("billing.internal/events", "whole URL"),
        ("ftp://billing.internal/events", "whole URL"),
        ("http:///events", "whole URL"),
        ("http://:80/events", "whole URL"),
        ("https://bob:hunter2@billing.internal/", "set auth"),
        ("https://hunter2@billing.internal/", "set auth"),
        ("https://bob:hun/ter2@billing.internal/", ""),
        ("http://billing.internal:99999/", "not a URL"),
        ("http://billing.internal:port/", "not a URL"),
        ("http://[::1/", "not a URL"),
        ("http://billing.internal/a b", "no spaces"),
        ("http://billing.internal/\r\nx-evil: 1", "no spaces"),
        ("http://billing.internal/#part", "after '#'"),
        (None, "no spaces"),
    ],
)
def test_a_url_that_cannot_be_posted_to_is_refused_with_what_to_do(url, advice):
    """At construction, in one line, without the password."""
    with pytest.raises(ConfigError) as caught:
        Endpoint(url)
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "ter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://[::1]:8443/a?b=c", "http://bücher.example/é"])
def test_any_whole_url_is_taken(url):
    """Names, addresses, ports, queries."""
    assert Endpoint(url).url == url


def test_the_repr_shows_where_but_no_query():
    """Queries hold tokens more often than not."""
    assert (
        repr(Endpoint("https://b.internal/e?key=abc"))
        == "Endpoint('https://b.internal/e?***', timeout=30, mode='binary')"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout": 0},
        {"timeout": "soon"},
        {"mode": "bundle"},
        {"egress": "some"},
        {"sender": "urllib"},
        {"mode": ""},
        {"sign": ""},
        {"sign": []},
    ],
)
def test_impossible_settings_are_refused(settings):
    """At construction, not with the first event."""
    with pytest.raises(ConfigError):
        Endpoint(URL, **settings)


def test_no_http_client_is_imported_with_the_endpoint():
    """A service without endpoints does not pay for aiohttp, nor need it."""
    code = "import sys, eventbus.forward.endpoint; print([m for m in ('aiohttp', 'httpx') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("library", ["aiohttp", "httpx"])
def test_a_missing_client_says_what_to_install(monkeypatch, library):
    """An ImportError becomes one line of advice."""
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"eventbus.forward.{library}_sender", raising=False)
    with pytest.raises(ConfigError, match=r"eventbus-core\[http\]"):
        __import__(f"eventbus.forward.{library}_sender")


class Gate(ScriptedSender):
    """Holds every request until it is let through."""

    def __init__(self) -> None:
        super().__init__(lambda: Answer(200, {}))
        self.held: list[asyncio.Future[None]] = []
        self.most = 0

    async def post(self, *args, **kwargs) -> Answer:
        turn = asyncio.get_running_loop().create_future()
        self.held.append(turn)
        self.most = max(self.most, len(self.held))
        try:
            await turn
        finally:
            self.held.remove(turn)
        return Answer(200, {})


async def turns(number: int = 10) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def came_back() -> tuple[Endpoint, Gate, Time]:
    """An endpoint whose breaker has closed a moment ago."""
    time, sender = Time(), answering(500)
    endpoint = Endpoint(URL, sender=sender, now=time)
    await open_breaker(endpoint)
    time.now += 5.0
    sender.answer = lambda: Answer(200, {})
    await endpoint(delivery())
    gate = Gate()
    endpoint._sender = gate
    return endpoint, gate, time


async def test_those_who_waited_do_not_overrun_an_endpoint_that_came_back():
    """Of a hundred calls one is sent, then with every success a few more; all of them in the end."""
    endpoint, gate, _ = await came_back()
    calls = [asyncio.create_task(endpoint(delivery())) for _ in range(100)]
    await turns()
    assert len(gate.held) == 1
    seen = []
    async with asyncio.timeout(10):
        while not all(call.done() for call in calls):
            seen.append(len(gate.held))
            for turn in list(gate.held):
                turn.set_result(None)
            await turns()
    assert [call.result().status for call in calls] == [200] * 100
    assert seen[:6] == [1, 1, 1, 1, 2, 2]
    assert gate.most <= 26


async def test_a_call_waits_for_its_turn_only_so_long(monkeypatch):
    """Then its event waits elsewhere, at no cost; the route's place is free for another."""
    monkeypatch.setattr("eventbus.forward.endpoint._TURN", 0.01)
    endpoint, gate, _ = await came_back()
    first = asyncio.create_task(endpoint(delivery()))
    await turns()
    outcome = await endpoint(delivery())
    assert (outcome.verdict, outcome.waiting) == (ConsumerStatus.REQUEUE, True)
    gate.held[0].set_result(None)
    assert (await first).status == 200


async def test_a_call_that_is_called_off_in_line_or_at_the_gate_leaves_its_place():
    """A shutdown: the next one gets the turn."""
    endpoint, gate, _ = await came_back()
    calls = [asyncio.create_task(endpoint(delivery())) for _ in range(4)]
    await turns()
    calls[1].cancel()  # in line
    calls[0].cancel()  # at the gate
    await turns()
    assert len(gate.held) == 1
    gate.held[0].set_result(None)
    await turns()
    gate.held[0].set_result(None)
    assert [end.status for end in await asyncio.gather(*calls[2:])] == [200, 200]


async def test_the_state_is_told_in_logs_and_can_be_asked(caplog):
    """Opened with why and for how long, closed again; no secret of the URL."""
    time, sender = Time(), failing()
    endpoint = Endpoint(f"{URL}?token=hunter2", sender=sender, now=time)
    assert (endpoint.state.breaker, endpoint.state.failures) == ("closed", 0)
    with caplog.at_level("INFO", "eventbus"):
        await open_breaker(endpoint)
        assert (endpoint.state.breaker, endpoint.state.probe_at) == ("open", time.now + 5.0)
        time.now += 5.0
        sender.answer = lambda: Answer(200, {})
        await endpoint(delivery())
    assert (endpoint.state.breaker, endpoint.state.limit) == ("closed", 1)
    opened, closed = caplog.records
    assert (opened.event, closed.event) == ("breaker_opened", "breaker_closed")
    assert opened.fields == {  # of an endpoint alone; a route's also says its service and type
        "endpoint": f"{URL}?***",
        "error": "refused: nobody listens",
        "probe_in": 5.0,
    }
    assert Endpoint(URL, breaker=False).state.breaker == "off"


async def test_many_calls_that_fail_at_once_open_the_breaker_once_in_the_logs(caplog):
    """Calls that were under way when it opened say nothing of it again."""
    gate = Gate()
    endpoint = Endpoint(URL, sender=gate, now=Time())
    calls = [asyncio.create_task(endpoint(delivery())) for _ in range(64)]
    await turns()
    assert len(gate.held) == 64
    with caplog.at_level("INFO", "eventbus"):
        for held in gate.held:
            held.set_exception(REFUSED)
        await asyncio.gather(*calls)
    assert [record.event for record in caplog.records] == ["breaker_opened"]


async def test_a_status_that_does_not_exist_is_no_answer():
    """Whatever a sender lets through."""
    outcome = await Endpoint(URL, sender=answering(999))(delivery())
    assert isinstance(outcome.error, SendFailed)
    assert judge(outcome)[0] is ConsumerStatus.DROP
