"""kafka://: a verdict per message on a log that has none.

A topic that all services of a prefix share, with a consumer group each; per service a topic per retry delay, an
append-only topic of dead letters, and a compacted one that says which of them were re-driven or purged.

    async with Bus("kafka://localhost:9092", source="wms-api") as bus:
        await bus.publish("order.created", {"id": 1})

Messages of a partition are handled side by side; what is committed is the prefix of which everything is finished, so a
slow message holds nobody back and a crash skips none. Attempts, crash notes and what is finished beyond the prefix
travel in the metadata of the commit: there is no second store. It does not promise: exactly once; order, unless a
route has `concurrency=1`; depths to the message where a topic has gaps.
"""

from eventbus_kafka.adapter import KafkaAdapter

__all__ = ["KafkaAdapter"]
