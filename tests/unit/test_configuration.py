"""Settings from their three sources, and what is said of each kind of mistake."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from router.configuration import Resolved, changed_live, resolve
from router.core.admission import Room
from router.core.types import Layout, Role, ServerSpec
from router.options import OPTIONS, Option
from router.problems import SettingsError
from router.settings import Security, Settings, Timeouts
from tests.certificates import authority

TWO = {"spec_url": ["http://127.0.0.1:1"], "base_url": ["http://127.0.0.1:2"]}
LIST = """
servers:
  - {name: fast, role: spec, url: "http://h:1", gpus: [0, 1]}
  - {name: wide, role: base, url: "http://h:2", gpus: [2, 3]}
"""


Config = Callable[[str], str]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Write a YAML file and return its path."""

    def write(text: str) -> str:
        path = tmp_path / "crossover.yaml"
        path.write_text(text)
        return str(path)

    return write


def problems(flags: dict[str, list[str]], environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        resolve(flags, environ or {})
    return list(caught.value.problems)


def resolve_file(path: str, environ: dict[str, str] | None = None) -> Resolved:
    return resolve({"config": [path]}, environ or {})


def test_two_urls_are_enough_and_everything_else_has_its_default() -> None:
    spec = ServerSpec("spec", Role.SPEC, "http://127.0.0.1:1")
    base = ServerSpec("base", Role.BASE, "http://127.0.0.1:2")
    assert resolve(TWO, {}).settings == Settings(servers=(spec, base))


def test_several_servers_of_a_role_are_numbered() -> None:
    flags = {"spec_url": ["http://a:1", "http://a:2"], "base_url": ["http://a:3,http://a:4/"]}
    servers = resolve(flags, {}).settings.servers
    assert [(s.name, s.url) for s in servers] == [
        ("spec-1", "http://a:1"),
        ("spec-2", "http://a:2"),
        ("base-1", "http://a:3"),
        ("base-2", "http://a:4"),
    ]


def test_every_option_reaches_the_settings(config: Config, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    text = f"""{LIST}
layout: disjoint
policy: split
threshold: 20
threshold_down: 10
dwell_s: 3
host: 0.0.0.0
port: 8000
connect_timeout_s: 1
first_byte_timeout_s: 2.5
idle_timeout_s: 3
body_limit_mb: 2
keepalive_s: 4
probe_interval_s: 5
log_format: json
log_level: debug
admin_key_file: {key}
"""
    assert resolve_file(config(text)).settings == Settings(
        servers=(
            ServerSpec("fast", Role.SPEC, "http://h:1", (0, 1)),
            ServerSpec("wide", Role.BASE, "http://h:2", (2, 3)),
        ),
        layout=Layout.DISJOINT,
        policy="split",
        threshold=20,
        threshold_down=10,
        dwell_s=3.0,
        host="0.0.0.0",
        port=8000,
        timeouts=Timeouts(1.0, 2.5, 3.0),
        body_limit_bytes=2 * 2**20,
        keepalive_s=4.0,
        probe_interval_s=5.0,
        log_format="json",
        log_level="debug",
        security=Security(admin_key="s3cret"),
    )


def test_a_flag_wins_over_the_environment_and_that_over_the_file(config: Config) -> None:
    path = config(LIST + "threshold: 1\ndwell_s: 1\nport: 1\n")
    environ = {"CROSSOVER_THRESHOLD": "2", "CROSSOVER_DWELL_S": "2", "CROSSOVER_CONFIG": path}
    resolved = resolve({"threshold": ["3"]}, environ)
    settings = resolved.settings
    assert (settings.threshold, settings.dwell_s, settings.port) == (3, 2.0, 1)
    assert resolved.origins["threshold"] == "flag --threshold"
    assert resolved.origins["dwell_s"] == "environment CROSSOVER_DWELL_S"
    assert resolved.origins["port"] == f"{path}:7 port"
    assert resolved.origins["host"] == "default"


def test_an_empty_variable_is_not_set() -> None:
    assert resolve(TWO, {"CROSSOVER_THRESHOLD": ""}).settings.threshold == 8


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_taken_from_the_environment(option: Option, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("layout: disjoint")
    values = {
        "config": str(file), "spec_url": "http://x:1", "base_url": "http://x:1",
        "layout": "shared", "policy": "least-inflight", "host": "::1", "log_format": "text",
        "log_level": "error", "threshold_down": "7", "upstream_verify": "false",
        "allow_target": "true",
        "cors_origins": "https://a.example", "retry_share": "0.5",
        "objective": "rate", "calibration": str(tmp_path / "calibration.json"),
    }  # fmt: skip
    (tmp_path / "calibration.json").write_text('{"schema": 1, "servers": [{"role": "spec"}]}')
    (tmp_path / "key").write_text("s3cret")
    text = values.get(option.name, "9")
    if option.name.endswith(("key_file", "keys_file")):
        text = str(tmp_path / "key")
    elif option.name in ("tls_cert_file", "upstream_cert_file", "upstream_ca_file"):
        text = authority(tmp_path).pair("localhost")
    flags = {name: urls for name, urls in TWO.items() if name != option.name}
    if option.name in ("tls_key_file", "upstream_cert_key_file"):
        text = authority(tmp_path).pair("localhost")
        flags[option.name.replace("key_file", "cert_file").replace("cert_cert", "cert")] = [text]
    resolved = resolve(flags, {option.env: text})
    assert resolved.origins[option.name] == f"environment {option.env}"
    assert resolved.values[option.name] == option.kind.from_text(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("threshhold: 3", "8 threshhold: unknown, did you mean threshold?"),
        ("first-byte-timeout-s: 3", "unknown, did you mean first_byte_timeout_s?"),
        ("workers: 4", "8 workers: not supported: one process serves the node"),
        ("port: '80'", "8 port: '80' is not allowed, expected an integer from 0 to 65535"),
        ("port: 80.5", "8 port: 80.5 is not allowed"),
        ("port: true", "8 port: True is not allowed"),
        ("port: 65536", "8 port: 65536 is not allowed"),
        ("dwell_s: .nan", "8 dwell_s: nan is not allowed"),
        ("retry_share: 1.1", "8 retry_share: 1.1 is not allowed, expected a number from 0 to 1"),
        ("dwell_s: [1]", "8 dwell_s: [1] is not allowed, expected seconds"),
        ("policy: magic", "'magic' is not allowed, expected one of threshold, spec-only"),
        ("policy:", "8 policy: None is not allowed"),
        ("host: ''", "8 host: '' is not allowed"),
        ("dwell_s: 1\ndwell_s: 2", "9 dwell_s: set twice, first at line 8"),
        ("1: 2", "8: a key must be text"),
        ("a: &x 1\nb: *x", "9: not valid YAML: aliases are not supported"),
        ("dwell_s: {", "not valid YAML"),
        ("dwell_s: !!python/object:os.system x", "not valid YAML"),
        ("dwell_s: 2020-99-99", "not valid YAML"),
        ("dwell_s: " + "[" * 1000, "crossover.yaml: nested too deeply"),
        ("host: a\x00b", "not valid YAML: unacceptable character #x0000"),
    ],
)
def test_a_bad_file_is_told_by_file_line_key_and_what_is_allowed(
    config: Config, text: str, expected: str
) -> None:
    path = config(f"# 1\n# 2\n# 3\n{LIST.strip()}\n\n{text}")
    found = problems({"config": [path]})
    assert len(found) == 1
    assert found[0].startswith(path)
    assert expected in found[0]


@pytest.mark.parametrize("text", ["- spec_url", "spec_url", "!!set {spec_url, base_url}"])
def test_a_file_must_be_a_mapping(config: Config, text: str) -> None:
    assert problems({"config": [config(text)]})[0].endswith(
        "expected settings as 'key: value' lines"
    )


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("{name: b, role: spek, url: 'http://h:1'}", "servers[1].role: 'spek' is not allowed"),
        ("{name: b, role: base, url: 'ftp://h:1'}", "servers[1].url: 'ftp://h:1' is not allowed"),
        ("{name: B!, role: base, url: 'http://h:1'}", "servers[1].name: 'B!' is not allowed"),
        ("{name: none, role: base, url: 'http://h:1'}", "servers[1].name: 'none' is not allowed"),
        ("{name: b, role: base, url: 'http://h:1', gpus: 3}", "servers[1].gpus: 3 is not allowed"),
        ("{name: b, role: base, url: 'http://h:1', gpus: [-1]}", "servers[1].gpus: [-1] is not"),
        ("{name: b, role: base, url: 'http://h:1', gpus: [1, 1]}", "gpus: [1, 1] is not allowed"),
        ("{name: b, role: base, url: 'http://h:1', gpu: [1]}", "did you mean gpus?"),
        ("{name: b, role: base}", "servers[1]: url is missing"),
        ("b", "servers[1]: 'b' is not allowed, expected a mapping"),
        ("{name: a, role: base, url: 'http://h:1'}", "name 'a' is also that of"),
        ("{name: b, role: base, url: 'http://H:9/'}", "url 'http://h:9' is also that of"),
        ("{name: b, role: base, url: 'http://h:1', gpus: [3, 4]}", "gpus [3] are also those of"),
    ],
)
def test_a_bad_server_is_told_by_its_place(config: Config, item: str, expected: str) -> None:
    first = "{name: a, role: spec, url: 'http://h:9', gpus: [3]}"
    path = config(f"servers:\n  - {first}\n  - {item}\n")
    found = problems({"config": [path]})
    assert len(found) == 1
    assert found[0].startswith(f"{path}:3 servers[1]")
    assert expected in found[0]


@pytest.mark.parametrize("servers", ["servers: []", "servers: 3", "servers:"])
def test_a_list_of_servers_must_be_one(config: Config, servers: str) -> None:
    assert "expected a list of 1 to 64 servers" in problems({"config": [config(servers)]})[0]


def test_shared_servers_run_on_the_same_gpus(config: Config) -> None:
    found = problems({"config": [config(LIST + "layout: shared\n")]})
    assert found[0].endswith("expected the same with layout shared")
    shared = LIST.replace("[2, 3]", "[1, 0]") + "layout: shared\n"
    assert resolve_file(config(shared)).settings.layout is Layout.SHARED


@pytest.mark.parametrize(
    "url",
    [
        "h:1", "ftp://h:1", "http://", "http://h:99999", "http://h:0", "http://h:x", "http://h:1/%2e",
        "http://h:1?x=1", "http://h:1#x", "http://h :1", "http://h\n:1", "http://h\\x:1", "", ",",
    ],
)  # fmt: skip
def test_a_url_that_is_no_server_root_is_refused(url: str) -> None:
    found = problems({**TWO, "spec_url": [url]})
    assert len(found) == 1
    assert found[0].startswith("flag --spec-url: ")
    assert "expected one or several of http://HOST:PORT" in found[0]


def test_a_server_may_have_tls_and_a_path() -> None:
    flags = {**TWO, "spec_url": ["https://Gate.Example/Engine-1/"]}
    assert resolve(flags, {}).settings.servers[0].url == "https://gate.example/Engine-1"


def test_a_password_in_a_url_is_refused_and_not_shown() -> None:
    found = problems({**TWO, "spec_url": ["http://user:hunter2@h:1"]})
    assert "hunter2" not in found[0]
    assert "password" in found[0]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"policy": ["spec-only"], "spec_url": []}, "'spec-only' needs a spec server"),
        (
            {"base_url": [], "policy": ["split"]},
            "needs a base server and there is none, expected one of spec-only",
        ),
        (
            {"policy": ["threshold"], "threshold": ["4"], "threshold_down": ["5"]},
            "--threshold-down: threshold_down must be",
        ),
        (
            {"policy": ["threshold"], "threshold_down": ["0"]},
            "--threshold-down: threshold_down must be 1 to 8",
        ),
        ({"calibration": ["/no/such/file"]}, "/no/such/file: cannot be read: No such file"),
        ({"calibration": ["/dev/null"]}, "flag --calibration: /dev/null: not JSON"),
        ({"state_file": ["/no/such/dir/f"]}, "expected a file in a directory that exists"),
        ({"state_file": ["/"]}, "flag --state-file: /: expected a file"),
        ({"base_url": TWO["spec_url"]}, "url 'http://127.0.0.1:1' is also that of flag --spec-url"),
        ({"port": ["1", "2"]}, "flag --port: given 2 times, expected once"),
        ({"config": ["/no/such/file"]}, "/no/such/file: cannot be read: No such file"),
        ({"config": ["/"]}, "/: cannot be read: Is a directory"),
        ({"admin_key_file": ["/no/such/key"]}, "/no/such/key: cannot be read: No such file"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(flags: dict[str, list[str]], expected: str) -> None:
    given = {name: texts for name, texts in {**TWO, **flags}.items() if texts}
    found = problems(given)
    assert len(found) == 1
    assert expected in found[0]


def test_one_role_is_enough_for_a_policy_that_needs_no_other() -> None:
    flags = {"base_url": TWO["base_url"], "policy": ["base-only"]}
    assert [s.role for s in resolve(flags, {}).settings.servers] == [Role.BASE]


def test_no_server_at_all_is_told_with_the_ways_to_give_one() -> None:
    assert "--spec-url" in problems({})[0]


def test_servers_come_from_one_place(config: Config) -> None:
    found = problems({"config": [config(LIST)], "spec_url": ["http://x:1"]})
    assert len(found) == 1
    assert "lists the servers, expected only one of the two" in found[0]


def test_unknown_variables_of_our_prefix_are_told_and_others_are_not_ours() -> None:
    found = problems(TWO, {"CROSSOVER_PROT": "1", "PATH": "x", "CROSSOVERX": "1"})
    assert found == ["environment CROSSOVER_PROT: unknown, did you mean CROSSOVER_PORT?"]


def test_all_problems_are_told_at_once(config: Config) -> None:
    path = config(LIST.replace("spec", "spek") + "treshold: 1\n")
    found = problems({"config": [path], "port": ["x"]}, {"CROSSOVER_DWELL_S": "long"})
    assert len(found) == 4


@pytest.mark.parametrize("key", ["", "two\nlines", "ключ", "x" * 5000])
def test_an_admin_key_that_is_none_is_refused_and_not_shown(tmp_path: Path, key: str) -> None:
    path = tmp_path / "key"
    path.write_text(key)
    found = problems({**TWO, "admin_key_file": [str(path)]})
    assert "expected" in found[0]
    assert "4096 bytes at most" in found[0]
    assert not key or key not in found[0]


@pytest.mark.parametrize("name", ["admin_key", "client_keys", "upstream_api_key"])
def test_a_key_in_the_settings_file_is_refused_and_not_shown(config: Config, name: str) -> None:
    found = problems({"config": [config(f"{LIST}{name}: hunter2\n")]})
    assert f"use {name}_file or environment CROSSOVER_{name.upper()}" in found[0]
    assert "hunter2" not in found[0]


def test_settings_do_not_show_the_key() -> None:
    assert "hunter2" not in repr(Settings(servers=(), security=Security(admin_key="hunter2")))


def test_a_file_that_is_no_text_or_too_large_is_told(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    assert problems({"config": [str(path)]}) == [f"{path}: not UTF-8 text"]
    assert "bytes at most" in problems({"config": [config("#" * (2**20 + 1))]})[0]


def test_an_empty_file_sets_nothing(config: Config) -> None:
    flags = {**TWO, "config": [config("# nothing\n")]}
    assert resolve(flags, {}).settings == resolve(TWO, {}).settings


def test_a_calibration_is_read_into_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    point = {"sequences": 4, "s": 0.01}
    servers = [{"role": "base", "tpot": [point]}]
    path.write_text(json.dumps({"schema": 1, "model": "m", "servers": servers}))
    settings = resolve({**TWO, "calibration": [str(path)]}, {}).settings
    assert settings.calibration is not None
    assert settings.calibration.model == "m"
    assert settings.calibration.servers[0].tpot[0].s == 0.01
    assert settings.calibration_source == str(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"schema": 2, "servers": []}, "schema is 2, expected 1"),
        ({"schema": 1, "servers": [{"role": "fast"}]}, "servers[0].role is 'fast', expected one"),
        (
            {"schema": 1, "servers": [{"role": "spec", "tpot": [{"sequences": 1, "s": -1}]}]},
            "servers[0].tpot[0].s is -1, expected a number from",
        ),
    ],
)
def test_a_bad_calibration_is_told_by_key_and_value(
    content: object, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SettingsError) as caught:
        resolve({**TWO, "calibration": [str(path)]}, {})
    assert f"flag --calibration: {path}: {expected}" in str(caught.value)


def test_the_learnt_policy_is_the_default_and_needs_no_second_role() -> None:
    assert resolve(TWO, {}).settings.policy == "marginal"
    assert resolve({"spec_url": TWO["spec_url"]}, {}).settings.policy == "marginal"


def test_a_reload_changes_what_is_live_and_names_the_rest(config: Config) -> None:
    old = resolve(TWO, {})
    path = config("threshold: 3\nport: 1\nlog_level: error\n")
    change = changed_live(old, resolve({**TWO, "config": [path]}, {}))
    settings = change.resolved.settings
    assert (settings.threshold, settings.log_level, settings.port) == (3, "error", 30000)
    assert change.changed == [
        f"threshold 8 -> 3 ({path}:1 threshold)",
        f"log_level info -> error ({path}:3 log_level)",
    ]
    stays = "cannot change without a restart, and stays as it was"
    assert change.kept == [f"flag --config: config {stays}", f"{path}:2 port {stays}"]


def test_a_reload_compares_with_what_is_in_force_not_with_what_was_refused(config: Config) -> None:
    old = resolve(TWO, {})
    once = changed_live(old, resolve({**TWO, "port": ["1"], "threshold": ["3"]}, {})).resolved
    again = changed_live(once, resolve({**TWO, "port": ["30000"], "threshold": ["3"]}, {}))
    assert (again.changed, again.kept) == ([], [])


def test_a_reload_to_a_policy_that_the_servers_in_force_do_not_allow_is_refused() -> None:
    old = resolve({"spec_url": ["http://x:1"], "policy": ["spec-only"]}, {})
    new = resolve({"base_url": ["http://x:1"], "policy": ["base-only"]}, {})
    with pytest.raises(SettingsError, match="'base-only' needs a base server") as refused:
        changed_live(old, new)
    assert "servers cannot change without a restart" in refused.value.problems[0]


def test_a_reload_shows_no_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hunter2")
    old = resolve(TWO, {})
    new = resolve({**TWO, "admin_key_file": [str(tmp_path / "key")]}, {})
    change = changed_live(old, new)
    assert "hunter2" not in str((change.changed, change.kept))
    assert any(line.startswith("keys, certificates") for line in change.kept)
    assert change.resolved.settings.security == old.settings.security


def test_a_server_may_have_a_limit_of_its_own(config: Config) -> None:
    first = "{name: a, role: spec, url: 'http://h:1', sequences_max: 48}"
    second = "{name: b, role: base, url: 'http://h:2'}"
    text = f"servers:\n  - {first}\n  - {second}\nserver_sequences_max: 200\n"
    path = config(text + "server_prefill_tokens_max: 9000\nsequences_max: 220\n")
    limits = resolve({"config": [path]}, {}).settings.admission.limits
    assert limits.of == {"a": Room(48, 9000)}
    assert limits.each == Room(200, 9000)
    assert limits.total == Room(220, None)


@pytest.mark.parametrize("value", ["0", "true", "many", "1.5"])
def test_a_servers_limit_must_be_a_count(config: Config, value: str) -> None:
    server = f"{{name: a, role: spec, url: 'http://h:1', sequences_max: {value}}}"
    found = problems({"config": [config(f"servers:\n  - {server}\n")]})
    assert "servers[0].sequences_max: " in found[0]
    assert "expected an integer from 1 to 100000" in found[0]
