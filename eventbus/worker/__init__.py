"""The worker: receive many, schedule, handle, decide, settle many. Knows nothing of brokers.

Read `loop.py` from top to bottom: that is the way of a message.
"""

from eventbus.worker.loop import Health, Worker
from eventbus.worker.solitude import Solitude

__all__ = ["Health", "Solitude", "Worker"]
