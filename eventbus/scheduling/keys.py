"""Key lanes: of each key one at a time, in the order of arrival; its followers wait behind it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from typing import Generic, TypeVar

Item = TypeVar("Item")


class KeyLanes(Generic[Item]):
    """Who leads each key, and who waits behind. A key without a leader takes no memory."""

    __slots__ = ("_followers", "_leaders")

    def __init__(self) -> None:
        self._leaders: dict[str, Item] = {}
        self._followers: dict[str, deque[Item]] = {}

    def enter(self, key: str, item: Item) -> bool:
        """Whether the item may go on: it is the first of its key, or leads it already. Else it waits here."""
        leader = self._leaders.get(key)
        if leader is None:
            self._leaders[key] = item
            return True
        if leader is item:
            return True
        followers = self._followers.get(key)
        if followers is None:
            self._followers[key] = followers = deque()
        followers.append(item)
        return False

    def leave(self, key: str, item: Item) -> Item | None:
        """The leader is done: the next of its key leads and may go on. Nothing happens for one that never led."""
        if self._leaders.get(key) is not item:
            return None
        followers = self._followers.get(key)
        if followers is None:
            del self._leaders[key]
            return None
        following = followers.popleft()
        if not followers:
            del self._followers[key]
        self._leaders[key] = following
        return following

    def scatter(self, key: str, item: Item) -> list[Item]:
        """The leader was taken away unfinished: nobody of its key may go on here. Its followers, in order."""
        if self._leaders.get(key) is not item:
            return []
        del self._leaders[key]
        return list(self._followers.pop(key, ()))

    def leads(self, key: str, item: Item) -> bool:
        """Whether the item leads its key."""
        return self._leaders.get(key) is item

    @property
    def waiting(self) -> int:
        """How many followers wait."""
        return sum(map(len, self._followers.values()))

    def drop(self, gone: Container[Item]) -> list[Item]:
        """Take out the followers that are gone."""
        dropped: list[Item] = []
        for key, followers in list(self._followers.items()):
            found = [item for item in followers if item in gone]
            if found:
                dropped += found
                left = deque(item for item in followers if item not in gone)
                if left:
                    self._followers[key] = left
                else:
                    del self._followers[key]
        return dropped

    def clear(self) -> list[Item]:
        """Everybody who waits, out; each key's in order."""
        items = [item for followers in self._followers.values() for item in followers]
        self._followers.clear()
        self._leaders.clear()
        return items
