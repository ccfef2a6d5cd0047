"""What an amqp:// URL and the [rabbit] table may say."""

from __future__ import annotations

import pytest

from eventbus.errors import ConfigError
from eventbus_rabbit import RabbitAdapter
from eventbus_rabbit.options import read


def test_a_url_has_hosts_a_user_a_vhost_and_options() -> None:
    """Several hosts share user, password and vhost; options stand in the query."""
    found = read("amqp://ana:p%40ss@one:5673,two/v%2F1?heartbeat=30&prefetch=100&timeout=5s&queue_type=quorum", {})
    assert [(url.host, url.port, url.user, url.password) for url in found.urls] == [
        ("one", 5673, "ana", "p@ss"),
        ("two", 5672, "ana", "p@ss"),
    ]
    assert found.urls[0].raw_path == "/v%2F1"
    assert (found.heartbeat, found.prefetch, found.timeout, found.queue_type) == (30, 100, 5.0, "quorum")


def test_defaults_are_rabbitmqs_own() -> None:
    """Without anything: guest on the default port and vhost, seed 4's layout on classic queues."""
    found = read("amqp://localhost", {})
    assert (found.urls[0].user, found.urls[0].port, found.urls[0].path) == ("guest", 5672, "/")
    assert (found.queue_type, found.retry, found.layout.retry_ms) == ("classic", "copy", 5000)
    assert read("amqps://localhost", {}).urls[0].port == 5671
    assert read("amqp://[::1]:5673", {}).urls[0].host == "::1"


@pytest.mark.parametrize(
    ("url", "settings", "named"),
    [
        ("amqp://localhost?nonsense=1", {}, "nonsense"),
        ("amqp://localhost", {"queue_type": "stream"}, "queue_type"),
        ("amqp://localhost?heartbeat=fast", {}, "heartbeat"),
        ("amqp://localhost", {"prefetch": 0}, "prefetch"),
        ("amqp://localhost?prefetch=1", {"prefetch": 2}, "prefetch"),
        ("amqp://localhost", {"timeout": True}, "timeout"),
        ("amqp://localhost", {"layout": "nonsense"}, "layout"),
        ("amqp://localhost", {"names": "x"}, "names"),
        ("amqp://localhost", {"layout": "raffle", "retry": "dead-letter"}, "dead-letter"),
        ("amqp://localhost?cafile=/x", {}, "amqps"),
        ("amqps://localhost?keyfile=/x", {}, "certfile"),
        ("amqp://localhost:port", {}, "port"),
        ("amqp://one,,two", {}, "host"),
        ("amqp://localhost/a/b", {}, "%2F"),
    ],
)
def test_a_bad_option_is_one_line_that_names_it(url: str, settings: dict[str, object], named: str) -> None:
    """Unknown, impossible or contradictory options are ConfigErrors that name key and value."""
    with pytest.raises(ConfigError, match=named) as caught:
        read(url, settings)
    assert "\n" not in str(caught.value)


def test_a_password_is_never_in_an_error() -> None:
    """Errors name hosts, not credentials."""
    with pytest.raises(ConfigError) as caught:
        read("amqp://ana:secret@host:bad/", {})
    assert "secret" not in str(caught.value)
    assert "secret" not in read("amqp://ana:secret@host/", {}).where


def test_tls_files_that_cannot_be_read_are_named() -> None:
    """A missing CA file is an error that says so, before anything is opened."""
    with pytest.raises(ConfigError, match="cafile"):
        read("amqps://localhost?cafile=/no/such/file", {}).tls()


def test_an_adapter_needs_a_url_or_a_connection() -> None:
    """There is no adapter out of nothing."""
    with pytest.raises(TypeError):
        RabbitAdapter()
