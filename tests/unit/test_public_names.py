"""The public names: what users' code and checks rely on."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys

import pytest

import eventbus
from eventbus import errors

# The import line of the README and of api.md, as it stands there.
DOCUMENTED = (
    "Batch, Bus, ConsumerStatus, DeadLetter, Delivery, Event, Outcome, RetryPolicy, Service, park, requeue, retry"
)


def test_the_list_of_names_is_sorted_and_has_no_doubles():
    """So that a merge conflict, or a forgotten name, is seen at once."""
    assert eventbus.__all__ == sorted(set(eventbus.__all__))


@pytest.mark.parametrize("name", eventbus.__all__)
def test_every_public_name_is_there_and_documented(name):
    """Everything in __all__ can be imported and says what it is."""
    found = getattr(eventbus, name)
    assert inspect.getdoc(found)


@pytest.mark.parametrize("name", DOCUMENTED.split(", "))
def test_the_documented_names_are_public(name):
    """The line that users type."""
    assert name in eventbus.__all__


def test_star_import_works():
    """Names that are loaded late are there too."""
    code = f"from eventbus import *; print(all([{DOCUMENTED}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_a_missing_name_is_an_attribute_error():
    """The late loading does not hide a mistake."""
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = eventbus.Nonsense


@pytest.mark.parametrize(
    "name",
    [name for name, found in vars(errors).items() if inspect.isclass(found) and found.__module__ == errors.__name__],
)
def test_every_error_is_public_and_in_the_tree(name):
    """All errors have one base, are exported, and stand in the tree at the top of their module."""
    found = getattr(errors, name)
    assert issubclass(found, errors.EventBusError)
    assert getattr(eventbus, name) is found
    assert re.search(rf"\b{name}\b", errors.__doc__ or "")


@pytest.mark.parametrize(
    ("holder", "names"),
    [
        ("Service", "on batch forward dead_letters run"),
        ("Bus", "publish publish_many run serving dead_letters from_env stats topology provision unsubscribe"),
        ("RetryPolicy", "exponential max_attempts delay"),
        ("Event", "data replace"),
        ("Delivery", "attempt is_last_attempt event max_attempts"),
        ("DeadLetter", "entry dlq_metadata data body"),
    ],
)
def test_the_documented_methods_are_there(holder, names):
    """What api.md shows can be called."""
    for name in names.split():
        assert hasattr(getattr(eventbus, holder), name) or name in getattr(eventbus, holder).__annotations__, name


def test_the_dead_letter_operations_are_there():
    """The same on every broker: look, count, re-drive, edit, purge, export, import."""
    letters = eventbus.Bus("memory://").dead_letters("wms-cincout")
    for name in ("count", "browse", "get", "stats", "redrive", "edit", "purge", "export", "import_"):
        assert callable(getattr(letters, name))


@pytest.mark.parametrize("module", ["eventbus.testing", "eventbus.testing.contract"])
def test_the_testing_tools_are_public(module):
    """Users and authors of adapters import them."""
    assert importlib.import_module(module).__doc__
