import pytest

pytest.register_assert_rewrite("eventbus.testing.contract")
