"""A healthy route beside a dead endpoint: its rate against the same route alone. In memory: nothing else shows."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time

from benchmarks.forward import BODY, PORT, count, endpoint
from benchmarks.measure import Figure, goal, goal_of_rounds, show
from eventbus import Bus, Event, Service

NUMBER = 30_000
ROUNDS = 7


def _dead() -> str:
    """A URL where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}/events"


async def _healthy(*, beside_a_dead_one: bool) -> tuple[Figure, int]:
    """POST the healthy route's events, every eleventh in the queue being the dead one's; and how many were parked."""
    service = Service("bench-forward", concurrency=64)
    service.forward("healthy", to=f"http://127.0.0.1:{PORT}/events")
    service.forward("dead", to=_dead())
    types = ("healthy",) * 10 + (("dead",) if beside_a_dead_one else ())
    async with Bus(f"memory://{secrets.token_hex(4)}", source="bench-api") as bus:
        await bus.provision(service)
        await bus.publish_many([Event(type, BODY) for _ in range(NUMBER // 10) for type in types])
        with endpoint():
            cpu = time.process_time()
            async with bus.serving(service):
                while (counted := await asyncio.to_thread(count))["events"] < NUMBER:
                    await asyncio.sleep(0.05)
                # By the endpoint's clock: what becomes of the dead route's events at the end is no time of this one.
                figure = Figure(NUMBER, counted["last"] - counted["first"], time.process_time() - cpu)
        return figure, await bus.dead_letters(service).count()


def run() -> bool:
    print(f"outage: {NUMBER:,} events of a healthy route, alone and beside a dead one's (a tenth as many)")
    runs: dict[bool, list[Figure]] = {False: [], True: []}
    parked = 0
    for number in range(ROUNDS):
        for beside in (number % 2 == 0, number % 2 != 0):  # by turns, so that neither always goes first
            figure, letters = asyncio.run(_healthy(beside_a_dead_one=beside))
            parked += letters
            runs[beside].append(figure)
    for beside, label in ((False, "alone"), (True, "beside a dead endpoint")):
        show(label, max(runs[beside], key=lambda figure: figure.rate))
    share = goal_of_rounds("rate beside a dead endpoint, share of alone", runs[True], runs[False], 0.9)
    return goal("parked meanwhile", parked, 0, at_most=True) and share


if __name__ == "__main__":
    run()
