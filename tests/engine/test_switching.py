"""The plugin in the real engine: whatever the mode does, the answers stay those of plain SGLang."""

from collections import Counter

import pytest

from tests.engine.harness.cases import FEATURES, SAMPLED
from tests.engine.harness.comparing import assert_same_answers, homogeneity_p_value, tokens_at
from tests.engine.harness.laboratory import Laboratory
from tests.engine.harness.scenario import CHAIN_V2, CLEAN, PLAIN, SPECULATIVE, TREE, Engine, Job

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SCHEDULES = ("on", "off", "every:1", "every:2", "every:5", "random:7")
PLAIN_JOB = Job(PLAIN, list(FEATURES.values()))

# Stock SGLang applies penalties only approximately to the drafted tokens of an ON step; an OFF step
# applies them exactly.
EXACT = [name for name in FEATURES if name != "penalties"]


def forced(engine: Engine, schedule: str) -> Job:
    """Every feature with the mode of each decode step forced."""
    environment = {"SGLANG_SPEC_SWITCH_SCHEDULE": schedule}
    return Job(engine, list(FEATURES.values()), environment)


def by_threshold(engine: Engine) -> Job:
    """OFF above 3 running requests, ON at 2 or fewer, at once."""
    environment = {
        "SGLANG_SPEC_SWITCH_DISABLE_BATCH_THRESHOLD": "3",
        "SGLANG_SPEC_SWITCH_ENABLE_BATCH_THRESHOLD": "2",
        "SGLANG_SPEC_SWITCH_DWELL_STEPS": "1",
    }
    return Job(engine, list(FEATURES.values()), environment)


FORCED = [forced(engine, schedule) for engine in SPECULATIVE for schedule in SCHEDULES]
THRESHOLD = [by_threshold(engine) for engine in SPECULATIVE]


@pytest.mark.parametrize("feature", EXACT)
@pytest.mark.parametrize("job", FORCED + THRESHOLD, ids=str)
def test_answers_are_those_of_the_plain_engine(
    job: Job, feature: str, laboratory: Laboratory
) -> None:
    result = laboratory.result(job, feature)
    assert_same_answers(result, laboratory.result(PLAIN_JOB, feature))
    assert result.accounting == CLEAN


@pytest.mark.parametrize("job", [forced(engine, "off") for engine in SPECULATIVE], ids=str)
def test_penalties_are_exact_while_off(job: Job, laboratory: Laboratory) -> None:
    result = laboratory.result(job, "penalties")
    assert_same_answers(result, laboratory.result(PLAIN_JOB, "penalties"))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("job", FORCED, ids=str)
def test_the_modes_are_those_forced(job: Job, feature: str, laboratory: Laboratory) -> None:
    """An OFF step adds one token to each request; an ON step of these engines may add more."""
    result = laboratory.result(job, feature)
    assert len(result.modes) == len(result.batch_sizes)
    schedule = job.environment["SGLANG_SPEC_SWITCH_SCHEDULE"]
    if schedule in ("on", "off"):
        assert set(result.modes) == {schedule}
    else:
        assert set(result.modes) == {"on", "off"}


@pytest.mark.parametrize("job", [forced(engine, "off") for engine in SPECULATIVE], ids=str)
def test_an_off_step_adds_one_token_to_each_request(job: Job, laboratory: Laboratory) -> None:
    result = laboratory.result(job, "staggered")
    assert result.accept_length == 1.0


@pytest.mark.parametrize("job", THRESHOLD, ids=str)
def test_the_mode_follows_arrivals_and_departures(job: Job, laboratory: Laboratory) -> None:
    """OFF above three requests, ON at two; between the two, whatever it was.

    Under overlap the decision still counts requests whose last result has not come back.
    """
    result = laboratory.result(job, "burst")
    seen = Counter(zip(result.decided_for, result.modes, strict=True))
    if not job.engine.spec_v2:
        assert result.decided_for == result.batch_sizes
    assert seen[1, "on"] > 0
    assert not any(mode == "off" for size, mode in seen if size <= 2)
    assert not any(mode == "on" for size, mode in seen if size > 3)
    assert seen[10, "off"] > 0


@pytest.mark.parametrize("schedule", ["off", "every:1"])
@pytest.mark.parametrize("engine", [TREE, CHAIN_V2], ids=str)
def test_sampling_across_switches_follows_the_plain_engines_distribution(
    engine: Engine, schedule: str, laboratory: Laboratory
) -> None:
    plain = laboratory.result(Job(PLAIN, [SAMPLED]), "sampled")
    job = Job(engine, [SAMPLED], {"SGLANG_SPEC_SWITCH_SCHEDULE": schedule})
    result = laboratory.result(job, "sampled")
    for position in range(3):
        samples = (tokens_at(position, each) for each in (plain, result))
        assert homogeneity_p_value(*samples) > 1e-3, position
