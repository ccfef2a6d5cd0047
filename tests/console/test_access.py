"""Who may do what: every endpoint of the table with every role, and with tokens that are none."""

from __future__ import annotations

import logging

import pytest

from eventbus.console.app import ADMIN_ROUTES, HEALTH_ROUTES
from eventbus.console.routing import Route
from eventbus.console.tokens import ROLES, Caller, Keyring, Rejected, Token, hash_of, new_token

from .conftest import TOKENS, Api, ApiMaker, example

OF_ROLE = {"viewer": "vera", "operator": "otto", "admin": "anna"}
LEAST = {
    "alive": None,
    "ready": None,
    "metrics": "viewer",
    "services_stats": "viewer",
    "who_am_i": "viewer",
    "tenants_turns": "viewer",
    "list_queues": "viewer",
    "list_messages": "viewer",
    "show_message": "viewer",
    "count_messages": "viewer",
    "count_by": "viewer",
    "export_messages": "viewer",
    "redrive_messages": "operator",
    "edit_message": "operator",
    "purge_messages": "admin",
    "erase_messages": "admin",
    "import_messages": "admin",
}
"""Written down a second time on purpose: a role that is changed by mistake is found here."""


@pytest.fixture
def url() -> str:
    """Who may do what is decided before a broker is asked: one will do."""
    return "memory://"


each_route = pytest.mark.parametrize("route", ADMIN_ROUTES, ids=lambda route: route.name)


def test_every_endpoint_has_its_role_written_down() -> None:
    """A new endpoint is thought about before it is open to anybody."""
    assert {route.name: route.role for route in ADMIN_ROUTES} == LEAST
    assert {route.name for route in ADMIN_ROUTES if route.method == "POST"} == {
        route.name for route in ADMIN_ROUTES if route.changes
    }


@each_route
@pytest.mark.parametrize("role", ROLES)
async def test_a_role_may_do_what_is_its_own_and_nothing_else(guarded: Api, route: Route, role: str) -> None:
    """Viewer, operator and admin, each with every endpoint."""
    least = LEAST[route.name]
    allowed = least is None or ROLES.index(role) >= ROLES.index(least)  # type: ignore[arg-type]
    answer = await guarded(**example(route), token=OF_ROLE[role])
    if allowed:
        # 404: the example names a letter nobody has, no metrics; 422: in memory there is no log to erase from
        assert answer.status_code in ((422,) if route.name == "erase_messages" else (200, 404)), answer.text
    else:
        assert answer.status_code == 403
        assert answer.json()["type"] == "urn:eventbus:problem:role"
        assert f"needs {least}" in answer.json()["detail"]


@each_route
@pytest.mark.parametrize("token", [None, "nobody", "late"])
async def test_no_token_a_wrong_one_and_an_expired_one_are_refused(
    guarded: Api, route: Route, token: str | None
) -> None:
    """401 and what to send, on every endpoint but the probes."""
    answer = await guarded(**example(route), token=token)
    if route.role is None:
        assert answer.status_code == 200
        return
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    why = {None: "no token", "nobody": "nobody has this token", "late": "expired"}[token]
    assert why in answer.json()["detail"]
    assert "Authorization: Bearer" in answer.json()["help"]


async def test_a_token_that_expires_tomorrow_still_does(guarded: Api) -> None:
    """Expiry is a moment, not a flag."""
    assert (await guarded.get("/admin/whoami", token="soon")).json()["name"] == "soon"


@pytest.mark.parametrize("header", ["t-anna", "Basic t-anna", "Bearer", "Bearer  ", "Bearer t-anna x", "bearer t-ann"])
async def test_what_only_looks_like_a_token(guarded: Api, header: str) -> None:
    """Other schemes, empty tokens, parts of tokens."""
    answer = await guarded.get("/admin/whoami", headers={"authorization": header})
    assert answer.status_code == 401


async def test_the_scheme_is_read_in_any_case(guarded: Api) -> None:
    """RFC 9110: the scheme's case does not matter."""
    answer = await guarded.get("/admin/whoami", headers={"authorization": "bearer t-anna"})
    assert answer.json() == {"name": "anna", "role": "admin", "tenants": None}


async def test_without_tokens_everybody_is_local(api: Api) -> None:
    """The server lets that be on loopback only."""
    assert (await api.get("/admin/whoami")).json() == {"name": "local", "role": "admin", "tenants": None}


async def test_a_refused_change_is_in_the_audit_log(guarded: Api, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody has tried."""
    with caplog.at_level(logging.INFO, "eventbus"):
        await guarded.post("/admin/dlq/queues/wms-cincout/purge", {"limit": 1}, token="otto")
    [record] = [record for record in caplog.records if getattr(record, "event", "") == "audit"]
    assert record.fields["by"] == "otto"  # type: ignore[attr-defined]
    assert record.fields["outcome"] == "refused"  # type: ignore[attr-defined]


async def test_the_health_port_has_no_admin_endpoint(make_api: ApiMaker) -> None:
    """`run --health` cannot be used to change anything."""
    api = make_api(routes=HEALTH_ROUTES)
    assert (await api.client.get("/healthz")).status_code == 200
    assert (await api.client.get("/admin/dlq/queues")).status_code == 404
    assert not any(route.changes for route in HEALTH_ROUTES)


def test_a_token_is_long_random_and_only_its_hash_is_kept() -> None:
    """Two are never the same, and none can be read out of what is kept."""
    one, two = new_token(), new_token()
    assert one != two
    assert len(one) > 40
    token = Token("a", "viewer", hash_of(one))
    assert one not in repr(token)
    assert hash_of(one) not in repr(token)
    assert Keyring([token]).caller(f"Bearer {one}", 0) == Caller("a", "viewer")
    with pytest.raises(Rejected, match="nobody"):
        Keyring([token]).caller(f"Bearer {two}", 0)


def test_an_empty_hash_is_nobodys() -> None:
    """A token whose hash was left empty is not the empty token's."""
    with pytest.raises(Rejected):
        Keyring([Token("a", "admin", "")]).caller("Bearer x", 0)
    assert all(token.hash.startswith("sha256:") for token in TOKENS.values())
