import json

import pytest

from router.dataplane.redact import redact


@pytest.mark.parametrize(
    "name",
    ["api_key", "admin_api_key", "API_KEY", "ssl_keyfile_password", "hf_token", "client_secret",
     "password", "credentials", "api_keys", "authorization",
     "hicache_storage_backend_extra_config"],
)  # fmt: skip
@pytest.mark.parametrize("value", ["s3cret", ["s3cret"], {"x": "s3cret"}])
def test_what_may_be_secret_is_hidden_at_any_depth(name: str, value: object) -> None:
    shown = redact(json.dumps({"a": [{name: value}]}).encode())
    assert shown is not None
    assert b"s3cret" not in shown
    assert json.loads(shown) == {"a": [{name: "***"}]}


@pytest.mark.parametrize(
    "fact",
    [{"max_total_num_tokens": 5}, {"tokenizer_path": "x"}, {"api_key": None}, {"tp_size": 2},
     {"speculative_num_draft_tokens": 4}, {"ssl_keyfile": "/etc/key.pem"}],
)  # fmt: skip
def test_facts_stay(fact: dict[str, object]) -> None:
    shown = redact(json.dumps(fact).encode())
    assert shown is not None
    assert json.loads(shown) == fact


def test_what_is_no_json_is_not_shown() -> None:
    assert redact(b"api_key=1") is None


def test_what_is_too_deep_to_look_through_is_not_shown() -> None:
    assert redact(b'{"a":' * 1000 + b"1" + b"}" * 1000) is None
