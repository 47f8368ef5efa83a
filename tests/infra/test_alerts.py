"""Tests of the alert rules and Prometheus' configuration, by its own tool, promtool."""

import subprocess

import pytest
import yaml

from tests.infra.prometheus import ROOT, SHIPPED, find
from tests.test_docs import slugs


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", str(SHIPPED / "prometheus.yml")),
        ("test", "rules", str(SHIPPED / "rules_test.yml")),
    ],
)
def test_promtool_has_no_objection(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [find("promtool"), *arguments], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_seen_firing_and_silent_by_a_test_of_the_rules() -> None:
    rules = yaml.safe_load((SHIPPED / "rules.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in rules for rule in group["rules"] if "alert" in rule}
    tested = [
        (one["alertname"], bool(one["exp_alerts"]))
        for case in yaml.safe_load((SHIPPED / "rules_test.yml").read_text())["tests"]
        for one in case["alert_rule_test"]
    ]
    assert set(tested) == {(alert, fires) for alert in alerts for fires in (True, False)}


def test_every_alert_leads_to_a_paragraph_that_names_it() -> None:
    groups = yaml.safe_load((SHIPPED / "rules.yml").read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert len(alerts) >= 15
    for alert in alerts:
        path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert anchor in slugs(ROOT / path), alert["alert"]
        assert f"`{alert['alert']}`" in (ROOT / path).read_text()
