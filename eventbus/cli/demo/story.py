"""The acts of the demo: publish, watch, look at what was parked, repair, re-drive, sum up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from eventbus.bus import Bus
from eventbus.cli.demo import cast
from eventbus.cli.demo.board import Board
from eventbus.cli.demo.endpoints import Endpoints, serving
from eventbus.cli.demo.screen import Screen, best
from eventbus.cli.exits import Failure
from eventbus.service import Service
from eventbus.status import ConsumerStatus

BEAT: Final = 0.35
"""Seconds between two events, so that an eye can follow."""
PATIENCE: Final = 15.0


async def tell(url: str, screen: Screen | None = None) -> None:
    """Play the whole story on the bus at this URL. Raises Failure if it does not end as it should."""
    screen = screen or best()
    board = Board(screen.changed)
    endpoints = Endpoints(board.answered)
    with board.listening():
        async with serving(endpoints) as address, Bus(url, source=cast.SOURCE) as bus:
            services = cast.services(address)
            async with bus.serving(*services):
                await _publish(bus, services, board, screen)
                parked = await _look(bus, services, board, screen)
                endpoints.fixed = True
                await _redrive(bus, services, board, screen)
    _sum_up(board, parked, screen)


async def _publish(bus: Bus, services: Sequence[Service], board: Board, screen: Screen) -> None:
    screen.heading(
        "1. Events are published, and each endpoint's HTTP status decides what happens next",
        "2xx: done. 409, 429, 5xx: again 0.6 s later, three times at most (429 asks for 1 s). 425: not yet, at no",
        "cost. 404: mapped to 'park' on its route. The bus is a temporary SQLite file, the endpoints are on 127.0.0.1.",
    )
    with screen.watching(board):
        for event in cast.events():
            board.add(event, services)
            await bus.publish_many([event])
            await asyncio.sleep(BEAT)
        if not await board.all_settled(PATIENCE):
            raise Failure("the demo did not come to an end in time; is this machine very busy?")


async def _look(bus: Bus, services: Sequence[Service], board: Board, screen: Screen) -> int:
    screen.heading("2. What was parked, and why (nothing is ever thrown away)")
    rows: list[tuple[object, ...]] = []
    for service in services:
        page = await bus.dead_letters(service).browse(limit=50)
        rows += [(service.name, x.type, x.key, x.reason, x.status, x.retries, x.error) for x in page.letters]
    screen.table(("service", "event", "key", "reason", "status", "retries", "last error"), rows)
    _expect(board, len(rows), "parked")
    return len(rows)


async def _redrive(bus: Bus, services: Sequence[Service], board: Board, screen: Screen) -> None:
    screen.heading("3. The invoice gateway is repaired, the product is registered: the parked ones are re-driven")
    with screen.watching(board):
        for service in services:
            letters = bus.dead_letters(service)
            page = await letters.browse(limit=50)
            board.redriven([letter.id for letter in page.letters])
            await letters.redrive(by="demo")
            await asyncio.sleep(BEAT)
        if not await board.all_settled(PATIENCE):
            raise Failure("the re-driven events did not come to an end in time; is this machine very busy?")
    left = sum([await bus.dead_letters(service).count() for service in services])
    if left:
        raise Failure(f"{left} events are still parked after the re-drive")


def _expect(board: Board, found: int, what: str) -> None:
    wanted = sum(row.verdict is ConsumerStatus.PARK for row in board.rows.values())
    if found != wanted:
        raise Failure(f"{wanted} events should be {what}, {found} are")


def _sum_up(board: Board, parked: int, screen: Screen) -> None:
    events = len(board.rows)
    calls = sum(len(row.answers) for row in board.rows.values())
    handled = sum(row.verdict is ConsumerStatus.ACK for row in board.rows.values())
    if handled != events:
        raise Failure(f"{events} events were published, {handled} were handled")
    screen.heading(
        f"{events} events published, {calls} calls made, {parked} parked and re-driven, {handled} handled, 0 lost: "
        f"{board.elapsed:.1f} s",
        "",
        "Your own: put this into bus.toml, with the address of your endpoint,",
        "",
        "    version = 1",
        '    url = "sqlite:///bus.db"',
        "    [[services.wms-cincout.routes]]",
        '    on = "order.*"',
        '    forward = "http://127.0.0.1:8000/events"',
        "",
        "and type",
        "",
        "    eventbus run bus.toml",
        "    eventbus publish order.created '{\"pedido\": 1042}' --config bus.toml",
        "    eventbus dlq list wms-cincout --config bus.toml",
    )
