"""The rules of docs/prometheus: valid, true of a given hour, and about metrics that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.brokers import promtool

DOCS = Path(__file__).parents[2] / "docs"
RULES = DOCS / "prometheus"


@pytest.mark.parametrize("name", ["recording.rules.yml", "alerts.rules.yml"])
def test_prometheus_takes_the_rules(name: str) -> None:
    """Every expression and template can be read."""
    promtool.run("check", "rules", name, folder=RULES)


def test_the_rules_say_what_they_should() -> None:
    """Each alert fires when it must and not before, each recorded name has its value."""
    promtool.run("test", "rules", "rules_test.yml", folder=RULES)


def test_the_rules_are_about_metrics_that_there_are() -> None:
    """A metric that was renamed would leave an alert that never fires: every name is in the table of docs/admin.md."""
    table = [line for line in (DOCS / "admin.md").read_text().splitlines() if line.startswith("| `eventbus_")]
    told = {name for line in table for name in re.findall(r"`(eventbus_[a-z_]+)`", line)}
    text = (RULES / "recording.rules.yml").read_text() + (RULES / "alerts.rules.yml").read_text()
    used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\b(eventbus_[a-z_]+)\b", text)}
    assert used - told == set()


def test_every_rule_has_a_test() -> None:
    """An alert that nobody has seen fire is a guess."""
    tested = (RULES / "rules_test.yml").read_text()
    alerts = re.findall(r"alert: (\w+)", (RULES / "alerts.rules.yml").read_text())
    assert len(alerts) == 12
    assert [name for name in alerts if f"alertname: {name}" not in tested] == []
