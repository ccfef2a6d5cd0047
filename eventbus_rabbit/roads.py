"""The delayed roads of one service: which exist, and making one on first need."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from eventbus.scheduling.tiers import tier_for
from eventbus_rabbit._errors import Refused
from eventbus_rabbit.names import Names
from eventbus_rabbit.provisioning import Provisioner
from eventbus_rabbit.topology import QueueType, retry_queue

AVOID: Final = 300.0


class Roads:
    """Queues with a TTL that lead back to the work queue."""

    def __init__(
        self, names: Names, queue_type: QueueType, provisioner: Provisioner, made: Callable[[str], None]
    ) -> None:
        self._names = names
        self._queue_type: QueueType = queue_type
        self._provisioner = provisioner
        self._made = made
        # Until it is provisioned here, the base queue of the layout is the one thing that must exist.
        self.known: dict[int, str] = {names.base: names.retry_key}
        self.may_create = False
        self._avoided: dict[int, float] = {}

    async def choose(self, due_at: float) -> tuple[int, str]:
        """Delay in ms and routing key of the road for a message that is due then; made if it is missing."""
        delay = max(0.0, due_at - time.time())
        if self.may_create:
            ms = tier_for(self._open(self._names.tiers()), delay)
            if ms in self.known:
                return ms, self.known[ms]
            queue = retry_queue(self._names, ms, self._queue_type)
            try:
                if not await self._provisioner.queue(queue, "create"):
                    self.known[ms] = queue.bindings[0][1]
                    self._made(queue.name)
                    # It may have been made this instant, here or elsewhere; until it is durable the others must do.
                    self._avoided[ms] = time.monotonic() + self._provisioner.settling
            except Refused:
                self.may_create = False  # no right to configure: the roads there are must do
        ms = tier_for(self._open(sorted(self.known)), delay)
        return ms, self.known[ms]

    def _open(self, tiers: list[int]) -> list[int]:
        now = time.monotonic()
        return [ms for ms in tiers if self._avoided.get(ms, 0.0) <= now] or tiers

    def avoid(self, ms: int) -> None:
        """A road takes messages and does not confirm them: use others for a while.

        A quorum queue that was made less than a second before the broker was killed, and is still empty, has no leader
        ever after (3.10.8: a follower with log index 0): nothing published to it is confirmed. Other roads do as well.
        """
        self._avoided[ms] = time.monotonic() + AVOID

    def forget(self, ms: int) -> None:
        """A road turned out to lead nowhere; it is looked for, and made, again."""
        if len(self.known) > 1:
            self.known.pop(ms, None)
