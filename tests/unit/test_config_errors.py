"""bus.toml: everything that can be wrong is one line: file, key, value, what is allowed. Secrets are never shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eventbus import ConfigError
from eventbus.config import load

SERVICE = "[services.wms-a]\n"
FORWARD = '[[services.wms-a.routes]]\non = "a"\nforward = "http://127.0.0.1/e"\n'
HANDLER = '[[services.wms-a.routes]]\non = "a"\nhandler = "app_errors:one"\n'
BATCH = HANDLER + "batch = { size = 5 }\n"
TOKEN = f'[[admin.tokens]]\nname = "ops"\nrole = "viewer"\nhash = "sha256:{"0" * 64}"\n'
DURATION = "not a duration; write '5s', '250ms', '1h30m' or a number of seconds"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def problem(text: str, env: dict[str, str] | None = None) -> str:
    if "url =" not in text:
        text = f'url = "memory://"\n{text}'
    Path("bus.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load("bus.toml", env or {}).services()
    return str(caught.value)


TABLE: dict[str, tuple[str, str]] = {
    "unknown key": ('provison = "create"', "bus.toml: provison: unknown key; did you mean 'provision'?"),
    "unknown table": ("[rabbitmq]\na = 1", "bus.toml: rabbitmq: unknown key; did you mean 'rabbit'?"),
    "unknown table of nobody": (
        "[xyzzy]\na = 1",
        "bus.toml: xyzzy: unknown key; known are version, url, source, prefix, provision, mapping, listen, services, "
        "admin, rabbit, kafka, redis, sqlite or memory",
    ),
    "listen without a port": (
        "[listen]\naddress = '127.0.0.1'",
        "bus.toml: listen.address = '127.0.0.1': write HOST:PORT, such as 127.0.0.1:8000, or a port alone",
    ),
    "listen with an odd token": (
        "[listen]\ntoken = 'sekrit two'",
        "bus.toml: listen.token = ***: the token must be printable ASCII without spaces, and not empty",
    ),
    "listen with two tokens": (
        "[listen]\ntoken = 'sekrit'\ntoken_file = 'sekrit.txt'",
        "bus.toml: listen: give token or token_file, not both",
    ),
    "listen with an unknown key": (
        "[listen]\nport = 8080",
        "bus.toml: listen.port: unknown key; known are address, token or token_file",
    ),
    "unknown key of the admin API": (
        '[admin]\nlisten_on = "x"',
        "bus.toml: admin.listen_on: unknown key; did you mean",
    ),
    "unknown key of a token": (
        TOKEN + 'tenant = "acme"',
        "bus.toml: admin.tokens[0].tenant: unknown key; did you mean 'tenants'?",
    ),
    "role of a token": (
        TOKEN.replace("viewer", "root"),
        "bus.toml: admin.tokens[0].role = ***: must be 'viewer', 'operator' or 'admin'",
    ),
    "a token instead of its hash": (
        TOKEN.replace("sha256:", "ebt_"),
        "bus.toml: admin.tokens[0].hash = ***: must be the hash that `eventbus token` prints",
    ),
    "a token for nobody": (
        TOKEN + "tenants = []",
        "bus.toml: admin.tokens[0].tenants: must name a tenant; leave it out",
    ),
    "two tokens of one name": (TOKEN + TOKEN, "bus.toml: admin.tokens[1].name = ***: tokens[0] has this name already"),
    "rate of the admin API": ("[admin]\nrate = 0", "bus.toml: admin.rate = 0: must be a number from 0.1 to 1000000"),
    "unknown key of a service": (
        SERVICE + "concurency = 6",
        "bus.toml: services.wms-a.concurency: unknown key; did you mean 'concurrency'?",
    ),
    "key of a route on top": (
        "forward = 'http://x/'",
        "bus.toml: forward: unknown key here; it belongs into [[services.NAME.routes]]",
    ),
    "unknown key of a route": (
        FORWARD + "timout = 5",
        "bus.toml: services.wms-a.routes[0].timout: unknown key; did you mean 'timeout'?",
    ),
    "unknown key of retry": (
        SERVICE + "retry = { max_retrys = 3 }",
        "bus.toml: services.wms-a.retry.max_retrys: unknown key; did you mean 'max_retries'?",
    ),
    "unknown key of breaker": (
        FORWARD + "breaker = { failure = 3 }",
        "bus.toml: services.wms-a.routes[0].breaker.failure: unknown key; did you mean 'failures'?",
    ),
    "unknown key of mapping": (
        "[mapping]\ntenat = 'x'",
        "bus.toml: mapping.tenat: unknown key; did you mean 'tenant'?",
    ),
    "fairness as a text": (
        SERVICE + "fairness = 'yes please'",
        "bus.toml: services.wms-a.fairness = 'yes please': must be true, false, or a table such as { in_a_row = 3, "
        "weights = { acme = 2 } }",
    ),
    "a weight of nothing": (
        SERVICE + "fairness = { weights = { acme = 0 } }",
        "bus.toml: services.wms-a.fairness.weights.acme = 0: must be a number above 0, at most 1000",
    ),
    "highest above base": (
        SERVICE + "fairness = { base = 2, highest = 3 }",
        "bus.toml: services.wms-a.fairness.highest = 3: must not be above base = 2",
    ),
    "rate without a limit": (
        SERVICE + "rate = { period = '60s' }",
        "bus.toml: services.wms-a.rate[0].limit: is missing",
    ),
    "tenants without tenant": (
        FORWARD + "rate = { limit = 5, tenants = { acme = 9 } }",
        'bus.toml: services.wms-a.routes[0].rate[0].tenants: needs by = "tenant"; limits of single '
        "tenants are counted by tenant",
    ),
    "a store that keeps nothing": (
        SERVICE + "idempotency = { store = 'amqp://host' }",
        "bus.toml: services.wms-a.idempotency.store = 'amqp://host': no store; write redis://host, sqlite:///file or "
        "memory://",
    ),
    "an order of anything else": (
        SERVICE + "ordering = 'tenant'",
        "bus.toml: services.wms-a.ordering = 'tenant': must be 'key'",
    ),
    "order with long retries": (
        SERVICE + "ordering = 'key'\nretry = { max_retries = 10, delay = '5m' }\n" + FORWARD,
        "bus.toml: services.wms-a.routes[0]: retries that keep the order of keys may wait 3000 s in all; at most 900 s "
        "are allowed, because the message is held all that time",
    ),
    "version": ("version = 2", "bus.toml: version = 2: must be 1; this eventbus knows no other version of the file"),
    "text for a number": (
        SERVICE + 'concurrency = "many"',
        "bus.toml: services.wms-a.concurrency = 'many': must be a whole number from 1",
    ),
    "boolean for a number": (
        SERVICE + "concurrency = true",
        "bus.toml: services.wms-a.concurrency = true: must be a whole number from 1",
    ),
    "zero": (SERVICE + "prefetch = 0", "bus.toml: services.wms-a.prefetch = 0: must be a whole number from 1"),
    "number for a boolean": (SERVICE + "strict = 7", "bus.toml: services.wms-a.strict = 7: must be true or false"),
    "number for a text": ("source = 7", "bus.toml: source = 7: must be a text"),
    "text for a table": (SERVICE + "retry = '5s'", "bus.toml: services.wms-a.retry = '5s': must be a table"),
    "table for a list": ("[services.wms-a.routes]\non = 'a'", "bus.toml: services.wms-a.routes: must be a list"),
    "services as a list": ("[[services]]\nname = 'a'", "bus.toml: services: must be a table"),
    "bad duration": (SERVICE + "timeout = '5 parsecs'", f"bus.toml: services.wms-a.timeout = '5 parsecs': {DURATION}"),
    "negative duration": (SERVICE + "grace = -1", f"bus.toml: services.wms-a.grace = -1: {DURATION}"),
    "list for a duration": (SERVICE + "grace = [1]", f"bus.toml: services.wms-a.grace: {DURATION}"),
    "no time at all": (SERVICE + "timeout = '0s'", "bus.toml: services.wms-a.timeout = '0s': must be longer than zero"),
    "bad service name": (
        "[services.Wms_Cincout]",
        "bus.toml: services.Wms_Cincout: use a-z, 0-9 and inner hyphens, such as 'wms-cincout'; try 'wms-cincout'",
    ),
    "bad prefix": (
        "prefix = 'amq'",
        "bus.toml: prefix = 'amq': prefix 'amq' belongs to RabbitMQ itself; set another one with prefix=...",
    ),
    "bad choice": ("provision = 'maybe'", "bus.toml: provision = 'maybe': must be 'create', 'verify' or 'off'"),
    "no URL": ("url = ''", "bus.toml: url = '': is not a bus URL; write amqp://host, kafka://host:9092, "),
    "unknown scheme": (
        "url = 'ampq://u:sekrit@h'",
        "bus.toml: url = 'ampq://***@h': no adapter for 'ampq'; known are amqp://, amqps://, kafka://, memory://, "
        "redis://, rediss://, sqlite://; did you mean 'amqp'?",
    ),
    "URL without a scheme": ("url = 'u:sekrit@h'", "bus.toml: url = '***@h': is not a bus URL; write amqp://host, "),
    "setting that the broker does not have": (
        "url = 'sqlite:///x.db'\n[sqlite]\nlese = 3",
        "bus.toml: sqlite.lese = 3: unknown setting; known are lease, ",
    ),
    "both numbers of attempts": (
        SERVICE + "retry = { max_retries = 3, max_attempts = 4 }",
        "bus.toml: services.wms-a.retry: give max_retries or max_attempts, not both (max_attempts = max_retries + 1)",
    ),
    "fixed and growing": (
        SERVICE + "retry = { delay = 1, base = 2, cap = 3 }",
        "bus.toml: services.wms-a.retry: give delay (always the same) or base, cap (growing), not both",
    ),
    "cap below base": (
        SERVICE + "retry = { base = '5s', cap = '1s' }",
        "bus.toml: services.wms-a.retry: cap = 1.0: must not be below base = 5.0",
    ),
    "jitter": (
        SERVICE + "retry = { base = 1, jitter = 2 }",
        "bus.toml: services.wms-a.retry.jitter = 2: must be a number from 0 to below 1",
    ),
    "factor": (
        SERVICE + "retry = { base = 1, factor = 'x' }",
        "bus.toml: services.wms-a.retry.factor = 'x': must be a number from 1 to 100",
    ),
    "in place for too long": (
        HANDLER + "retry = { max_retries = 100, delay = '60s', mode = 'in-place' }",
        "bus.toml: services.wms-a.routes[0].retry: in-place retries may wait 6000 s in all; "
        "at most 900 s are allowed, because the message is held all that time",
    ),
    "two routes alike": (
        FORWARD + FORWARD,
        "bus.toml: services.wms-a.routes[1].on = 'a': routes[0] has this pattern already; exactly one route takes an "
        "event",
    ),
    "unknown verdict": (
        SERVICE + "status = { 404 = 'parc' }",
        "bus.toml: services.wms-a.status.404 = 'parc': use 'ack', 'drop', 'requeue' or 'park'",
    ),
    "unknown status": (
        SERVICE + "status = { 4x = 'park' }",
        "bus.toml: services.wms-a.status.4x: use a status from 100 to 599, or a class such as '4xx'",
    ),
    "relative URL": (
        FORWARD.replace("http://127.0.0.1/e", "/e"),
        "bus.toml: services.wms-a.routes[0].forward = '/e': write the whole URL, such as "
        "'https://billing.internal/events'",
    ),
    "password in an endpoint's URL": (
        FORWARD.replace("http://", "http://u:sekrit@"),
        "bus.toml: services.wms-a.routes[0].forward = 'http://***@127.0.0.1/e': take the user and password out of the "
        "URL and set auth instead",
    ),
    "neither endpoint nor handler": (
        "[[services.wms-a.routes]]\non = 'a'",
        "bus.toml: services.wms-a.routes[0]: give exactly one of forward = 'https://...' or handler = 'module:name'",
    ),
    "both endpoint and handler": (
        FORWARD + "handler = 'a:b'",
        "bus.toml: services.wms-a.routes[0]: give exactly one of forward = 'https://...' or handler = 'module:name'",
    ),
    "no pattern": (
        "[[services.wms-a.routes]]\nforward = 'http://h/'",
        'bus.toml: services.wms-a.routes[0].on: is missing; write the event type or pattern, such as on = "order.*"',
    ),
    "bad pattern": (
        FORWARD.replace('"a"', '"a.b*"'),
        "bus.toml: services.wms-a.routes[0].on = 'a.b*': '*' and '#' stand for whole words, such as 'order.*'",
    ),
    "signing without an endpoint": (
        HANDLER + "sign = { secret = 'sekrit' }",
        "bus.toml: services.wms-a.routes[0].sign: goes with forward only; this route has a handler",
    ),
    "batch of an endpoint": (
        FORWARD + "batch = { size = 3 }",
        "bus.toml: services.wms-a.routes[0].batch: goes with handler, or with mode = 'batch' beside forward",
    ),
    "unknown scheme of an endpoint": (
        FORWARD.replace("http:", "ftp:"),
        "bus.toml: services.wms-a.routes[0].forward = 'ftp://127.0.0.1/e': write the whole URL, such as "
        "'https://billing.internal/events'",
    ),
    "metadata address": (
        FORWARD.replace("127.0.0.1", "169.254.169.254"),
        "bus.toml: services.wms-a.routes[0].forward = 'http://169.254.169.254/e': nothing is sent there, "
        "169.254.169.254 is link-local or a cloud's metadata address",
    ),
    "private address of a third party": (
        FORWARD + "egress = 'public-only'",
        "bus.toml: services.wms-a.routes[0].forward = 'http://127.0.0.1/e': nothing is sent there, 127.0.0.1 is not "
        "public, and egress = 'public-only'",
    ),
    "unknown egress": (
        FORWARD + "egress = 'public'",
        "bus.toml: services.wms-a.routes[0].egress = 'public': must be 'any' or 'public-only'",
    ),
    "unknown sender": (
        FORWARD + "sender = 'httpx'",
        "bus.toml: services.wms-a.routes[0].sender = 'httpx': must be 'lean' or 'aiohttp'",
    ),
    "unknown mode": (
        FORWARD + "mode = 'bulk'",
        "bus.toml: services.wms-a.routes[0].mode = 'bulk': must be 'binary', 'structured', 'raw' or 'batch'",
    ),
    "unknown verdict for a status of an endpoint": (
        FORWARD + "status = { 404 = 'dead' }",
        "bus.toml: services.wms-a.routes[0].status.404 = 'dead': ",
    ),
    "two endpoints for one pattern": (
        FORWARD + FORWARD,
        "bus.toml: services.wms-a.routes[1].on = 'a': routes[0] has this pattern already",
    ),
    "TLS without TLS": (
        FORWARD + "tls = { ca = 'ca.pem' }",
        "bus.toml: services.wms-a.routes[0].tls: goes with an https URL only",
    ),
    "a key without its certificate": (
        FORWARD.replace("http:", "https:") + "tls = { key = 'sekrit' }",
        "bus.toml: services.wms-a.routes[0].tls: key needs cert beside it",
    ),
    "a CA that is not there": (
        FORWARD.replace("http:", "https:") + "tls = { ca = 'none.pem' }",
        "bus.toml: services.wms-a.routes[0].tls.ca: none.pem cannot be used: no such file",
    ),
    "a file of a secret that is not there": (
        FORWARD + "sign = { secret_file = 'none' }",
        "bus.toml: services.wms-a.routes[0].sign.secret_file: cannot be read: none: No such file or directory",
    ),
    "a file of a password that is not there": (
        FORWARD + "auth = { basic = { user = 'u', password_file = 'none' } }",
        "bus.toml: services.wms-a.routes[0].auth.basic.password_file: cannot be read: none: No such file or directory",
    ),
    "concurrency beside a batch": (
        BATCH + "concurrency = 3",
        "bus.toml: services.wms-a.routes[0].concurrency = 3: with batch, write concurrency inside it: "
        "batch = { concurrency = ... }",
    ),
    "breaker of the wrong type": (
        FORWARD + "breaker = 'perhaps'",
        "bus.toml: services.wms-a.routes[0].breaker = 'perhaps': must be false, or a table such as "
        "{ failures = 10, open = '5s', max = '60s' }",
    ),
    "breaker that opens for longer than its longest": (
        FORWARD + "breaker = { open = '2m' }",
        "bus.toml: services.wms-a.routes[0].breaker.open = '2m': must not be above max",
    ),
    "no dead letters without a choice": (
        SERVICE + "dlq = false",
        "bus.toml: services.wms-a.dlq = false: needs on_exhausted = 'retry-forever' or 'discard', chosen by hand",
    ),
    "prefetch below what a route holds": (
        FORWARD + "concurrency = 50\n[services.wms-a]\nprefetch = 10",
        "bus.toml: services.wms-a.prefetch = 10: a route can have 50 events in hand",
    ),
    "missing variable": (
        "source = '${NOWHERE}'",
        "bus.toml: source: environment variable NOWHERE is not set; set it, or give a default: ${NOWHERE:-...}",
    ),
    "broken variable": (
        "source = '${no where}'",
        "bus.toml: source: cannot read '${...'; write ${NAME} or ${NAME:-default}, and $$ for a dollar",
    ),
    "module that is not there": (
        FORWARD + HANDLER.replace("app_errors", "no_such_module").replace('"a"', '"b"'),
        "bus.toml: services.wms-a.routes[1].handler = 'no_such_module:one': no module named 'no_such_module', neither",
    ),
    "handler without a name": (
        HANDLER.replace("app_errors:one", "app_errors"),
        "bus.toml: services.wms-a.routes[0].handler = 'app_errors': write module:name, such as 'app:reserve'",
    ),
    "exception that is not there": (
        HANDLER + "permanent = ['KeyEror']",
        "bus.toml: services.wms-a.routes[0].permanent[0] = 'KeyEror': no such built-in exception; write others as "
        "'module:Name'; did you mean 'KeyError'?",
    ),
    "exception that is none": (
        SERVICE + "permanent = ['print']",
        "bus.toml: services.wms-a.permanent[0] = 'print': is not an exception type",
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_one_line_says_what_is_wrong(case: str) -> None:
    """File, key, value, what is allowed; on one line."""
    Path("app_errors.py").write_text("def one(event): ...\n")
    text, expected = TABLE[case]
    told = [line for line in problem(text).splitlines() if line.startswith(expected)]
    lines = problem(text).splitlines()
    assert told, lines
    assert len(lines) == 1
    assert "sekrit" not in lines[0]


def test_a_missing_adapter_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """amqp:// without eventbus-rabbit names the package to install."""
    monkeypatch.setitem(sys.modules, "eventbus_rabbit", None)
    assert problem("url = 'amqp://u:sekrit@h'").startswith(
        "bus.toml: url = 'amqp://***@h': amqp:// needs the package eventbus-rabbit: pip install eventbus-rabbit"
    )


def test_everything_wrong_is_told_at_once() -> None:
    """One line per problem, not one problem per run."""
    lines = problem("sorce = 'a'\nprovision = 'b'\n" + SERVICE + "timeout = 'c'\ngrace = 'd'").splitlines()
    assert len(lines) == 4
    assert all(line.startswith("bus.toml: ") for line in lines)


SECRETS = [
    "sign = 'sekrit'",
    "sign = { secret = 5, secrets = 'sekrit' }",
    "sign = { secret = 'whsec_sekrit!' }",
    "sign = { secrt = 'sekrit' }",
    "sign = { secret = 'sekrit', secrets = ['sekrit'] }",
    "sign = { secrets = ['sekrit', 'sekrit2', 'sekrit3'] }",
    "sign = { secret = ['sekrit'] }",
    "sign = { secret = '${sekrit' }",
    "sign = { secret_file = ['sekrit'] }",
    "tls = { key = 'sekrit' }",
    "tls = { cert = 'c', key = ['sekrit'] }",
    "tls = { cert = 'c', pasword = 'sekrit' }",
    "auth = { basic = { user = 'a', password = 'sekrit', password_file = 'b' } }",
    "auth = 'sekrit'",
    "auth = { bearer = 'sek rit sekrit' }",
    "auth = { bearer = ['sekrit'] }",
    "auth = { baerer = 'sekrit' }",
    "auth = { bearer = 'sekrit', bearer_file = 'sekrit' }",
    "auth = { basic = 'u:sekrit' }",
    "auth = { basic = { user = 'a:b', password = 'sekrit' } }",
    "auth = { basic = { user = 'a', password = ['sekrit'] } }",
    "auth = { basic = { user = 'a', pasword = 'sekrit' } }",
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_never_printed(text: str) -> None:
    """Whatever is wrong with it, or with its name, the value of a secret stays out of the message."""
    told = problem(FORWARD + text)
    assert "sekrit" not in told
    assert "routes[0]." in told


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"EVENTBUS_PROVISION": "never"}, "EVENTBUS_PROVISION = 'never': must be 'create', 'verify' or 'off'"),
        ({"EVENTBUS_URL": "ampq://u:sekrit@h"}, "EVENTBUS_URL = 'ampq://***@h': no adapter for 'ampq'; "),
        ({"EVENTBUS_URL": "sqlite:///x", "EVENTBUS_SQLITE__LEASE": "x"}, "EVENTBUS_SQLITE__LEASE = 'x': "),
        ({"EVENTBUS_SQLITE": "x"}, "EVENTBUS_SQLITE: must be a JSON object"),
        ({"EVENTBUS_MAPPING__TENAT": "x"}, "EVENTBUS_MAPPING__TENAT: unknown key; did you mean 'tenant'?"),
    ],
)
def test_a_bad_variable_is_named_instead_of_the_file(env: dict[str, str], expected: str) -> None:
    """Who looks into the file would find nothing wrong there."""
    told = problem("", env)
    assert told.startswith(expected)
    assert "sekrit" not in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("import no_such_thing\n", "module 'app_broken' failed at import: ModuleNotFoundError: No module named"),
        ("raise KeyError('SETTING')\n", "failed at import: KeyError: 'SETTING' (app_broken.py line 1)"),
        ("\ndef f(:\n", "module 'app_broken' failed at import: SyntaxError: "),
        ("import sys; sys.exit(3)\n", "module 'app_broken' failed at import: SystemExit: 3"),
        ("def ohne(event): ...\n", "'app_broken' has no 'one'; did you mean 'ohne'?"),
        ("one = 5\n", "is not callable but a int"),
        ("def one(event) -> bool: ...\n", "handler one returns <class 'bool'>, which is no verdict"),
        ("def one(): ...\n", "handler one must take its payload as a plain argument"),
    ],
)
def test_a_handler_that_cannot_be_used(body: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Module, name and signature: one line each, with what went wrong inside the module."""
    monkeypatch.delitem(sys.modules, "app_broken", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    Path("app_broken.py").write_text(body)
    told = problem(HANDLER.replace("app_errors", "app_broken"))
    assert told.startswith("bus.toml: services.wms-a.routes[0].handler = 'app_broken:one': ")
    assert expected in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "bus.toml: no such file"),
        (b"url = ", "bus.toml: is not TOML: Invalid value (at end of document)"),
        (b"a = 1\nb == 2\n", "bus.toml: is not TOML: Invalid value (at line 2, column 4)"),
        (b"\xff\xfe", "bus.toml: is not UTF-8"),
        (b"", 'bus.toml: url: is missing; write url = "sqlite:///bus.db" or set EVENTBUS_URL'),
    ],
)
def test_a_file_that_cannot_be_read(content: bytes | None, expected: str) -> None:
    """Missing, broken, empty: one line."""
    if content is not None:
        Path("bus.toml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load("bus.toml", {})
    assert str(caught.value) == expected
