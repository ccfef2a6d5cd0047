"""A token for one tenant: nothing of another is in counts, lists, stats, exports, errors or re-drives."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eventbus import Bus, Event, Service
from eventbus.console.app import ADMIN_ROUTES
from eventbus.testing.contract.harness import eventually

from .conftest import QUEUE, Api, ApiMaker, failing, lines, park

NDJSON = {"content-type": "application/x-ndjson"}
FOREIGN = ("globex", "g1", "g2", "n1", "None-mark")

ASKED: dict[str, list[dict[str, Any]]] = {
    "alive": [{"path": "/healthz"}],
    "ready": [{"path": "/readyz"}],
    "metrics": [{"path": "/metrics"}],
    "services_stats": [{"path": "/admin/stats"}],
    "who_am_i": [{"path": "/admin/whoami"}],
    "tenants_turns": [{"path": "/admin/fairness/wms-cincout"}],
    "list_queues": [{"path": "/admin/dlq/queues"}],
    "list_messages": [
        {"path": f"{QUEUE}/messages"},
        {"path": f"{QUEUE}/messages?where=tenant=globex"},
        {"path": f"{QUEUE}/messages?where=tenant!=acme"},
        {"path": f"{QUEUE}/messages?limit=1"},
    ],
    "show_message": [{"path": f"{QUEUE}/messages/{id}"} for id in ("a1", "g1", "n1")],
    "count_messages": [{"path": f"{QUEUE}/count"}, {"path": f"{QUEUE}/count?where=tenant=globex"}],
    "count_by": [
        {"path": f"{QUEUE}/stats?by={by}"}
        for by in ("reason", "status", "code", "type", "tenant", "fingerprint", "age")
    ],
    "export_messages": [{"path": f"{QUEUE}/export"}, {"path": f"{QUEUE}/export?where=tenant=globex"}],
    "redrive_messages": [
        {"path": f"{QUEUE}/re-drive", "json": {"ids": ["g1", "n1"]}},
        {"path": f"{QUEUE}/re-drive", "json": {"where": "tenant=globex"}},
        {"path": f"{QUEUE}/re-drive", "json": {"limit": 100, "dry_run": True}},
        {"path": f"{QUEUE}/re-drive", "json": {"limit": 100}},
    ],
    "edit_message": [{"path": f"{QUEUE}/edit", "json": {"id": id, "body": "{}"}} for id in ("g1", "n1", "a1")],
    "purge_messages": [
        {"path": f"{QUEUE}/purge", "json": {"limit": 100, "ids": ["g1", "n1"]}},
        {"path": f"{QUEUE}/purge", "json": {"limit": 100, "addresses": [str(n) for n in range(100)]}},
        {"path": f"{QUEUE}/purge", "json": {"limit": 100}},
    ],
    "erase_messages": [{"path": f"{QUEUE}/erase", "json": {}}],
    "import_messages": [{"path": f"{QUEUE}/import", "content": b"", "headers": NDJSON}],
}
"""Questions to every endpoint; a new endpoint needs some."""


def said(answer: Any, question: dict[str, Any]) -> str:
    """An answer's text, without what the question itself had said."""
    text: str = answer.text
    for word in FOREIGN:
        if word in json.dumps(question.get("json", "")) + question["path"]:
            text = text.replace(f"id {word!r}", "").replace(f'id \\"{word}\\"', "")
    return text


@pytest.mark.parametrize("name", [route.name for route in ADMIN_ROUTES])
async def test_nothing_of_another_tenant_is_in_any_answer(guarded: Api, name: str) -> None:
    """Every endpoint, asked plainly and with what somebody curious would try; the others' letters stay untouched."""
    [route] = [route for route in ADMIN_ROUTES if route.name == name]
    for question in ASKED[name]:
        answer = await guarded(route.method, token="acme", **question)
        assert answer.status_code in ((422,) if name == "erase_messages" else (200, 403, 404)), answer.text
        assert not [word for word in FOREIGN if word in said(answer, question)], answer.text
    everything = guarded.bus.dead_letters(guarded.service)
    assert await everything.count("tenant=globex") == 2
    assert len(await everything.get("n1")) == 1


async def test_figures_are_the_tenants_own(guarded: Api) -> None:
    """Three of six letters are acme's: nowhere is a six, nor a sum that gives it away."""
    assert [q["messages"] for q in (await guarded.get("/admin/dlq/queues", token="acme")).json()["queues"]] == [3, 0]
    assert (await guarded.get(f"{QUEUE}/count", token="acme")).json() == {"count": 3}
    for by in ("reason", "status", "code", "type", "tenant", "fingerprint", "age"):
        counts = (await guarded.get(f"{QUEUE}/stats?by={by}", token="acme")).json()["counts"]
        assert sum(counts.values()) == 3, by
    exported = lines(await guarded.get(f"{QUEUE}/export", token="acme"))
    assert [row["id"] for row in exported] == ["a1", "a2", "a3"]
    dry = (await guarded.post(f"{QUEUE}/re-drive", {"limit": 100, "dry_run": True}, token="acme")).json()
    assert (dry["matched"], dry["ids"]) == (3, ["a1", "a2", "a3"])


async def test_the_last_page_does_not_tell_that_others_stand_behind_it(guarded: Api) -> None:
    """n1 stands behind a3; for acme there is no next page, and nothing to go on with."""
    page = (await guarded.get(f"{QUEUE}/messages?limit=3", token="acme")).json()
    assert ([message["id"] for message in page["messages"]], page["next"]) == (["a1", "a2", "a3"], None)
    report = (await guarded.post(f"{QUEUE}/re-drive", {"limit": 3}, token="acme")).json()
    assert (report["done"], report["next"]) == (3, None)


async def test_the_age_of_the_oldest_is_the_tenants_own(make_api: ApiMaker, bus: Bus, guarded: Api) -> None:
    """g1 is older than what acme has left; its age is none of acme's business."""
    await guarded.post(f"{QUEUE}/purge", {"limit": 100, "where": "tenant=acme"}, token="anna")
    queue = (await guarded.get("/admin/dlq/queues", token="acme")).json()["queues"][0]
    assert (queue["messages"], queue["oldest_seconds"]) == (0, None)
    await park(bus, guarded.service, [("a9", "order.created", "acme")] * 1)
    everybodys = (await guarded.get("/admin/dlq/queues", token="anna")).json()["queues"][0]
    own = (await guarded.get("/admin/dlq/queues", token="acme")).json()["queues"][0]
    assert own["messages"] == 1
    assert own["oldest_seconds"] < everybodys["oldest_seconds"]


async def test_a_letter_of_somebody_else_looks_like_one_that_is_not_there(guarded: Api) -> None:
    """The same words for g1, which exists, as for an id that nobody has."""
    for path, order in (("edit", {"body": "{}"}), ("messages", None)):
        answers = []
        for id in ("g1", "zz"):
            if order is None:
                answer = await guarded.get(f"{QUEUE}/{path}/{id}", token="acme")
            else:
                answer = await guarded.post(f"{QUEUE}/{path}", {"id": id, **order}, token="acme")
            answers.append((answer.status_code, answer.text.replace(id, "ID")))
        assert answers[0] == answers[1]
        assert answers[0][0] == 404


async def test_letters_of_another_tenant_cannot_be_imported(guarded: Api) -> None:
    """Nor can one's own be made into another's."""
    [row] = lines(await guarded.get(f"{QUEUE}/export?where=id=a1", token="acme"))
    row |= {"id": "x1", "tenant": "globex"}
    answer = await guarded("POST", f"{QUEUE}/import", content=json.dumps(row), headers=NDJSON, token="acme")
    assert answer.status_code == 422
    mine = row | {"id": "x2", "tenant": "acme"}
    both = json.dumps(mine) + "\n" + json.dumps(row)
    answer = await guarded("POST", f"{QUEUE}/import", content=both, headers=NDJSON, token="acme")
    assert (answer.status_code, "line 2" in answer.json()["detail"]) == (422, True)
    assert (await guarded.get(f"{QUEUE}/count", token="acme")).json() == {"count": 3}
    row["tenant"] = "acme"
    answer = await guarded("POST", f"{QUEUE}/import", content=json.dumps(row), headers=NDJSON, token="acme")
    assert answer.json()["done"] == 1


async def test_metrics_are_about_all_tenants_and_not_for_one(guarded: Api) -> None:
    """403, and why."""
    answer = await guarded.get("/metrics", token="acme")
    assert answer.status_code == 403
    assert answer.json()["type"] == "urn:eventbus:problem:tenants"


async def test_turns_are_shown_with_all_six_figures_and_only_ones_own(guarded: Api) -> None:
    """The turns of a running service: everybody's for an admin, acme's for acme, a 404 for a service nobody knows."""
    service, bus = failing("wms-empty", fairness=True), guarded.bus
    async with bus.serving(service):
        await bus.publish_many([Event("mail.due", n, tenant=tenant) for tenant in ("acme", "globex") for n in range(4)])
        await eventually(lambda: _total(bus, service) == 14, "all of them had their turn")
        everybody = (await guarded.get("/admin/fairness/wms-empty", token="anna")).json()
        own = (await guarded.get("/admin/fairness/wms-empty", token="acme")).json()
    processed = {turn["companyId"]: turn["totalProcessed"] for turn in everybody["tenants"]}
    assert processed == {"acme": 3 + 4, "globex": 2 + 4, "": 1}, "the six letters' events were its own, too"
    assert [turn["companyId"] for turn in own["tenants"]] == ["acme"]
    assert own["tenants"][0].keys() == {
        "companyId", "lastProcessedAt", "roundsWithoutProcessing", "currentPriority", "totalProcessed",
        "consecutiveBatchCount",
    }  # fmt: skip
    assert (await guarded.get("/admin/fairness/nobody", token="anna")).status_code == 404


def _total(bus: Bus, service: Service) -> int:
    return sum(turn.total_processed for turn in bus.fairness(service))
