import copy
import json
from typing import Any

import pytest

from router.core.calibration import (
    Calibration,
    CalibrationError,
    Interference,
    ServerProfile,
    StaleError,
    TpotPoint,
    TtftPoint,
)
from router.core.types import Layout, Role

_SPEC = ServerProfile(
    Role.SPEC,
    None,
    "0.5.12.post1",
    "1x H200",
    (TpotPoint(1, 0.005, 0.004, 0.006, 10, "on"), TpotPoint(64, 0.02, 0.019, 0.021, 4)),
    (TtftPoint(256, 0.011, 0.010, 0.012),),
)
_BASE = ServerProfile(Role.BASE)
_WHOLE = Calibration((_SPEC, _BASE), "llama-8b", Layout.DISJOINT, Interference(1.05, 1.0, 1.1))


def test_what_is_written_is_read_back_equal() -> None:
    text = json.dumps(_WHOLE.to_json())
    assert Calibration.from_json(json.loads(text), "f") == _WHOLE


def test_what_is_unknown_stays_unknown() -> None:
    bare = Calibration((_BASE,))
    assert Calibration.from_json(bare.to_json(), "f") == bare


def change(path: tuple[str | int, ...], value: object) -> Any:
    changed = copy.deepcopy(_WHOLE.to_json())
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), 2, "f: schema is 2, expected 1"),
        (("schema",), True, "f: schema is True, expected 1"),
        (("model",), 7, "f: model is 7, expected a text of 1 to 300 characters, or null"),
        (("layout",), "both", "f: layout is 'both', expected one of shared, disjoint"),
        (("servers",), [], r"f: servers is \[\], expected a list of 1 to 64"),
        (("servers", 0), 3, r"f: servers\[0\] is 3, expected an object"),
        (("servers", 0, "role"), "x", r"f: servers\[0\]\.role is 'x', expected one of spec, base"),
        (
            ("servers", 0, "tpot", 1, "s"),
            -1,
            r"f: servers\[0\]\.tpot\[1\]\.s is -1, expected a number from 1e-07 to 3600",
        ),
        (("servers", 0, "tpot", 0, "s"), float("nan"), r"tpot\[0\]\.s is nan, expected a number"),
        (("servers", 0, "tpot", 0, "low_s"), 9, r"tpot\[0\]\.low_s is 9, .* from 0 to 0\.005"),
        (("servers", 0, "tpot", 0, "mode"), "up", r"tpot\[0\]\.mode is 'up', .* on, off"),
        (("servers", 0, "ttft", 0, "prefill_tokens"), "a", r"prefill_tokens is 'a', expected"),
        (("servers", 1, "role"), "spec", r"expected each name or role once"),
        (("interference", "slowdown"), 0, "f: interference.slowdown is 0, expected a number"),
    ],
)
def test_a_wrong_value_is_told_by_file_key_value_and_what_is_allowed(
    path: tuple[str | int, ...], value: object, message: str
) -> None:
    with pytest.raises(CalibrationError, match=message):
        Calibration.from_json(change(path, value), "f")


@pytest.mark.parametrize("obj", [None, 3, "x", [], {}])
def test_what_is_no_calibration_at_all_is_refused(obj: object) -> None:
    with pytest.raises(CalibrationError, match=r"^f: "):
        Calibration.from_json(obj, "f")


def test_a_server_is_found_by_its_name_before_its_role() -> None:
    own = ServerProfile(Role.SPEC, "eagle-2")
    both = Calibration((_SPEC, own))
    assert both.profile("eagle-2", Role.SPEC) is own
    assert both.profile("eagle-1", Role.SPEC) is _SPEC
    assert both.profile("eagle-2", Role.BASE) is None


@pytest.mark.parametrize(
    ("model", "version", "gpus", "stale"),
    [
        ("llama-8b", "0.5.12.post1", "1x H200", None),
        (None, None, None, None),
        ("qwen", "0.5.12.post1", "1x H200", "model is 'llama-8b', but eagle runs 'qwen'"),
        ("llama-8b", "0.6", "1x H200", "engine_version is '0.5.12.post1', but eagle runs '0.6'"),
        ("llama-8b", None, "2x H200", "gpus is '1x H200', but eagle runs '2x H200'"),
    ],
)
def test_a_file_of_another_model_gpu_or_engine_is_stale(
    model: str | None, version: str | None, gpus: str | None, stale: str | None
) -> None:
    running = ServerProfile(Role.SPEC, "eagle", version, gpus)
    if stale is None:
        _WHOLE.check_fresh("f", model, "eagle", running)
        return
    with pytest.raises(StaleError, match=f"^f: {stale}: calibrate again"):
        _WHOLE.check_fresh("f", model, "eagle", running)
