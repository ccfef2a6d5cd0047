"""Completed events and rates in Redis: one script call for many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from eventbus.scheduling.rate import GRAINS
from eventbus.store import Ask, Granted, Seen, Store, Words
from eventbus_redis import _scripts, options
from eventbus_redis._client import Argument, Client

_ANSWERS: Final[tuple[Seen, Seen, Seen]] = ("new", "done", "claimed")


class RedisStore(Store):
    """A key per completed event, which Redis forgets by itself when its window is over."""

    def __init__(self, client: Client, *, own: bool = False) -> None:
        self._client = client
        self._own = own

    @classmethod
    def from_url(cls, url: str) -> RedisStore:
        """The same URLs as for a bus."""
        return cls(Client(options.read(url, {})), own=True)

    async def open(self) -> None:
        """Connect, if it is not the bus's own connection."""
        if self._own:
            await self._client.open()

    async def aclose(self) -> None:
        """Disconnect, if it is not the bus's own connection."""
        if self._own:
            await self._client.aclose()

    async def tell(self, service: str, words: Words, *, window: float, claim: float | None, owner: str) -> list[Seen]:
        """One script call."""
        arguments: list[Argument] = [owner, round(window * 1000), round((claim or 0.0) * 1000)]
        arguments += [len(words.done), *words.done, len(words.let_go), *words.let_go, *words.asks]
        answers = await self._client.run(_scripts.COMPLETED, (_key("completed", service),), arguments)
        return [_ANSWERS[answer] for answer in answers]

    async def permits(self, asks: Sequence[Ask]) -> list[Granted]:
        """One script call for each rate: there are few, and a cluster may keep them on different nodes."""
        answers = []
        for ask in asks:
            arguments = (ask.limit, round(ask.period * 1000), ask.wanted, GRAINS)
            number, opens = await self._client.run(_scripts.PERMITS, (_key("rate", ask.name),), arguments)
            answers.append(Granted(number, opens / 1000))
        return answers


def _key(kind: str, name: str) -> str:
    """Names begin with the prefix: the hash tag of all keys of a bus, and what a user's rights are given for."""
    prefix, _, rest = name.partition("/")
    return f"{{{prefix}}}:{kind}:{rest}"
