"""Rules and dashboards: by Prometheus' own tools, and on the data of a node under load."""

import json
import math
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.compose import ROOT, Node, free_ports, running
from tests.deploy.node import node, node_under_load

pytestmark = pytest.mark.deploy

RULES = ROOT / "deploy/prometheus/rules"
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
# Of all panels and rules together, from the start of the load: the learner needs a while to know
# where the servers cross.
WARM_UP_S = 60.0


def promtool(*words: str) -> None:
    ran = subprocess.run(
        ["promtool", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_configuration_is_one_that_prometheus_takes() -> None:
    # Not whether the key's file is there: it is in the container only.
    promtool("check", "config", "--syntax-only", "deploy/prometheus/prometheus.yml")
    promtool("check", "rules", *map(str, sorted(RULES.glob("*.yml"))))


def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", "deploy/prometheus/tests/alerts_test.yml")


def every_rule() -> list[dict[str, Any]]:
    documents = [yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yml"))]
    return [rule for each in documents for group in each["groups"] for rule in group["rules"]]


def rules(kind: str) -> dict[str, str]:
    return {rule[kind]: rule["expr"] for rule in every_rule() if kind in rule}


def test_every_alert_has_a_test_and_a_paragraph_of_what_to_do() -> None:
    tested = (ROOT / "deploy/prometheus/tests/alerts_test.yml").read_text()
    runbook = (ROOT / "docs/operations.md").read_text()
    for rule in every_rule():
        if alert := rule.get("alert"):
            assert f"alertname: {alert}" in tested
            assert f"### {alert}\n" in runbook
            link = rule["annotations"]["runbook"]
            assert link == f"docs/operations.md#{alert.lower()}"
    headings = re.findall(r"^### (\w+)$", runbook, re.MULTILINE)
    assert sorted(headings) == sorted(rules("alert"))


def test_the_dashboards_are_those_that_their_tables_make() -> None:
    subprocess.run([sys.executable, "deploy/grafana/build.py", "--check"], cwd=ROOT, check=True)


class Prometheus:
    """A Prometheus that scrapes this machine."""

    def __init__(self, port: str) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query?"
        self._deadline = time.monotonic() + WARM_UP_S

    def ask(self, expr: str) -> list[Any]:
        """The samples that an expression gives now."""
        query = urllib.parse.urlencode({"query": expr})
        with urllib.request.urlopen(self._url + query, timeout=10) as answer:
            result: list[Any] = json.load(answer)["data"]["result"]
        return result

    def gives(self, expr: str) -> bool:
        """Whether it gives a number by the deadline, which is the same for all that is asked."""
        while True:
            if any(not math.isnan(float(sample["value"][1])) for sample in self.ask(expr)):
                return True
            if time.monotonic() > self._deadline:
                return False
            time.sleep(0.25)


@contextmanager
def scraping(folder: Path, node: Node, key_file: str) -> Iterator[Prometheus]:
    """Prometheus with the shipped files, scraping a node every second."""
    (port,) = free_ports(1)
    config = node.here((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    config = re.sub(r'"(router|spec|base):', '"127.0.0.1:', config)
    config = config.replace("interval: 5s", "interval: 1s").replace("rules/", f"{RULES}/")
    config = config.replace("/run/secrets/metrics_key", key_file)
    (folder / "prometheus.yml").write_text(config)
    words = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running(words, folder / "prometheus.log"):
        node.wait_for(f"http://127.0.0.1:{port}/-/ready")
        yield Prometheus(port)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus on profile sim under load."""
    folder = tmp_path_factory.mktemp("prometheus")
    # Below the load's 48 by so much that requests wait for room in the router, too.
    limit = {"SERVER_SEQUENCES_MAX": "16"}
    with (
        node_under_load(folder, **limit) as (it, _),
        scraping(folder, it, "/dev/null") as prometheus,
    ):
        yield prometheus


def test_a_router_that_asks_for_keys_lets_prometheus_in_by_its_own(tmp_path: Path) -> None:
    keys, own = tmp_path / "keys", tmp_path / "own"
    keys.write_text("chat:another-key\nprometheus:the-metrics-key\n")
    own.write_text("the-metrics-key\n")
    with (
        node(CLIENT_KEYS_FILE=str(keys)) as (it, _),
        scraping(tmp_path, it, str(own)) as prometheus,
    ):
        assert prometheus.gives('up{job="crossover"} == 1')


def panels() -> Iterator[Any]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield pytest.param(target["expr"], id=f"{path.stem}: {panel['title']}")


@pytest.mark.timeout(150)
@pytest.mark.parametrize("expr", list(panels()))
def test_every_panel_shows_data_of_a_node_under_load(expr: str, prometheus: Prometheus) -> None:
    expr = expr.replace("$server", ".+").replace("$__rate_interval", "30s")
    assert "$" not in expr
    assert prometheus.gives(expr)


def own_names(expr: str) -> set[str]:
    return set(re.findall(r"\b(?:router_|crossover:|up\b)[a-z_0-9:]*", expr))


@pytest.mark.parametrize("name", list(rules("record")))
def test_every_recording_rule_records(name: str, prometheus: Prometheus) -> None:
    assert prometheus.gives(name)


@pytest.mark.parametrize(("alert", "expr"), list(rules("alert").items()))
def test_every_alert_looks_at_metrics_that_exist(
    alert: str, expr: str, prometheus: Prometheus
) -> None:
    assert own_names(expr), alert
    for name in own_names(expr):
        assert prometheus.gives(name), name
