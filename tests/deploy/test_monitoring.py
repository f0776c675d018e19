"""Rules and dashboards: by Prometheus' own tools, and on the data of a node under load."""

import json
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import yaml

from tests.deploy.compose import ROOT, Node, example_environment, free_ports, read, running

pytestmark = pytest.mark.deploy

RULES = ROOT / "deploy/prometheus/rules"
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
DEADLINE_S = 60.0
# Nothing that is simulated carries the plugin.
OF_THE_PLUGIN = frozenset({"router_engine_switch_state"})


def promtool(*words: str) -> None:
    ran = subprocess.run(
        ["promtool", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_configuration_is_one_that_prometheus_takes() -> None:
    promtool("check", "config", "deploy/prometheus/prometheus.yml")


def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", "deploy/prometheus/tests/alerts_test.yml")


def rules(kind: str) -> dict[str, str]:
    documents = [yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yml"))]
    every = [rule for each in documents for group in each["groups"] for rule in group["rules"]]
    return {rule[kind]: rule["expr"] for rule in every if kind in rule}


def test_every_alert_has_a_test_and_a_paragraph_of_what_to_do() -> None:
    tested = (ROOT / "deploy/prometheus/tests/alerts_test.yml").read_text()
    runbook = (ROOT / "docs/operations.md").read_text()
    for alert in rules("alert"):
        assert f"alertname: {alert}" in tested
        assert f"### {alert}\n" in runbook


def test_the_dashboards_are_those_that_their_tables_make() -> None:
    subprocess.run([sys.executable, "deploy/grafana/build.py", "--check"], cwd=ROOT, check=True)


class Prometheus:
    """A Prometheus that scrapes this machine."""

    def __init__(self, port: str) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query?"

    def ask(self, expr: str) -> list[Any]:
        """The samples that an expression gives now."""
        query = urllib.parse.urlencode({"query": expr})
        with urllib.request.urlopen(self._url + query, timeout=10) as answer:
            result: list[Any] = json.load(answer)["data"]["result"]
        return result

    def gives(self, expr: str) -> bool:
        """Whether it gives a sample by the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not (samples := self.ask(expr)) and time.monotonic() < deadline:
            pass
        return bool(samples)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Profile sim under load, and Prometheus with the shipped files, scraping every second."""
    folder = tmp_path_factory.mktemp("prometheus")
    router, spec, base, port = free_ports(4)
    node = Node(
        read({**example_environment(), "LAYOUT": "disjoint"})["services"],
        {"30000": router, "30001": spec, "30002": base},
    )
    config = node.here((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    config = re.sub(r'"(router|spec|base):', '"127.0.0.1:', config)
    config = config.replace("interval: 5s", "interval: 1s").replace("rules/", f"{RULES}/")
    (folder / "prometheus.yml").write_text(config)
    with ExitStack() as stack:
        stack.enter_context(node.up("sim", "router"))
        node.wait_for(f"http://127.0.0.1:{router}/readyz")
        stack.enter_context(
            running(
                [
                    "prometheus",
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                folder / "prometheus.log",
            )
        )
        node.wait_for(f"http://127.0.0.1:{port}/-/ready")
        load = [
            *("crossover-loadtest", "run", "--url", f"http://127.0.0.1:{router}", "--model", "m"),
            *("--concurrency", "12", "--duration", "600", "--output-tokens", "64"),
        ]
        stack.enter_context(running(load, folder / "load.log"))
        yield Prometheus(port)


def panels() -> Iterator[Any]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield pytest.param(target["expr"], id=f"{path.stem}: {panel['title']}")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("expr", list(panels()))
def test_every_panel_shows_data_of_a_node_under_load(expr: str, prometheus: Prometheus) -> None:
    expr = expr.replace("$server", ".+").replace("$__rate_interval", "30s")
    assert "$" not in expr
    assert prometheus.gives(expr)


@pytest.mark.parametrize("name", list(rules("record")))
def test_every_recording_rule_records(name: str, prometheus: Prometheus) -> None:
    assert prometheus.gives(name)


@pytest.mark.parametrize(("alert", "expr"), list(rules("alert").items()))
def test_every_alert_looks_at_metrics_that_exist(
    alert: str, expr: str, prometheus: Prometheus
) -> None:
    names = set(re.findall(r"\b(?:router_|crossover:|up\b)[a-z_0-9:]*", expr)) - OF_THE_PLUGIN
    assert names or alert == "CrossoverPluginNotActive"
    for name in names:
        assert prometheus.gives(name), name
