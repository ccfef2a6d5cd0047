"""What an adapter skips of the contract stands here by name, with its reason; a silent skip fails."""

import pytest

from eventbus.testing.contract import ContractSuite
from tests.contract.test_example_adapter import TestFolderBus
from tests.contract.test_kafka import TestKafka
from tests.contract.test_memory import TestMemory
from tests.contract.test_rabbit import TestRabbitClassic, TestRabbitQuorum
from tests.contract.test_redis import TestRedis
from tests.contract.test_sqlite import TestSqlite

SKIPPED: dict[type[ContractSuite], dict[str, str]] = {
    TestMemory: {},
    TestSqlite: {},
    TestFolderBus: {},
    TestRabbitClassic: {},
    TestRabbitQuorum: {},
    TestRedis: {},
    TestKafka: {},
}


@pytest.mark.parametrize("suite", SKIPPED, ids=lambda suite: suite.__name__)
def test_skips_are_listed_by_name(suite: type[ContractSuite]) -> None:
    """Each suite skips exactly what is listed here, and overrides no test."""
    assert dict(suite.skipped) == SKIPPED[suite]
    names = [name for name in dir(ContractSuite) if name.startswith("test_")]
    assert len(names) > 40
    assert all(getattr(suite, name) is getattr(ContractSuite, name) for name in names)


# Imported to be named, not to be collected again.
del TestFolderBus, TestKafka, TestMemory, TestRabbitClassic, TestRabbitQuorum, TestRedis, TestSqlite
