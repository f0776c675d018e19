"""The compose file: complete, safe by default, and each service of profile sim really runs."""

import json
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import expandvars
import pytest
import yaml
from compose_spec.models import ComposeSpecification

from router.options import OPTIONS
from tests.deploy.compose import DEADLINE_S, ROOT, Node, example_environment, free_ports, read

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


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_docker_waits_for_longer_than_the_router_drains() -> None:
    (default,) = (each.default for each in OPTIONS if each.name == "drain_timeout_s")
    drain_s = CHOSEN["DRAIN_TIMEOUT_S"] or default
    assert seconds(SERVICES["router"]["stop_grace_period"]) >= float(drain_s) + 10
    assert "Empty: 30 s." in (ROOT / ".env.example").read_text()
    assert default == 30


def test_every_variable_of_the_router_is_one_that_it_reads() -> None:
    assert set(SERVICES["router"]["environment"]) <= {option.env for option in OPTIONS}


FILES = {
    "CLIENT_KEYS_FILE": "client_keys",
    "ADMIN_KEY_FILE": "admin_key",
    "UPSTREAM_API_KEY_FILE": "upstream_api_key",
    "UPSTREAM_ADMIN_KEY_FILE": "upstream_admin_key",
    "TLS_CERT_FILE": "tls_cert",
    "TLS_KEY_FILE": "tls_key",
}


@pytest.mark.parametrize(("variable", "secret"), FILES.items())
def test_a_key_reaches_the_router_as_a_file_and_is_not_asked_for_where_there_is_none(
    variable: str, secret: str
) -> None:
    setting = f"CROSSOVER_{variable}"
    without = read(CHOSEN)
    assert without["services"]["router"]["environment"][setting] == ""
    assert without["secrets"][secret]["file"] == "/dev/null"
    document = read({**CHOSEN, variable: "/etc/a-file"})
    router = document["services"]["router"]
    assert router["environment"][setting] == f"/run/secrets/{secret}"
    assert secret in router["secrets"]
    assert document["secrets"][secret]["file"] == "/etc/a-file"


def test_prometheus_has_the_key_that_its_configuration_names() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (job,) = (job for job in config["scrape_configs"] if job["job_name"] == "crossover")
    folder, name = job["authorization"]["credentials_file"].rsplit("/", 1)
    assert folder == "/run/secrets"
    assert name in SERVICES["prometheus"]["secrets"]


def ask(url: str, key: str | None = None, body: bytes | None = None) -> tuple[int, str]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    context = ssl._create_unverified_context()
    try:
        request = urllib.request.Request(url, body, headers)
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_keys_and_a_certificate_are_used_once_they_are_named(tmp_path: Path) -> None:
    for name in ("client", "admin"):
        (tmp_path / name).write_text(f"the-{name}-key\n")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    names = ["-subj", "/CN=node.example", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *words, *names], check=True, capture_output=True, timeout=30)
    document = read(
        {
            **CHOSEN,
            "CLIENT_KEYS_FILE": str(tmp_path / "client"),
            "ADMIN_KEY_FILE": str(tmp_path / "admin"),
            "TLS_CERT_FILE": str(certificate),
            "TLS_KEY_FILE": str(key),
        }
    )
    (router,) = free_ports(1)
    node = Node(document, {"30000": router})
    with node.up("router"):  # healthy by its own check, which speaks https
        url = f"https://127.0.0.1:{router}/crossover"
        assert ask(f"{url}/state")[0] == 401
        assert ask(f"{url}/state", "the-client-key")[0] == 200
        assert ask(f"{url}/key", "the-client-key", b"")[0] == 403
        assert ask(f"{url}/key", "the-admin-key", b"")[0] == 200


def test_a_changed_file_is_in_force_after_sighup() -> None:
    (router,) = free_ports(1)
    node = Node(read({**CHOSEN, "ADMIN_KEY_FILE": ""}), {"30000": router})
    with node.up("router"):
        url = f"http://127.0.0.1:{router}/crossover/state"
        assert json.loads(ask(url)[1])["policy"]["name"] == "marginal"
        node.change("router", "/etc/crossover/crossover.yaml", "policy: least-inflight\n")
        node.signal("router", signal.SIGHUP)
        deadline = time.monotonic() + DEADLINE_S
        while json.loads(ask(url)[1])["policy"]["name"] != "least-inflight":
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_doctor_looks_at_the_engines_from_the_routers_container() -> None:
    router, spec, base = free_ports(3)
    node = Node(read(CHOSEN), {"30000": router, "30001": spec, "30002": base})
    with node.up("sim", "router"):
        words = ["crossover", "doctor", "--config", "/etc/crossover/crossover.yaml"]
        ran = node.run("router", *words)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        for expected in ("ok    spec        reachable", "keepalive_s of 60"):
            assert expected in ran.stdout
        documents = ("docs/quickstart.md", "docs/operations.md")
        for text in ((ROOT / name).read_text() for name in documents):
            assert f"docker compose exec router {' '.join(words)}" in " ".join(text.split())


@pytest.mark.parametrize("layout", ["shared", "disjoint"])
def test_profile_sim_serves_a_request_and_says_how_it_is_set_up(layout: str) -> None:
    router, spec, base = free_ports(3)
    document = read({**CHOSEN, "LAYOUT": layout})
    node = Node(document, {"30000": router, "30001": spec, "30002": base})
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
