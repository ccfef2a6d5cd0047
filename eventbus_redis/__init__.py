"""redis:// and rediss://: the whole contract on Redis Streams.

A stream that all services of a prefix share, with a consumer group each; per service a stream of its own for what
comes back, a sorted set for what waits, a stream of dead letters. Everything that moves a message is one Lua script,
so there is no moment in which it is in two places or in none.

    async with Bus("redis://localhost:6379", source="wms-api") as bus:
        await bus.publish("order.created", {"id": 1})

A worker that dies is found by its leases running out; one that only stood still finds its late settlements refused.
It needs Redis 7.0 or newer (or Valkey) with `appendonly yes` and `maxmemory-policy noeviction`, and says so loudly
where they are missing. It does not promise: exactly once; order; anything beyond the last second after a power cut.
"""

from eventbus_redis.adapter import RedisAdapter

__all__ = ["RedisAdapter"]
