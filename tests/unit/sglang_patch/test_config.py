import pytest

from sglang_patch.config import Config, ConfigError, is_requested, read_config
from sglang_patch.rule import ScheduledRule, ThresholdRule


def read(**values: str) -> Config | None:
    return read_config({f"SGLANG_SPEC_SWITCH_{name}": value for name, value in values.items()})


def test_nothing_set_asks_for_nothing() -> None:
    assert read_config({"PATH": "/bin"}) is None
    assert not is_requested({"SGLANG_SPEC_SWITCH_DISABLE_BATCH_THRESHOLD": ""})


def test_the_optional_flag_and_a_trace_alone_ask_for_nothing() -> None:
    assert read(OPTIONAL="1", TRACE="trace.jsonl") is None


@pytest.mark.parametrize(("threshold", "enable_at"), [(0, 0), (1, 1), (2, 1), (5, 4), (90, 72)])
def test_speculation_comes_back_at_four_fifths_by_default(threshold: int, enable_at: int) -> None:
    config = read(DISABLE_BATCH_THRESHOLD=str(threshold))
    assert config is not None
    assert (config.disable_above, config.enable_at) == (threshold, enable_at)


def test_every_setting_is_read() -> None:
    config = read(
        DISABLE_BATCH_THRESHOLD="8",
        ENABLE_BATCH_THRESHOLD="6",
        DWELL_STEPS="0",
        OPTIONAL="1",
        TRACE="t.jsonl",
        SKIP_DRAFT_EXTEND="1",
    )
    assert config == Config(8, 6, 0, optional=True, trace="t.jsonl", skip_draft_extend=True)
    assert config.make_rule() == ThresholdRule(8, 6, 0)


def test_the_draft_is_extended_at_each_step_unless_told_otherwise() -> None:
    for kind in ("", "each-step"):
        config = read(DISABLE_BATCH_THRESHOLD="8", DRAFT_SYNC=kind)
        assert config is not None
        assert config.sync_window is None


@pytest.mark.parametrize(("given", "window"), [("", 16), ("1", 1), ("128", 128)])
def test_a_deferred_sync_has_a_window(given: str, window: int) -> None:
    config = read(SCHEDULE="off", DRAFT_SYNC="deferred", SYNC_WINDOW=given)
    assert config is not None
    assert config.sync_window == window


def test_a_schedule_overrides_the_thresholds() -> None:
    config = read(DISABLE_BATCH_THRESHOLD="8", SCHEDULE="off")
    assert config is not None
    assert config.make_rule() == ScheduledRule.parse("off")


def test_goodput_needs_no_threshold_and_speculates_until_times_are_known() -> None:
    config = read(POLICY="goodput", DWELL_STEPS="8", CACHE="/c", TIMES="/t.json")
    assert config == Config(None, None, 8, policy="goodput", cache="/c", times="/t.json")
    assert config.measures
    assert config.make_rule() == ScheduledRule.parse("on")
    assert config.asked_by == "--speculative-switch-policy goodput"


def test_a_forced_schedule_needs_no_step_times() -> None:
    config = read(POLICY="goodput", SCHEDULE="off")
    assert config is not None
    assert not config.measures
    assert config.make_rule() == ScheduledRule.parse("off")


def test_the_threshold_is_the_default_policy() -> None:
    assert read(POLICY="threshold", DISABLE_BATCH_THRESHOLD="8") == read(
        DISABLE_BATCH_THRESHOLD="8"
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"POLICY": "fastest"}, "--speculative-switch-policy must be threshold or goodput"),
        (
            {"DISABLE_BATCH_THRESHOLD": "5", "TIMES": "t"},
            "SGLANG_SPEC_SWITCH_TIMES has no effect without --speculative-switch-policy goodput",
        ),
        ({"POLICY": "threshold"}, "--speculative-switch-policy has no effect without"),
        (
            {"POLICY": "goodput", "DISABLE_BATCH_THRESHOLD": "5"},
            "--speculative-disable-batch-threshold belongs to .* Remove one of them",
        ),
        (
            {"POLICY": "goodput", "ENABLE_BATCH_THRESHOLD": "5"},
            "--speculative-enable-batch-threshold belongs to",
        ),
        ({"DISABLE_BATCH_THRESHOLD": "-1"}, "--speculative-disable-batch-threshold .* not '-1'"),
        ({"DISABLE_BATCH_THRESHOLD": "five"}, "--speculative-disable-batch-threshold .* whole"),
        (
            {"DISABLE_BATCH_THRESHOLD": "5", "ENABLE_BATCH_THRESHOLD": "6"},
            "--speculative-enable-batch-threshold 6 exceeds .* Use at most 5",
        ),
        (
            {"DISABLE_BATCH_THRESHOLD": "5", "ENABLE_BATCH_THRESHOLD": "0"},
            "never switch speculation on again",
        ),
        ({"ENABLE_BATCH_THRESHOLD": "5"}, "no effect without --speculative-disable-batch-thr"),
        ({"DWELL_STEPS": "5"}, "--speculative-switch-dwell-steps has no effect"),
        ({"DISABLE_BATCH_THRESHOLD": "5", "OPTIONAL": "maybe"}, "--speculative-switch-optional"),
        ({"DRAFT_SYNC": "deferred"}, "--speculative-switch-draft-sync has no effect"),
        (
            {"SCHEDULE": "off", "DRAFT_SYNC": "later"},
            "--speculative-switch-draft-sync must be each-step or deferred, not 'later'",
        ),
        (
            {"SCHEDULE": "off", "SYNC_WINDOW": "4"},
            "--speculative-switch-sync-window has no effect without .*-draft-sync deferred",
        ),
        *(
            (
                {"SCHEDULE": "off", "DRAFT_SYNC": "deferred", "SYNC_WINDOW": steps},
                f"--speculative-switch-sync-window must be 1 to 128 OFF steps, not {steps}",
            )
            for steps in ("0", "129")
        ),
        (
            {"SCHEDULE": "off", "DRAFT_SYNC": "deferred", "SKIP_DRAFT_EXTEND": "1"},
            "SGLANG_SPEC_SWITCH_SKIP_DRAFT_EXTEND leaves the draft stale",
        ),
        ({"SCHEDULE": "weekly"}, "SGLANG_SPEC_SWITCH_SCHEDULE: 'weekly' is not one of"),
    ],
)
def test_what_cannot_be_used_is_named_with_the_way_out(
    values: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**values)
