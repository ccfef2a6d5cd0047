"""Turns by tenant: a few in a row each, and who has waited longest is next. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from eventbus.shaping import Fairness

Item = TypeVar("Item")

REMEMBERED: Final = 10_000
"""Tenants without work whose figures are kept; the one that was served longest ago is forgotten first."""


@dataclass(frozen=True, slots=True)
class TenantTurns:
    """How one tenant is doing: the six figures of its turns."""

    tenant: str
    last_processed_at: float | None
    rounds_without_processing: int
    current_priority: int
    total_processed: int
    consecutive_batch_count: int

    def as_dict(self) -> dict[str, object]:
        """The same under the names of the admin API."""
        from eventbus.headers import iso

        at = self.last_processed_at
        return {
            "companyId": self.tenant,
            "lastProcessedAt": None if at is None else iso(at),
            "roundsWithoutProcessing": self.rounds_without_processing,
            "currentPriority": self.current_priority,
            "totalProcessed": self.total_processed,
            "consecutiveBatchCount": self.consecutive_batch_count,
        }


class Tenant(Generic[Item]):
    """What waits of one tenant, since which round, and how it was served so far."""

    __slots__ = ("at", "in_a_row", "items", "name", "paused", "served", "since", "turn")

    def __init__(self, name: str, turn: int) -> None:
        self.name = name
        self.turn = turn
        self.items: deque[tuple[float, Item]] = deque()
        self.since = 0
        self.paused = False
        self.in_a_row = 0
        self.served = 0
        self.at: float | None = None


class Turns(Generic[Item]):
    """A queue per tenant and a row of tenants.

    A round is one tenant's turn. The row is in the order of waiting, so its first has waited for most rounds and has
    the most urgent priority of all: choosing is O(1), and no tenant with work waits for more turns than there are
    tenants before it in the row.
    """

    __slots__ = ("_fairness", "_idle", "_length", "_paused", "_round", "_row", "_tenants")

    def __init__(self, fairness: Fairness) -> None:
        self._fairness = fairness
        self._tenants: dict[str, Tenant[Item]] = {}
        self._idle: OrderedDict[str, Tenant[Item]] = OrderedDict()
        self._row: deque[Tenant[Item]] = deque()
        self._round = 0
        self._length = 0
        self._paused = 0

    def __len__(self) -> int:
        return self._length

    def push(self, name: str, item: Item, now: float) -> None:
        """An item of this tenant is ready since `now`."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._idle.pop(name, None) or Tenant[Item](name, self._fairness.turn(name))
            self._tenants[name] = tenant
            self._stand(tenant)
        tenant.items.append((now, item))
        self._length += 1
        if tenant.paused:
            self._paused += 1

    def _stand(self, tenant: Tenant[Item]) -> None:
        """At the end of the row, with nothing waited."""
        tenant.since = self._round
        tenant.in_a_row = 0
        self._row.append(tenant)

    def first(self) -> str | None:
        """The tenant whose item is next; None while nobody stands in the row."""
        return self._row[0].name if self._row else None

    def count(self, name: str) -> int:
        """How many items this tenant has here."""
        tenant = self._tenants.get(name)
        return len(tenant.items) if tenant is not None else 0

    def pop(self, now: float) -> Item:
        """The next item, of the tenant whose turn it is. Only if there is a first."""
        tenant = self._row[0]
        _, item = tenant.items.popleft()
        self._length -= 1
        tenant.in_a_row += 1
        tenant.served += 1
        tenant.at = now
        if not tenant.items:
            self._row.popleft()
            self._round += 1
            self._rest(tenant)
        elif tenant.in_a_row >= tenant.turn:
            self._row.popleft()
            self._round += 1
            self._stand(tenant)
        return item

    def _rest(self, tenant: Tenant[Item]) -> None:
        del self._tenants[tenant.name]
        self._idle[tenant.name] = tenant
        tenant.since = self._round
        if len(self._idle) > REMEMBERED:
            self._idle.popitem(last=False)

    def pause(self, name: str) -> None:
        """This tenant may not be served for now: it leaves the row, with all that it has."""
        tenant = self._tenants[name]
        if not tenant.paused:
            tenant.paused = True
            self._paused += len(tenant.items)
            self._row.remove(tenant)

    def resume(self, name: str) -> None:
        """It may be served again, when its turn comes."""
        tenant = self._tenants.get(name)
        if tenant is not None and tenant.paused:
            tenant.paused = False
            self._paused -= len(tenant.items)
            self._stand(tenant)

    @property
    def oldest(self) -> float | None:
        """Since when the first item of whose turn it is has been ready; roughly the oldest of all."""
        return self._row[0].items[0][0] if self._row else None

    @property
    def paused(self) -> int:
        """How many items belong to tenants that may not be served now."""
        return self._paused

    def newest(self, number: int, *, paused: bool = False) -> list[Item]:
        """Take out up to `number` items, the newest of whoever has most; `paused`: only of tenants that are."""
        taken: list[Item] = []
        while len(taken) < number:
            candidates = [tenant for tenant in self._tenants.values() if tenant.paused or not paused]
            if not candidates:
                break
            longest = max(candidates, key=lambda tenant: len(tenant.items))
            others = sorted((len(tenant.items) for tenant in candidates if tenant is not longest), reverse=True)
            fair = others[0] if others else 0
            count = max(1, min(number - len(taken), len(longest.items) - fair))
            for _ in range(count):
                taken.append(longest.items.pop()[1])
            self._took(longest, count)
        return taken

    def drop(self, gone: Container[Item]) -> list[Item]:
        """Take out the items that are gone."""
        dropped: list[Item] = []
        for tenant in list(self._tenants.values()):
            found = [item for _, item in tenant.items if item in gone]
            if found:
                dropped += found
                tenant.items = deque(entry for entry in tenant.items if entry[1] not in gone)
                self._took(tenant, len(found))
        return dropped

    def _took(self, tenant: Tenant[Item], number: int) -> None:
        """So many of its items were taken out of turn."""
        self._length -= number
        if tenant.paused:
            self._paused -= number
        if tenant.items:
            return
        if tenant.paused:
            tenant.paused = False
        else:
            self._row.remove(tenant)
        self._rest(tenant)

    def clear(self) -> list[Item]:
        """Take out everything."""
        items = [item for tenant in self._tenants.values() for _, item in tenant.items]
        for tenant in list(self._tenants.values()):
            number = len(tenant.items)
            tenant.items.clear()
            self._took(tenant, number)
        return items

    def snapshot(self) -> Iterator[TenantTurns]:
        """The six figures of every tenant that has work, and of those served lately."""
        for waiting, tenants in ((True, self._tenants), (False, self._idle)):
            for tenant in tenants.values():
                rounds = 0 if tenant.in_a_row and waiting else self._round - tenant.since
                yield TenantTurns(
                    tenant.name,
                    tenant.at,
                    rounds,
                    self._fairness.priority(rounds if waiting else 0),
                    tenant.served,
                    tenant.in_a_row,
                )
