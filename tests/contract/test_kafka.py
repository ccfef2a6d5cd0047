"""The contract on kafka://."""

import pytest

from eventbus.testing.contract import BrokerUnderTest, ContractSuite
from tests.brokers.kafka import shared_url


class TestKafka(ContractSuite):
    @pytest.fixture
    def broker(self) -> BrokerUnderTest:
        # One partition, so that order can be told; a quick session, so that a vanished consumer is missed soon.
        small = {"partitions": 1, "retry_partitions": 1, "dlq_partitions": 1, "session_timeout": "3s"}
        return BrokerUnderTest(url=shared_url(), settings={"kafka": small}, lateness=lambda delay: delay)
