"""The units of a node without docker: what they start, starts."""

import configparser
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from router.options import OPTIONS
from tests.deploy.compose import ROOT, Node, example_environment, free_ports, running

UNITS = ROOT / "deploy/systemd"


def unit(name: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS / name)
    return dict(parser["Service"])


@pytest.mark.parametrize("role", ["spec", "base"])
def test_an_engines_unit_starts_the_launcher_on_this_machine_only(role: str) -> None:
    service = unit("crossover-engine@.service")
    python, script, *words = shlex.split(service["ExecStart"].replace("%i", role))
    assert Path(script).name == "launch_engine.py"
    assert Path(python).name == "python"
    own = dict(pair.split("=", 1) for pair in service["Environment"].split())
    ran = subprocess.run(
        [sys.executable, ROOT / "deploy/docker/launch_engine.py", "--print", *words],
        env={**example_environment(), "LAYOUT": "disjoint", **own},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert "--host 127.0.0.1 " in ran.stdout
    assert not set(own) & set(example_environment())


def test_the_routers_unit_serves_with_its_settings(tmp_path: Path) -> None:
    router, spec, base = free_ports(3)
    config = (UNITS / "crossover.yaml").read_text()
    for port, local in (("30000", router), ("30001", spec), ("30002", base)):
        config = config.replace(port, local)
    (tmp_path / "crossover.yaml").write_text(config.replace("/var/lib/crossover", str(tmp_path)))
    program, *words = shlex.split(unit("crossover.service")["ExecStart"])
    words = [word.replace("/etc/crossover", str(tmp_path)) for word in words]
    with running([Path(program).name, *words], tmp_path / "log"):
        url = f"http://127.0.0.1:{router}"
        Node.wait_for(f"{url}/healthz")
        with urllib.request.urlopen(f"{url}/crossover/", timeout=5) as answer:
            assert b"<title>Crossover</title>" in answer.read()


def test_a_wrong_setting_is_not_tried_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "crossover.yaml").write_text("treshold: 3\n")
    service = unit("crossover.service")
    program, *words = shlex.split(service["ExecStart"].replace("/etc/crossover", str(tmp_path)))
    ran = subprocess.run(
        [Path(sys.executable).with_name(Path(program).name), *words],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert str(ran.returncode) == service["RestartPreventExitStatus"]


def test_systemd_waits_for_longer_than_the_router_drains() -> None:
    settings = yaml.safe_load((UNITS / "crossover.yaml").read_text())
    waits_s = int(unit("crossover.service")["TimeoutStopSec"])
    assert waits_s >= settings["drain_timeout_s"] + 10


def test_the_settings_that_are_suggested_are_settings_and_name_the_units_credentials() -> None:
    text = (UNITS / "crossover.yaml").read_text()
    suggested = dict(re.findall(r"^# ([a-z_]+): (\S+)$", text, re.MULTILINE))
    assert set(suggested) <= {option.name for option in OPTIONS if option.in_file}
    loaded = re.findall(
        r"^#LoadCredential=([a-z_]+):", (UNITS / "crossover.service").read_text(), re.MULTILINE
    )
    named = [value for key, value in suggested.items() if key.endswith("_file")]
    assert named == [f"/run/credentials/crossover.service/{name}" for name in loaded]


def test_a_reload_is_the_signal_that_reads_the_settings_again() -> None:
    assert unit("crossover.service")["ExecReload"] == "/bin/kill -HUP $MAINPID"
