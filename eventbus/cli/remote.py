"""Dead letters through the admin API: the same methods as straight on the broker, so the commands are the same."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO, Any, Final, Literal
from urllib.parse import quote

from eventbus import letterlines
from eventbus.canary import Canary
from eventbus.cli.api import Api, admin_api
from eventbus.deadletter import DeadLetter
from eventbus.errors import UnknownLetter
from eventbus.filters import Filter
from eventbus.parking import (
    MAX_IDS,
    OUT_OF_TIME,
    DeadLetters,
    LetterPage,
    Progress,
    Report,
    StatKey,
    Where,
    write_out,
)

PAGE: Final = 100
PIECE: Final = 500
"""Letters in one request: between two of them Ctrl-C stops, and the progress bar moves."""
PIECE_BYTES: Final = 4 * 1024 * 1024


@asynccontextmanager
async def remote_letters(url: str, service: str, token_file: str | None) -> AsyncIterator[RemoteLetters]:
    """The queue of a service behind an admin API."""
    async with admin_api(url, token_file) as api:
        yield RemoteLetters(api, service)


class RemoteLetters(DeadLetters):
    """One service's dead letters behind an admin API; who does it is the token's owner."""

    def __init__(self, api: Api, service: str) -> None:
        self._api = api
        self._path = f"/admin/dlq/queues/{quote(service, safe='')}"
        self.service = service
        self.on_scan = lambda read: None

    # --- looking ---------------------------------------------------------------------------------------------

    async def count(self, where: Where = None) -> int:
        """How many are parked."""
        return (await self.depth(where))[0]

    async def depth(self, where: Where = None) -> tuple[int, bool]:
        """How many are parked, and whether that is exact."""
        answer = await self._get("count", {"where": _text(where)})
        return int(answer["count"]), bool(answer.get("exact", True))

    async def browse(self, where: Where = None, after: str | None = None, limit: int = 20) -> LetterPage:
        """A page of letters, oldest first."""
        letters: list[DeadLetter] = []
        while True:
            query = {"where": _text(where), "after": after, "limit": min(PAGE, limit - len(letters))}
            answer = await self._get("messages", query)
            letters += [self._read(row) for row in answer["messages"]]
            after = answer["next"]
            if after is None or len(letters) >= limit:
                return LetterPage(letters, after)

    async def all(self, where: Where = None) -> AsyncIterator[DeadLetter]:
        """Every letter, as they are sent."""
        read = 0
        async for line in self._api.lines(f"{self._path}/export", {"where": _text(where)}):
            read += 1
            if read % PAGE == 0:
                self.on_scan(read)
            yield self._read(json.loads(line))

    async def get(self, id: str) -> list[DeadLetter]:
        """The letters of one event id."""
        try:
            answer = await self._get(f"messages/{quote(id, safe='')}", {})
        except UnknownLetter:
            return []
        return [self._read(row) for row in answer["messages"]]

    async def stats(self, by: StatKey = "reason", where: Where = None) -> dict[str, int]:
        """How many letters there are of each."""
        answer = await self._get("stats", {"by": by, "where": _text(where)})
        counts: dict[str, int] = answer["counts"]
        return counts

    # --- moving ----------------------------------------------------------------------------------------------

    async def redrive(
        self,
        ids: Sequence[str] | None = None,
        *,
        where: Where = None,
        after: str | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        rate: float | None = None,
        canary: int | Canary | None = None,
        reset_attempts: bool = False,
        via: Literal["queue", "retry"] = "queue",
        delay: float = 5.0,
        by: str = "",
        stop: asyncio.Event | None = None,
        progress: Progress | None = None,
    ) -> Report:
        """Put letters back, in requests of a few seconds each."""
        first = Canary(canary) if isinstance(canary, int) else canary
        order: dict[str, Any] = {
            "where": _text(where),
            "dry_run": dry_run,
            "rate": rate,
            "reset_attempts": reset_attempts,
            "via": via,
            "delay": delay,
        }
        if first is not None:
            order["canary"] = {"letters": first.letters, "watch": first.watch, "tolerated": first.tolerated}
        size = PIECE if rate is None else max(1, min(PIECE, int(rate * 5)))
        return await self._moved("re-drive", order, ids, after, limit, size, Report(dry_run=dry_run), stop, progress)

    async def edit(
        self, id: str, body: bytes, *, address: str | None = None, reset_attempts: bool = False, by: str = ""
    ) -> Report:
        """Put one letter back with another body."""
        order = {"id": id, "address": address, "body_base64": base64.b64encode(body).decode()}
        return Report(**await self._post("edit", {**order, "reset_attempts": reset_attempts}))

    async def purge(
        self,
        ids: Sequence[str] | None = None,
        *,
        addresses: Sequence[str] | None = None,
        where: Where = None,
        after: str | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        export: IO[str] | None = None,
        erase: bool = False,
        by: str = "",
        stop: asyncio.Event | None = None,
        progress: Progress | None = None,
    ) -> Report:
        """Remove letters for good; with `export`, each is in the file and on the disk before it is removed."""
        if erase:
            await self.erase(dry_run=True)
        report = Report(dry_run=dry_run)
        if export is None or dry_run:
            order = {"where": _text(where), "dry_run": dry_run, "addresses": _listed(addresses)}
            await self._moved("purge", order, ids, after, limit, PIECE, report, stop, progress)
        else:
            await self._purge_exported(export, ids, where, after, limit, report, stop, progress)
        if erase and not dry_run and not report.stopped:
            report.erased = (await self.erase()).erased
        return report

    async def _purge_exported(
        self,
        export: IO[str],
        ids: Sequence[str] | None,
        where: Where,
        after: str | None,
        limit: int | None,
        report: Report,
        stop: asyncio.Event | None,
        progress: Progress | None,
    ) -> None:
        left = await self.count(where) if limit is None else limit
        pages = self._of_ids(ids) if ids is not None else self._pages(where, after)
        async for letters in pages:
            letters = letters[:left]
            if not letters or (stop is not None and stop.is_set()):
                report.stopped = "stopped" if letters else ""
                break
            write_out(export, letters)
            places = [letter.address for letter in letters]
            report.add(Report(**await self._post("purge", {"addresses": places, "limit": len(places)})))
            left -= len(letters)
            if progress is not None:
                progress(report)

    async def erase(self, *, dry_run: bool = False, by: str = "") -> Report:
        """Take what was purged and re-driven out of the broker's log too."""
        return Report(**await self._post("erase", {"dry_run": dry_run}))

    async def import_(
        self,
        lines: Iterable[str],
        *,
        dry_run: bool = False,
        by: str = "",
        stop: asyncio.Event | None = None,
        progress: Progress | None = None,
    ) -> Report:
        """Park exported letters again, some megabytes at a time."""
        report = Report(dry_run=dry_run)
        for piece in _pieces(lines):
            query = {"dry_run": "true"} if dry_run else {}
            kind = {"content-type": "application/x-ndjson"}
            path = f"{self._path}/import"
            answer = await self._api.ask("POST", path, params=query, content="".join(piece), headers=kind)
            report.add(Report(**answer))
            if progress is not None:
                progress(report)
            if stop is not None and stop.is_set():
                report.stopped = "stopped"
                break
        return report

    async def _moved(
        self,
        path: str,
        order: dict[str, Any],
        ids: Sequence[str] | None,
        after: str | None,
        limit: int | None,
        size: int,
        report: Report,
        stop: asyncio.Event | None,
        progress: Progress | None,
    ) -> Report:
        """Piece by piece, until the limit, the end, a failure or somebody's word."""
        if ids is not None:
            orders = self._by_id(order, list(ids), limit, size, report)
        else:
            # As many as there are now: what is parked again meanwhile goes to the end, and is not reached.
            left = await self.count(order["where"]) if limit is None else limit
            orders = self._by_place(order, after, left, size, report)
        for one in orders:
            if stop is not None and stop.is_set():
                report.stopped = "stopped"
                break
            answer = Report(**await self._post(path, one))
            order["canary"] = None
            report.next, report.stopped = answer.next, "" if answer.stopped == OUT_OF_TIME else answer.stopped
            report.add(answer)
            if progress is not None:
                progress(report)
            if report.stopped:
                break
        return report

    def _by_id(
        self, order: dict[str, Any], ids: list[str], limit: int | None, size: int, report: Report
    ) -> Iterator[dict[str, Any]]:
        while ids and (limit is None or report.matched < limit):
            chosen = ids[: min(size, MAX_IDS)]
            yield {**order, "ids": chosen, "limit": len(chosen) if limit is None else limit - report.matched}
            done = set(report.ids)
            # Out of time: those that were not reached are asked for again.
            ids = [id for id in chosen if id not in done and report.next is not None] + ids[len(chosen) :]

    def _by_place(
        self, order: dict[str, Any], after: str | None, left: int, size: int, report: Report
    ) -> Iterator[dict[str, Any]]:
        report.next = after
        while left > report.matched:
            yield {**order, "after": report.next, "limit": min(size, left - report.matched)}
            if report.next is None:
                break

    async def _pages(self, where: Where, after: str | None) -> AsyncIterator[list[DeadLetter]]:
        while True:
            page = await self.browse(where, after, PAGE)
            yield page.letters
            if page.next is None:
                return
            after = page.next

    async def _of_ids(self, ids: Sequence[str]) -> AsyncIterator[list[DeadLetter]]:
        for id in ids:
            if found := await self.get(id):
                yield found

    # --- asking ----------------------------------------------------------------------------------------------

    def _read(self, row: dict[str, Any]) -> DeadLetter:
        parked = letterlines.load(json.dumps(row))
        return DeadLetter.read(parked._replace(address=row["address"]), self.service)

    async def _get(self, path: str, query: Mapping[str, object]) -> Any:
        return await self._api.get(f"{self._path}/{path}", query)

    async def _post(self, path: str, order: Mapping[str, object]) -> Any:
        return await self._api.post(f"{self._path}/{path}", order)


def _pieces(lines: Iterable[str]) -> Iterator[list[str]]:
    """Lines in pieces for a request each; one that is no letter is told before anything of its piece is sent."""
    piece: list[str] = []
    size = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        letterlines.load(line, number)
        piece.append(line.rstrip("\n") + "\n")
        size += len(line)
        if len(piece) >= PIECE or size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _text(where: Where) -> str | None:
    return (where.text if isinstance(where, Filter) else where) or None


def _listed(addresses: Sequence[str] | None) -> list[str] | None:
    return None if addresses is None else list(addresses)
