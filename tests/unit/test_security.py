"""Keys and certificates: where they may come from, and what is said of those that are wrong."""

from pathlib import Path
from typing import Any

import pytest

from router.cli import main, printed
from router.configuration import resolve
from router.problems import SettingsError
from router.settings import Access, ClientKey, Security
from router.tls import ClientTls, ServerTls, TlsError
from tests.certificates import Authority, authority

TWO = {"spec_url": ["https://127.0.0.1:1"], "base_url": ["http://127.0.0.1:2"]}


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return authority(tmp_path)


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def security(environ: dict[str, str] | None = None, **flags: str) -> Security:
    return resolve(
        {**TWO, **{name: [value] for name, value in flags.items()}}, environ or {}
    ).settings.security


def refused(environ: dict[str, str] | None = None, **flags: str) -> str:
    with pytest.raises(SettingsError) as caught:
        security(environ, **flags)
    (problem,) = caught.value.problems
    return problem


def test_client_keys_are_one_a_line_with_or_without_a_name(tmp_path: Path) -> None:
    text = "# who may\nsk-1\n\n  chat:sk:2,3  \nbatch:sk-4\n"
    found = security(client_keys_file=write(tmp_path, "keys", text)).client_keys
    assert found == (ClientKey("sk-1"), ClientKey("sk:2,3", "chat"), ClientKey("sk-4", "batch"))


def test_client_keys_in_the_environment_have_commas_between_them() -> None:
    found = security({"CROSSOVER_CLIENT_KEYS": "sk-1, chat:sk-2"}).client_keys
    assert found == (ClientKey("sk-1"), ClientKey("sk-2", "chat"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "0 keys, expected 1 to 1024"),
        ("# none\n", "0 keys, expected 1 to 1024"),
        ("sk-1\nhunter 2\n", "keys line 2: expected one line of printable ASCII without blanks"),
        ("sk-1\nhunter\u00e9\n", "keys line 2: expected one line of printable ASCII"),
        ("hunter2\na:hunter2\n", "keys line 2: a key that is there before"),
        ("\n".join(f"hunter{n}" for n in range(1025)), "1025 keys, expected 1 to 1024"),
    ],
)
def test_bad_client_keys_are_told_by_line_and_not_shown(
    tmp_path: Path, text: str, expected: str
) -> None:
    problem = refused(client_keys_file=write(tmp_path, "keys", text))
    assert expected in problem
    assert "hunter" not in problem


def test_the_admin_key_is_no_client_key(tmp_path: Path) -> None:
    keys = write(tmp_path, "keys", "hunter2")
    problem = refused({"CROSSOVER_ADMIN_KEY": "hunter2"}, client_keys_file=keys)
    assert "keys line 1: the admin key, expected another one for clients" in problem
    assert "hunter2" not in problem


def test_a_key_may_come_from_one_place_only(tmp_path: Path) -> None:
    key = write(tmp_path, "key", "hunter2")
    problem = refused({"CROSSOVER_ADMIN_KEY": "hunter3"}, admin_key_file=key)
    assert problem == (
        "flag --admin-key-file: environment CROSSOVER_ADMIN_KEY is set too,"
        " expected only one of the two"
    )


def test_what_all_servers_share_and_what_one_has_alone(tmp_path: Path, ca: Authority) -> None:
    for name in ("all", "one", "boss"):
        write(tmp_path, name, f"{name}-key\n")
    pair = ca.pair("router")
    text = f"""
servers:
  - {{name: a, role: spec, url: "https://h:1", api_key_file: {tmp_path}/one,
      admin_key_env: BOSS, ca_file: {ca.ca_file}, cert_file: {pair}}}
  - {{name: b, role: base, url: "https://h:2", verify: false}}
upstream_api_key_file: {tmp_path}/all
"""
    config = write(tmp_path, "c.yaml", text)
    resolved = resolve({"config": [config]}, {"BOSS": "boss-key"})
    expected = {
        "a": Access("one-key", "boss-key", ClientTls(ca.ca_file, pair)),
        "b": Access("all-key", None, ClientTls(verify=False)),
    }
    assert resolved.settings.security.access == expected
    shown = printed(resolved)
    assert "-key\n" not in shown
    assert "boss-key" not in shown
    again = write(tmp_path, "again.yaml", shown)
    assert resolve({"config": [again]}, {"BOSS": "boss-key"}).settings == resolved.settings


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (
            "api_key: hunter2",
            "settings files are passed around; use api_key_file or api_key_env",
        ),
        ("admin-key: hunter2", "use admin_key_file or admin_key_env"),
        ("api_key_env: NOT_SET", "environment NOT_SET: expected one line"),
        ("api_key_file: /no/such", "/no/such: cannot be read: No such file"),
        ("api_key_env: BOSS, api_key_file: /x", "api_key_env and api_key_file, expected only one"),
        ("verify: maybe", "verify: 'maybe' is not allowed, expected true or false"),
        ("ca_file: /no/such", "certificates with http://h:1, expected an https URL"),
    ],
)
def test_bad_access_to_one_server_is_told(tmp_path: Path, key: str, expected: str) -> None:
    text = f'servers:\n  - {{name: a, role: spec, url: "http://h:1", {key}}}\n'
    with pytest.raises(SettingsError) as caught:
        resolve({"config": [write(tmp_path, "c.yaml", text)], "policy": ["spec-only"]},
                {"BOSS": "hunter2"})  # fmt: skip
    (problem,) = caught.value.problems
    assert expected in problem
    assert "c.yaml:2" in problem
    assert "hunter2" not in problem


def test_what_is_wrong_with_a_key_of_all_servers_is_told_once(tmp_path: Path) -> None:
    text = """
servers:
  - {name: a, role: spec, url: "http://h:1"}
  - {name: b, role: base, url: "http://h:2"}
upstream_api_key_file: /no/such
"""
    with pytest.raises(SettingsError) as caught:
        resolve({"config": [write(tmp_path, "c.yaml", text)]}, {})
    (problem,) = caught.value.problems
    assert "upstream_api_key_file: /no/such: cannot be read" in problem


def test_certificates_are_looked_at_before_the_start(tmp_path: Path, ca: Authority) -> None:
    pair, other = ca.pair("a"), ca.pair("b")
    only_cert = Path(pair).read_text().split("-----BEGIN CERTIFICATE")[1]
    cert = write(tmp_path, "cert.pem", "-----BEGIN CERTIFICATE" + only_cert)
    assert security(tls_cert_file=pair).tls == ServerTls(pair)
    assert security(tls_cert_file=cert, tls_key_file=pair).tls == ServerTls(cert, pair)
    for flags in (
        {"tls_cert_file": cert},
        {"tls_cert_file": cert, "tls_key_file": other},
        {"tls_cert_file": ca.ca_file},
        {"upstream_cert_file": cert},
    ):
        assert "expected a certificate and its private key" in refused(**flags)
    assert "cannot be read" in refused(tls_cert_file="/no/such")
    assert "a key without tls_cert_file" in refused(tls_key_file=pair)
    assert "expected certificates, in PEM" in refused(
        upstream_ca_file=write(tmp_path, "none.pem", "nothing")
    )


def test_a_key_behind_a_password_is_refused_and_asks_for_none(
    tmp_path: Path, ca: Authority
) -> None:
    from cryptography.hazmat.primitives import serialization as form

    pair = Path(ca.pair("a"))
    key = form.load_pem_private_key(pair.read_bytes().split(b"-----BEGIN CERT")[0], None)
    locked = key.private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(b"word")
    )
    tls = ServerTls(str(pair), write(tmp_path, "locked.pem", locked.decode()))
    with pytest.raises(TlsError, match="private key without a password"):
        tls.context()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("*", ("*",)),
        ("https://A.example/, http://localhost:3000", ("https://a.example", "http://localhost:3000")),
        ("https://a.example/path", None), ("a.example", None), ("*, https://a.example", None),
        ("https://u@a.example", None), ("null", None), ("ftp://a.example", None),
    ],
)  # fmt: skip
def test_origins_are_checked(text: str, found: Any) -> None:
    if found is None:
        assert "--cors-origins" in refused(cors_origins=text)
    else:
        assert security(cors_origins=text).cors_origins == found


def test_no_command_prints_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CLIENT_KEYS", "ADMIN_KEY", "UPSTREAM_API_KEY"):
        monkeypatch.setenv(f"CROSSOVER_{name}", f"hunter-{name}")
    flags = ["--spec-url", "http://h:1", "--base-url", "http://h:2"]
    flags += ["--upstream-admin-key-file", write(tmp_path, "boss", "hunter-file")]
    assert main(["serve", *flags, "--print-config"]) == 0
    assert main(["check-config", *flags]) == 0
    assert main(["serve", *flags, "--client-keys", "hunter-flag"]) == 2
    captured = capsys.readouterr()
    assert "hunter" not in captured.out
    assert "hunter" not in captured.err
