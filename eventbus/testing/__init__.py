"""Testing with the bus: `TestBus` for users' handlers, `eventbus.testing.contract` for authors of adapters."""

from eventbus.testing.bus import TestBus

__all__ = ["TestBus"]
