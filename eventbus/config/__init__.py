"""bus.toml: one file says which broker, which services, and what they do with which events.

    config = load("bus.toml")
    async with config.bus() as bus:
        await bus.run(*config.services())

`${NAME:-default}` works in every value; `EVENTBUS_URL` and its relatives override the file. Everything wrong is
told at once, one line each: file, key, value, what is allowed. Not imported by `import eventbus`.
"""

from eventbus.config.importing import find_object
from eventbus.config.loading import BusConfig, load, why_not
from eventbus.config.problems import safe_url

__all__ = ["BusConfig", "find_object", "load", "safe_url", "why_not"]
