from dataclasses import fields, replace

import pytest

from router.core.parity import ServerFacts, compare

_EAGLE = ServerFacts("eagle", "llama", 8192, "0.5.12.post1", "bfloat16", 48, "a1b2")
_PLAIN = replace(_EAGLE, name="plain")


def test_equal_servers_give_no_warning() -> None:
    assert compare([_EAGLE, _PLAIN]) == []


@pytest.mark.parametrize(
    ("fact", "value", "remedy"),
    [
        ("served_model_name", "other", "--served-model-name"),
        ("context_length", 4096, "--context-length"),
        ("version", "0.5.13", "same SGLang version"),
        ("dtype", "float16", "--dtype"),
        ("max_running_requests", 256, "48 under speculation"),
        ("chat_template", "c3d4", "--chat-template"),
    ],
)
def test_a_difference_gives_one_warning_with_values_and_remedy(
    fact: str, value: object, remedy: str
) -> None:
    [warning] = compare([_EAGLE, replace(_PLAIN, **{fact: value})])  # type: ignore[arg-type]
    assert warning.startswith(
        f"{fact} differs: eagle has {getattr(_EAGLE, fact)}, plain has {value}: "
    )
    assert remedy in warning


def test_every_fact_is_compared() -> None:
    other = ServerFacts("plain", "other", 1, "1", "other", 1, "other")
    assert len(compare([_EAGLE, other])) == len(fields(ServerFacts)) - 1


def test_what_a_server_did_not_tell_is_no_difference() -> None:
    assert compare([_EAGLE, ServerFacts("plain")]) == []


def test_all_servers_are_named_in_one_warning() -> None:
    third = replace(_PLAIN, name="third", dtype="float16")
    [warning] = compare([_EAGLE, _PLAIN, third])
    assert "eagle has bfloat16, plain has bfloat16, third has float16" in warning
