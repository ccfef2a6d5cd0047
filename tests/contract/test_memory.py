"""The contract on memory://."""

import secrets

import pytest

from eventbus.testing.contract import BrokerUnderTest, ContractSuite


class TestMemory(ContractSuite):
    @pytest.fixture
    def broker(self) -> BrokerUnderTest:
        return BrokerUnderTest(url=f"memory://{secrets.token_hex(8)}")
