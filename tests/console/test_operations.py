"""What the API does with dead letters: seed 1's three paths, and beside them all that the CLI can do."""

from __future__ import annotations

import base64
import json
import logging
from typing import Any

import pytest

from eventbus import Bus, Event, Service
from eventbus.console.desk import Desk
from eventbus.testing.contract.harness import eventually

from .conftest import LETTERS, PARTS_OF_SECRETS, QUEUE, Api, ApiMaker, lines

IDS = [id for id, _, _ in LETTERS]
NDJSON = {"content-type": "application/x-ndjson"}


only_memory = pytest.mark.parametrize("url", ["memory://"])
"""For what is judged before a broker is asked."""


async def ids(api: Api, **query: Any) -> list[str]:
    answer = await api.get(f"{QUEUE}/messages", params={"limit": 100} | query)
    return [message["id"] for message in answer.json()["messages"]]


async def test_the_queues(api: Api) -> None:
    """Seed 1: GET /admin/dlq/queues lists every known queue by its name on the broker, its service and its depth."""
    first, empty = (await api.get("/admin/dlq/queues")).json()["queues"]
    assert first["queue"].endswith("wms-cincout")
    assert (first["service"], first["messages"]) == ("wms-cincout", 6)
    assert first["oldest_seconds"] >= 0
    assert (empty["service"], empty["messages"], empty["oldest_seconds"]) == ("wms-empty", 0, None)


async def test_a_queue_is_known_by_its_own_name_and_by_its_services(api: Api) -> None:
    """Seed 1 names the queue; a person knows the service."""
    [name, *_] = [queue["queue"] for queue in (await api.get("/admin/dlq/queues")).json()["queues"]]
    by_queue = await api.get(f"/admin/dlq/queues/{name}/messages")
    by_service = await api.get("/admin/dlq/queues/wms-cincout/messages")
    assert by_queue.json() == by_service.json()


@only_memory
@pytest.mark.parametrize("queue", ["wms-nope", "q.validator.dlq", "..", "wms cincout", "%00", "é" * 300])
async def test_an_unknown_queue_is_404(api: Api, queue: str) -> None:
    """Only known queues; the answer says where they are listed."""
    for path in ("count", "messages", "messages/a1", "stats", "export"):
        answer = await api.client.get(f"/admin/dlq/queues/{queue}/{path}")
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
    answer = await api.client.post(f"/admin/dlq/queues/{queue}/re-drive", json={"limit": 10})
    assert answer.status_code == 404


async def test_without_a_list_of_services_any_that_the_broker_knows_is_found(bus: Bus, make_api: ApiMaker) -> None:
    """`eventbus serve --url ...` without names: asked for by name, or 404."""
    api = make_api()
    assert Desk(bus).find("wms-cincout").service.name == "wms-cincout"
    import httpx

    from eventbus.console.app import make_app

    app = make_app(Desk(bus))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        open_api = Api(client, api.bus, api.service)
        assert (await open_api.get(f"{QUEUE}/count")).json() == {"count": 6}
        assert (await open_api.get("/admin/dlq/queues/wms-nope/count")).status_code == 404
        assert (await open_api.get("/admin/dlq/queues/Not_A_Name/count")).status_code == 404
        assert (await open_api.get("/admin/dlq/queues")).json() == {"queues": []}


async def test_the_messages_page_by_page(api: Api) -> None:
    """Seed 1: GET .../messages?limit=20 peeks, oldest first; nothing is consumed."""
    answer = (await api.get(f"{QUEUE}/messages?limit=20")).json()
    assert [message["id"] for message in answer["messages"]] == IDS
    assert answer["next"] is None
    first = (await api.get(f"{QUEUE}/messages?limit=4")).json()
    second = (await api.get(f"{QUEUE}/messages", params={"limit": 4, "after": first["next"]})).json()
    assert [m["id"] for m in first["messages"] + second["messages"]] == IDS
    assert second["next"] is None
    exactly = (await api.get(f"{QUEUE}/messages?limit=6")).json()
    assert exactly["next"] is None
    assert await ids(api, where="tenant=acme type=order.*") == ["a1", "a3"]
    assert (await api.get(f"{QUEUE}/count")).json() == {"count": 6}


async def test_one_message_with_its_whole_story(api: Api) -> None:
    """Everything there is: attempts, headers, the body to the byte."""
    [message] = (await api.get(f"{QUEUE}/messages/a1")).json()["messages"]
    assert (message["reason"], message["tenant"], message["retries"]) == ("max-retries", "acme", 0)
    assert json.loads(message["body"]) == message["data"] == {"of": "acme", "mark": "acme-mark"}
    assert message["story"]["x-park-reason"] == "max-retries"
    assert message["attempts"][0]["number"] == 1


async def test_an_id_with_slashes(api: Api) -> None:
    """Kafka's ids of foreign messages are topic/partition/offset."""
    [row] = lines(await api.get(f"{QUEUE}/export", params={"where": "id=a1"}))
    row["id"] = "orders/3/17"
    await api.post(f"{QUEUE}/import", content=json.dumps(row), headers=NDJSON)
    for written in ("orders/3/17", "orders%2F3%2F17"):
        assert (await api.get(f"{QUEUE}/messages/{written}")).json()["messages"][0]["id"] == "orders/3/17"


async def test_counts_and_stats(api: Api) -> None:
    """By every facet, with and without a filter."""
    assert (await api.get(f"{QUEUE}/count?where=tenant=acme")).json() == {"count": 3}
    assert (await api.get(f"{QUEUE}/stats?by=tenant")).json() == {
        "by": "tenant",
        "counts": {"acme": 3, "globex": 2, "-": 1},
    }
    assert (await api.get(f"{QUEUE}/stats?where=tenant=globex&by=type")).json()["counts"] == {
        "order.created": 1,
        "price.changed": 1,
    }
    for by in ("reason", "status", "code", "type", "tenant", "fingerprint", "age"):
        assert sum((await api.get(f"{QUEUE}/stats?by={by}")).json()["counts"].values()) == 6


async def test_a_re_drive_of_the_oldest_ten(api: Api) -> None:
    """Seed 1: POST .../re-drive {"limit": 10}; who did it travels with the message."""
    report = (await api.post(f"{QUEUE}/re-drive", {"limit": 4})).json()
    assert (report["matched"], report["done"], report["ids"]) == (4, 4, IDS[:4])
    assert (await api.bus.stats(api.service)).ready == 4
    rest = (await api.post(f"{QUEUE}/re-drive", {"limit": 10})).json()
    assert (rest["done"], rest["ids"], rest["next"]) == (2, IDS[4:], None)
    assert (await api.get(f"{QUEUE}/count")).json() == {"count": 0}


async def test_a_re_driven_message_says_who_put_it_back(guarded: Api) -> None:
    """x-redriven-by is the token's name."""
    await guarded.post(f"{QUEUE}/re-drive", {"ids": ["a1"]}, token="otto")
    again = Service("wms-cincout", concurrency=1)
    seen: list[Event] = []

    @again.on("#")
    async def take(event: Event) -> Any:
        from eventbus import park

        seen.append(event)
        return park("again")

    async with guarded.bus.serving(again):
        await eventually(lambda: seen, "it came back")
        await eventually(lambda: _count_is(guarded, 6), "it was parked again")
    [message] = (await guarded.get(f"{QUEUE}/messages/a1", token="vera")).json()["messages"]
    assert (message["redriven"], message["redriven_by"]) == (1, "otto")


async def _count_is(api: Api, number: int) -> bool:
    return await api.bus.dead_letters(api.service).count() == number


async def test_all_that_a_re_drive_can_be_told(api: Api) -> None:
    """Dry run, ids, filter, rate, the retry road."""
    dry = (await api.post(f"{QUEUE}/re-drive", {"where": "tenant=acme", "dry_run": True})).json()
    assert (dry["matched"], dry["done"], dry["dry_run"], dry["ids"]) == (3, 0, True, ["a1", "a2", "a3"])
    some = (await api.post(f"{QUEUE}/re-drive", {"ids": ["g1", "nobody", "a2"], "rate": 1000.0})).json()
    assert (some["done"], sorted(some["ids"])) == (2, ["a2", "g1"])
    slow = {"where": "tenant=globex", "via": "retry", "delay": 60, "reset_attempts": True}
    assert (await api.post(f"{QUEUE}/re-drive", slow)).json()["ids"] == ["g2"]
    stats = await api.bus.stats(api.service)
    assert (stats.ready, stats.delayed, stats.parked) == (2, 1, 3)


async def test_a_canary_that_fails_keeps_the_others_back(api: Api) -> None:
    """The service still fails: two are tried, four stay where they are."""
    async with api.bus.serving(api.service):
        order = {"canary": {"letters": 2, "watch": 20.0, "tolerated": 0.0}}
        report = (await api.post(f"{QUEUE}/re-drive", order)).json()
    assert report["done"] == 2
    assert report["stopped"].startswith("canary: ")
    assert sorted(await ids(api)) == sorted(IDS)


async def test_an_edited_message_goes_back_with_its_new_body(api: Api) -> None:
    """As text or base64; who, when and both digests travel with it."""
    report = (await api.post(f"{QUEUE}/edit", {"id": "a1", "body": '{"mended": true}'})).json()
    assert (report["done"], report["ids"]) == (1, ["a1"])
    body = base64.b64encode(b"\xff\x00").decode()
    assert (await api.post(f"{QUEUE}/edit", {"id": "a2", "body_base64": body})).json()["done"] == 1
    again = Service("wms-cincout", concurrency=1)
    seen: dict[str, bytes] = {}

    @again.on("#")
    async def take(event: Event) -> None:
        seen[event.id] = event.body

    async with api.bus.serving(again):
        await eventually(lambda: len(seen) == 2, "both came back")
    assert seen == {"a1": b'{"mended": true}', "a2": b"\xff\x00"}


@only_memory
@pytest.mark.parametrize(
    ("order", "status", "words"),
    [
        ({"id": "nobody", "body": ""}, 404, "no dead letter"),
        ({"id": "a1"}, 422, "give body"),
        ({"id": "a1", "body": "x", "body_base64": "eA=="}, 422, "give body"),
        ({"id": "a1", "body_base64": "%%%"}, 422, "not base64"),
        ({"id": "a1", "body": "x", "adress": "1"}, 400, "adress"),
    ],
)
async def test_an_edit_that_cannot_be(api: Api, order: dict[str, Any], status: int, words: str) -> None:
    """Refused, and the letter stands where it stood."""
    answer = await api.post(f"{QUEUE}/edit", order)
    assert answer.status_code == status
    assert words in answer.json()["detail"]
    assert await ids(api) == IDS


async def test_a_purge_needs_a_number(api: Api) -> None:
    """What is parked after somebody counted was not asked about."""
    assert (await api.post(f"{QUEUE}/purge", {"where": "tenant=acme"})).status_code == 400
    dry = (await api.post(f"{QUEUE}/purge", {"limit": 100, "dry_run": True})).json()
    assert (dry["matched"], dry["done"]) == (6, 0)
    [place] = [m["address"] for m in (await api.get(f"{QUEUE}/messages/g2")).json()["messages"]]
    assert (await api.post(f"{QUEUE}/purge", {"limit": 1, "addresses": [place]})).json()["ids"] == ["g2"]
    assert (await api.post(f"{QUEUE}/purge", {"limit": 9, "ids": ["g1"]})).json()["done"] == 1
    assert (await api.post(f"{QUEUE}/purge", {"limit": 2})).json()["ids"] == ["a1", "a2"]
    assert await ids(api) == ["a3", "n1"]


async def test_what_was_exported_can_be_imported(api: Api) -> None:
    """JSON lines, to the byte; a second import finds them there already."""
    answer = await api.get(f"{QUEUE}/export")
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert [row["id"] for row in lines(answer)] == IDS
    assert [row["id"] for row in lines(await api.get(f"{QUEUE}/export?where=tenant=globex"))] == ["g1", "g2"]
    before = (await api.get(f"{QUEUE}/messages")).json()["messages"]
    await api.post(f"{QUEUE}/purge", {"limit": 6})
    dry = await api("POST", f"{QUEUE}/import?dry_run=true", content=answer.content, headers=NDJSON)
    assert (dry.json()["matched"], dry.json()["done"]) == (6, 0)
    done = (await api("POST", f"{QUEUE}/import", content=answer.content, headers=NDJSON)).json()
    assert (done["done"], done["gone"]) == (6, 0)
    again = (await api("POST", f"{QUEUE}/import", content=answer.content, headers=NDJSON)).json()
    assert (again["done"], again["gone"]) == (0, 6)
    after = (await api.get(f"{QUEUE}/messages")).json()["messages"]
    assert [m | {"address": ""} for m in after] == [m | {"address": ""} for m in before]


@only_memory
@pytest.mark.parametrize(
    "body", [b"{}", b"not json", b'{"id": "x"}\n', b"\xff\xfe", b'{"id":"a","type":"b","story":3}']
)
async def test_lines_that_are_no_letters(api: Api, body: bytes) -> None:
    """The line is named; nothing is imported."""
    answer = await api("POST", f"{QUEUE}/import", content=body, headers=NDJSON)
    assert answer.status_code in (400, 422)
    assert await ids(api) == IDS


@only_memory
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("messages?limit=0", "limit"),
        ("messages?limit=201", "limit"),
        ("messages?limit=ten", "limit"),
        ("messages?limit=1&limit=2", "limit"),
        ("messages?limits=1", "limits"),
        ("messages?where=", "where"),
        ("messages?where=status", "cannot read"),
        ("messages?where=colour=red", "unknown field 'colour'"),
        ("messages?where=age>soon", "soon"),
        ("count?where=status~5", "status"),
        ("stats?by=colour", "by"),
        ("export?where=nope=1", "unknown field"),
        ("messages/a1?x=1", "no parameters"),
    ],
)
async def test_a_query_that_is_wrong(api: Api, path: str, words: str) -> None:
    """400 or 422, and what is wrong with it; never 500."""
    answer = await api.get(f"{QUEUE}/{path}")
    assert answer.status_code in (400, 422)
    assert words in answer.json()["detail"]
    assert answer.json()["help"]


@only_memory
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", "JSON"),
        ("[]", "object"),
        ("null", "object"),
        ('{"limit": "10"}', "limit"),
        ('{"limit": true}', "limit"),
        ('{"limit": 0}', "limit"),
        ('{"limit": 1.5}', "limit"),
        ('{"limit": 10, "dryrun": true}', "dryrun"),
        ('{"rate": 0}', "rate"),
        ('{"rate": NaN}', "rate"),
        ('{"ids": []}', "ids"),
        ('{"ids": "a1"}', "ids"),
        ('{"via": "pigeon"}', "via"),
        ('{"canary": {"letters": 0}}', "canary"),
        ('{"where": "colour=red"}', "colour"),
        ('{"limit": 10', "JSON"),
        ("[" * 10_000, "JSON"),
    ],
)
async def test_an_order_that_is_wrong(api: Api, body: str, words: str) -> None:
    """Refused before anything is moved."""
    answer = await api("POST", f"{QUEUE}/re-drive", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422)
    assert words in answer.json()["detail"]
    assert await ids(api) == IDS


@pytest.mark.parametrize("after", ["nowhere", "-1", "99999999999999999999999999", "0:0", "'; drop table", "\x00"])
async def test_a_place_that_never_was(api: Api, after: str) -> None:
    """A cursor that somebody made up is not a bug of the server."""
    answer = await api.get(f"{QUEUE}/messages", params={"after": after})
    assert answer.status_code in (200, 400, 422)


async def test_whole_numbers_may_be_written_as_json_writes_them(api: Api) -> None:
    """In JSON 2.0 is 2."""
    answer = await api(
        "POST", f"{QUEUE}/re-drive", content='{"limit": 2.0}', headers={"content-type": "application/json"}
    )
    assert answer.json()["done"] == 2


async def test_no_secret_of_an_error_text_gets_out(api: Api) -> None:
    """The handler's exception quoted a password, a token and a signed URL."""
    for path in ("messages", "messages/a1", "stats?by=fingerprint", "export"):
        answer = await api.get(f"{QUEUE}/{path}")
        assert answer.status_code == 200
        assert not [part for part in PARTS_OF_SECRETS if part in answer.text], path


async def test_no_secret_of_a_stranger_gets_out_either(api: Api) -> None:
    """Another bus has parked a message and redacted nothing."""
    [row] = lines(await api.get(f"{QUEUE}/export?where=id=a1"))
    text = "no amqp://wms:hunter2@rabbit, Bearer c2VjcmV0LXRva2Vu1, https://s3/x?X-Amz-Signature=5ecdead"
    row["id"], row["story"]["x-final-error"] = "foreign", text
    row["story"]["x-retry-reason"] = text
    await api.post(f"{QUEUE}/import", content=json.dumps(row), headers=NDJSON)
    for path in ("messages", "messages/foreign", "stats?by=fingerprint", "export"):
        answer = await api.get(f"{QUEUE}/{path}")
        assert answer.status_code == 200
        assert not [part for part in PARTS_OF_SECRETS if part in answer.text], path


async def test_no_secret_of_a_question_comes_back(api: Api) -> None:
    """What is wrong is quoted, but for what looks like a secret."""
    answer = await api.get(f"{QUEUE}/messages", params={"where": "amqp://wms:hunter2@rabbit"})
    assert answer.status_code == 422
    assert "hunter2" not in answer.text


AUDITED = {
    "re-drive": ({"limit": 2}, "re-drive via queue", 2),
    "purge": ({"limit": 3}, "purge", 3),
    "edit": ({"id": "a1", "body": "{}"}, "edit a1", 1),
}


@pytest.mark.parametrize("path", AUDITED)
async def test_every_change_leaves_a_line_in_the_audit_log(
    guarded: Api, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Who, what, how many, from where."""
    order, what, number = AUDITED[path]
    with caplog.at_level(logging.INFO, "eventbus"):
        await guarded.post(f"{QUEUE}/{path}", order, token="anna")
    [fields] = [record.fields for record in caplog.records if getattr(record, "event", "") == "audit"]  # type: ignore[attr-defined]
    assert (fields["by"], fields["role"], fields["what"], fields["messages"]) == ("anna", "admin", what, number)
    assert (fields["queue"], fields["outcome"], fields["address"]) == ("wms-cincout", "done", "127.0.0.1")


async def test_a_change_that_failed_is_in_the_audit_log_too(guarded: Api, caplog: pytest.LogCaptureFixture) -> None:
    """With what went wrong."""
    with caplog.at_level(logging.INFO, "eventbus"):
        await guarded.post(f"{QUEUE}/edit", {"id": "nobody", "body": ""}, token="anna")
    [fields] = [record.fields for record in caplog.records if getattr(record, "event", "") == "audit"]  # type: ignore[attr-defined]
    assert (fields["by"], fields["outcome"]) == ("anna", "failed")
    assert "nobody" in fields["error"]


async def test_looking_leaves_none(guarded: Api, caplog: pytest.LogCaptureFixture) -> None:
    """The audit log is about changes."""
    with caplog.at_level(logging.INFO, "eventbus"):
        await guarded.get(f"{QUEUE}/messages", token="vera")
    assert not [record for record in caplog.records if getattr(record, "event", "") == "audit"]


async def test_a_broker_that_is_gone_is_503(url: str, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a bug of the server: when to try again is said."""
    from eventbus.errors import BrokerUnavailable

    async def gone(*_: object) -> None:
        raise BrokerUnavailable("amqp://wms:hunter2@rabbit does not answer")

    monkeypatch.setattr("eventbus.parking.DeadLetters.depth", gone)
    answer = await api.get(f"{QUEUE}/count")
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert "hunter2" not in answer.text


async def test_a_bug_of_ours_is_told_to_the_log_and_not_to_the_caller(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger learns nothing from it."""

    async def broken(*_: object) -> None:
        raise ZeroDivisionError("the inside of the server")

    monkeypatch.setattr("eventbus.parking.DeadLetters.depth", broken)
    answer = await api.client.get(f"{QUEUE}/count")
    assert answer.status_code == 500
    assert answer.json()["type"] == "urn:eventbus:problem:bug"
    assert "inside" not in answer.text
    assert any(getattr(record, "event", "") == "admin_failed" for record in caplog.records)
