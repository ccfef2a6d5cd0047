import pytest
from hypothesis import settings

pytest.register_assert_rewrite("eventbus.testing.contract")
settings.register_profile("no clock", deadline=None)  # a busy machine is not a slow function
settings.load_profile("no clock")
