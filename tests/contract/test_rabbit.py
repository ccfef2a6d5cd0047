"""The contract on amqp://, on classic queues (seed 4, the default) and on quorum queues."""

import pytest

from eventbus.testing.contract import BrokerUnderTest, ContractSuite
from tests.brokers.rabbit import shared_url


class TestRabbitClassic(ContractSuite):
    @pytest.fixture
    def broker(self) -> BrokerUnderTest:
        return BrokerUnderTest(url=shared_url(), lateness=lambda delay: delay)


class TestRabbitQuorum(ContractSuite):
    @pytest.fixture
    def broker(self) -> BrokerUnderTest:
        # New quorum queues need a moment to survive a SIGKILL of the broker; no test here kills it.
        settings = {"rabbit": {"queue_type": "quorum", "settling": 0}}
        return BrokerUnderTest(url=shared_url(), settings=settings, lateness=lambda delay: delay)
