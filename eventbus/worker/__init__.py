"""The worker: receive many, schedule, handle, decide, settle many. Knows nothing of brokers.

Read `loop.py` from top to bottom: that is the way of a message.
"""

from eventbus.worker.loop import Health, Observe, Worker
from eventbus.worker.solitude import Solitude

__all__ = ["Health", "Observe", "Solitude", "Worker"]
