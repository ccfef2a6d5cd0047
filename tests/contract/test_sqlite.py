"""The contract on sqlite:///file."""

from pathlib import Path

import pytest

from eventbus.testing.contract import BrokerUnderTest, ContractSuite


class TestSqlite(ContractSuite):
    @pytest.fixture
    def broker(self, tmp_path: Path) -> BrokerUnderTest:
        return BrokerUnderTest(url=f"sqlite:///{tmp_path}/bus.db", settings={"sqlite": {"lease": "1s"}})
