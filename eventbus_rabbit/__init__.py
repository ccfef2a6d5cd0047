"""RabbitMQ for the event bus: `amqp://` and `amqps://`.

Seed 4's queues to the letter (or quorum queues), retries by copy, confirm and ack through queues with a TTL, dead
letters that can be looked at without being consumed.
"""

from eventbus_rabbit.adapter import RabbitAdapter

__all__ = ["RabbitAdapter"]
