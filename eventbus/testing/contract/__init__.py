"""The contract suite: what every adapter must show, from outside, before it is fit for use.

    # tests/test_contract.py of your package
    import pytest
    from eventbus.testing.contract import BrokerUnderTest, ContractSuite

    class TestMyBroker(ContractSuite):
        skipped = {}  # "test_name": "why it cannot hold here"

        @pytest.fixture
        def broker(self):
            return BrokerUnderTest(url="mybroker://localhost")

Needs pytest and pytest-asyncio. Add `pytest.register_assert_rewrite("eventbus.testing.contract")` to a conftest.py
for readable failures. Tests use names of their own, so one running broker serves them all.
"""

from eventbus.testing.contract.dead_letters import DeadLetterContract
from eventbus.testing.contract.delivery import DeliveryContract
from eventbus.testing.contract.harness import BrokerUnderTest, Contract
from eventbus.testing.contract.recovery import RecoveryContract
from eventbus.testing.contract.retries import RetryContract
from eventbus.testing.contract.shaping import ShapingContract
from eventbus.testing.contract.verdicts import VerdictContract


class ContractSuite(
    DeliveryContract, VerdictContract, RetryContract, DeadLetterContract, RecoveryContract, ShapingContract
):
    """All of it. Subclass it with a name that begins with Test, and give it a `broker` fixture."""


__all__ = ["BrokerUnderTest", "Contract", "ContractSuite"]
