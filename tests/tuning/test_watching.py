"""Dashboards and alerts of the chart: every expression parses, and asks for metrics that we really have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml

from mammoth_operator.metrics import Metrics as OperatorMetrics
from mammoth_serving.telemetry import Metrics as StageMetrics

CHART = Path(__file__).resolve().parents[2] / "charts" / "mammoth-operator"
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
ALERTS = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
VARIABLES = {"$__rate_interval": "5m", "$job": ".+", "$instance": ".+"}
GRID_COLUMNS = 24


def expressions() -> Iterator[tuple[str, str]]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                text = target["expr"]
                for name, value in VARIABLES.items():
                    text = text.replace(name, value)
                yield f"{path.stem}: {panel['title']}", text
    for rule in RULES:
        yield rule.get("alert") or rule["record"], rule["expr"]


ALL = [pytest.param(text, id=name) for name, text in expressions()]


def metrics_we_have() -> set[str]:
    registries = [StageMetrics("ar").registry, OperatorMetrics()._registry]
    names = {rule["record"] for rule in RULES if "record" in rule}
    for registry in registries:
        for family in registry.collect():
            endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
            names |= {family.name + ending for ending in endings}
    return names


@pytest.mark.parametrize("text", ALL)
def test_an_expression_parses_and_asks_for_what_there_is(text):
    promql_parser.parse(text)
    asked = set(re.findall(r"\bmammoth[a-z0-9_:]+", text))
    assert asked
    assert asked <= metrics_we_have()


def test_a_wrong_expression_would_be_noticed():
    with pytest.raises(ValueError, match=r".+"):
        promql_parser.parse("sum by (x rate(mammoth_images_total[5m])")


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
class TestDashboard:
    def test_has_an_identity_and_panels_that_do_not_overlap(self, path):
        board = json.loads(path.read_text())
        assert board["uid"] == f"mammoth-{path.stem}"
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        taken = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert at["x"] + at["w"] <= GRID_COLUMNS
            assert not cells & taken
            taken |= cells

    def test_panels_say_what_they_show_in_which_unit_and_choose_no_data_source(self, path):
        for panel in json.loads(path.read_text())["panels"]:
            assert panel["title"]
            assert panel["description"].endswith(".")
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert {panel["datasource"]["uid"], *(target["datasource"]["uid"] for target in panel["targets"])} == {
                "${datasource}"
            }
            assert all("$job" in target["expr"] and "$instance" in target["expr"] for target in panel["targets"])

    def test_rates_follow_the_zoom(self, path):
        """A fixed window hides what is shorter and is empty where scrapes are rarer; a burn rate's is its meaning."""
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                windows = set(re.findall(r"\[([^\]]+)\]", target["expr"]))
                assert windows <= ({"1h"} if panel["title"] == "Burn rate" else {"$__rate_interval"})


@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule["alert"]) for rule in RULES if "alert" in rule])
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule):
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    assert re.fullmatch(r"Mammoth[A-Za-z]+", rule["alert"])
