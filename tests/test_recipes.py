"""The monitoring files in docs/recipes."""

import json
import re

import yaml
from stores import ROOT

RECIPES = ROOT / "docs" / "recipes"
# Gauges of sglang/srt/observability/metrics_collector.py, with these names in SGLang 0.5.17 to 0.5.23.
GAUGES = {"sglang:spec_accept_length", "sglang:gen_throughput"}


def test_alert_and_dashboard_query_metrics_that_sglang_exports() -> None:
    rules = yaml.safe_load((RECIPES / "prometheus-alert.yaml").read_text())
    dashboard = json.loads((RECIPES / "grafana-dashboard.json").read_text())
    alerts = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert set(re.findall(r"\b[a-zA-Z_]\w*:\w+", " ".join([*alerts, *panels]))) == GAUGES
    assert "sglang:spec_accept_length" in alerts[0]
