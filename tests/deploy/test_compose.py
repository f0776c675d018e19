"""The compose file: complete, safe by default, and each service of profile sim really runs."""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import expandvars
import pytest
import yaml
from compose_spec.models import ComposeSpecification

from tests.deploy.compose import ROOT, Node, example_environment, free_ports, read

CHOSEN = {**example_environment(), "LAYOUT": "disjoint"}
SERVICES = read(CHOSEN)["services"]
OWN = ("router", "sim")


def test_a_layout_must_be_chosen() -> None:
    with pytest.raises(expandvars.ParameterNullOrNotSet, match="shared or disjoint"):
        read(example_environment())


def test_every_variable_is_in_the_example_and_every_example_is_used() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    used = set(re.findall(r"\$\{([A-Z_]+)", text))
    assert used == set(example_environment())


@pytest.mark.parametrize("override", sorted((ROOT / "deploy/compose").glob("*.yml")))
def test_an_override_changes_services_that_exist(override: Path) -> None:
    document = yaml.safe_load(override.read_text())
    ComposeSpecification.model_validate(document)
    assert set(document["services"]) <= set(SERVICES)


def merged(low: Any, high: Any) -> Any:
    """What docker compose makes of a value and its override, where both are in the long form."""
    if isinstance(low, dict) and isinstance(high, dict):
        return {key: merged(low.get(key), high.get(key)) for key in {**low, **high}}
    return low if high is None else high


@pytest.mark.parametrize("role", ["spec", "base"])
@pytest.mark.parametrize(
    ("override", "own", "flags"),
    [
        ("h200", {}, ["--attention-backend fa3"]),
        ("h200", {"ATTENTION_BACKEND": "triton"}, ["--attention-backend triton"]),
        (
            "rtx-pro-6000",
            {"ENGINE_ARGS": "--log-level debug"},
            [
                "--attention-backend flashinfer",
                "--enable-flashinfer-allreduce-fusion",
                "--enable-torch-symm-mem",
                "--log-level debug",
            ],
        ),
    ],
)
def test_an_override_changes_its_flags_and_nothing_else(
    override: str, own: dict[str, str], flags: list[str], role: str
) -> None:
    chosen = {**CHOSEN, **own}
    changes = read(chosen, ROOT / f"deploy/compose/{override}.yml")["services"][role]
    before = read(chosen)["services"][role]
    service = merged(before, changes)
    assert service["build"]["dockerfile"] == before["build"]["dockerfile"]
    assert {**service["environment"], **before["environment"]}.keys() == (
        before["environment"].keys()
    )
    ran = subprocess.run(
        [sys.executable, "deploy/docker/launch_engine.py", "--print", *service["command"]],
        env={**service["environment"]},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    for flag in [*flags, "--max-running-requests 256"]:
        assert flag in ran.stdout


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_comes_back_and_can_be_asked_for_its_health(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", OWN)
def test_our_own_containers_have_no_more_rights_than_they_need(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("name", ["spec", "base", "sim"])
def test_no_port_of_an_engine_is_published(name: str) -> None:
    assert "ports" not in SERVICES[name]


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_the_dashboards_answer_on_this_machine_only(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])


def test_every_image_has_a_version() -> None:
    for service in SERVICES.values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), service["image"]


def test_engines_may_take_their_time_to_load_weights() -> None:
    for name in ("spec", "base"):
        assert SERVICES[name]["healthcheck"]["start_period"] == "30m"


@pytest.mark.parametrize("layout", ["shared", "disjoint"])
def test_profile_sim_serves_a_request_and_says_how_it_is_set_up(layout: str) -> None:
    router, spec, base = free_ports(3)
    services = read({**CHOSEN, "LAYOUT": layout})["services"]
    node = Node(services, {"30000": router, "30001": spec, "30002": base})
    with node.up("sim", "router"):
        url = f"http://127.0.0.1:{router}"
        node.wait_for(f"{url}/readyz")
        body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
            assert answer.headers["x-crossover-server"] in ("spec", "base")
        with urllib.request.urlopen(f"{url}/crossover/state", timeout=5) as answer:
            assert layout in answer.read().decode()
