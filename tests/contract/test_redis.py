"""The contract on redis://, with the configuration of docs/redis.conf."""

import pytest

from eventbus.testing.contract import BrokerUnderTest, ContractSuite
from tests.brokers import redis


class TestRedis(ContractSuite):
    @pytest.fixture
    def broker(self) -> BrokerUnderTest:
        return BrokerUnderTest(url=redis.shared_url(), settings={"redis": {"lease": "1s"}})
