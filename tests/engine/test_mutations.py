"""Each hook of the plugin taken away, in turn: something must notice.

Lost as SGLang loses one (it logs that and goes on), a hook is missed by the plugin's own check at
start. Left in place but emptied, it is missed by one of the checks below, which a whole plugin
passes.
"""

import pytest

from sglang_patch.hooks import SCHEDULER_HOOKS
from tests.engine.harness.cases import CROWD, FEATURES, LONG, SQUEEZED
from tests.engine.harness.comparing import accept_ratio
from tests.engine.harness.laboratory import CaseError, Laboratory
from tests.engine.harness.scenario import CHAIN_V2, CLEAN, PLAIN, TREE, CaseResult, Engine, Job

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CASES = [FEATURES["staggered"], LONG, FEATURES["logprobs"]]
"""The last one's OFF steps go through the stock verification, those of the others do not."""
ARMING = "sglang.srt.managers.scheduler.Scheduler.maybe_init_draft_worker"

RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"
RUN_LOOP = "sglang.srt.managers.scheduler.Scheduler.run_event_loop"
EXTEND_V1 = "sglang.srt.speculative.eagle_worker.EAGLEWorker.forward_draft_extend_after_decode"

# What these do shows in no answer: each has a test of its own, below, among the unit tests (the
# pool's) or in test_deferred_sync.py (the last one).
SEEN_ELSEWHERE = {
    RUN_BATCH,
    RUN_LOOP,
    EXTEND_V1,
    (
        "sglang.srt.model_executor.model_runner_kv_cache_mixin."
        "ModelRunnerKVCacheMixin._profile_available_bytes"
    ),
    "sglang.srt.mem_cache.common.release_kv_cache",
}


def worker_of(hook: str) -> Engine:
    """The engine whose worker runs the hook."""
    return CHAIN_V2 if "eagle_worker_v2" in hook else TREE


def alternating(engine: Engine, sabotage: str | None) -> Job:
    return Job(
        engine.with_options("logging", decode_log_interval=3),
        CASES,
        {"SGLANG_SPEC_SWITCH_SCHEDULE": "every:4"},
        sabotage,
    )


def off_and_squeezed(engine: Engine, sabotage: str | None) -> Job:
    small = engine.with_options("squeezed", decode_log_interval=3, **SQUEEZED)
    return Job(small, [CROWD], {"SGLANG_SPEC_SWITCH_SCHEDULE": "off"}, sabotage)


def retractions(result: CaseResult) -> int:
    return sum(output.retractions for output in result.outputs)


def symptoms(engine: Engine, sabotage: str | None, laboratory: Laboratory) -> list[str]:
    """Everything that is wrong with a plugin."""
    try:
        staggered, long, logprobs = (
            laboratory.result(alternating(engine, sabotage), case.name) for case in CASES
        )
        crowd = laboratory.result(off_and_squeezed(engine, sabotage), "crowd")
    except CaseError as error:
        return [f"fails: {error}"]
    plain, plain_logprobs = (
        laboratory.result(Job(PLAIN, CASES), name) for name in ("staggered", "logprobs")
    )
    squeezed = PLAIN.with_options("squeezed", **SQUEEZED)
    plain_crowd = laboratory.result(Job(squeezed, [CROWD]), "crowd")
    stock = laboratory.result(Job(engine, [LONG]), "long")
    if not long.modes:
        return ["never decides"]
    state, stock_length = (
        long.internal_state[name] for name in ("spec_switch", "avg_spec_accept_length")
    )
    added_off = {*long.accepted("off").values(), *logprobs.accepted("off").values()}
    accepted_on = list(long.accepted("on").values())
    checks = {
        "other answers": staggered.tokens == plain.tokens
        and long.tokens == stock.tokens
        and logprobs.tokens == plain_logprobs.tokens,
        "lost slots": staggered.accounting == long.accounting == crowd.accounting == CLEAN,
        "other modes": set(long.modes) == {"on", "off"} and set(crowd.modes) == {"off"},
        "drafts while off": added_off == {1},
        "stale draft": abs(accept_ratio(long, stock) - 1) <= 0.02,
        "reserves too much": engine.spec_v2 or retractions(crowd) <= retractions(plain_crowd),
        "no state": state is not None and long.load["spec_switch"] is not None,
        "not active": state is not None and state["state"] == "active",
        "steps not counted": state is not None and state["tokens"]["on"] >= sum(accepted_on),
        "accept length with off steps": stock_length is not None
        and abs(stock_length - sum(accepted_on) / len(accepted_on)) < 0.1,
    }
    return [symptom for symptom, healthy in checks.items() if not healthy]


@pytest.mark.parametrize("engine", [TREE, CHAIN_V2], ids=str)
def test_the_whole_plugin_has_no_symptom(engine: Engine, laboratory: Laboratory) -> None:
    assert symptoms(engine, None, laboratory) == []


@pytest.mark.parametrize("hook", [h.path for h in SCHEDULER_HOOKS if h.path != ARMING])
def test_a_lost_hook_ends_the_start(hook: str, laboratory: Laboratory) -> None:
    (answer,) = symptoms(worker_of(hook), f"drop-hook:{hook}", laboratory)
    assert answer.startswith("fails: ")
    assert hook.rpartition(".")[2] in answer


@pytest.mark.parametrize("hook", [h.path for h in SCHEDULER_HOOKS if h.path not in SEEN_ELSEWHERE])
def test_an_empty_hook_is_noticed(hook: str, laboratory: Laboratory) -> None:
    assert symptoms(worker_of(hook), f"void-hook:{hook}", laboratory) != []


def test_the_lost_arming_hook_is_noticed(laboratory: Laboratory) -> None:
    """Nothing is left then that could refuse, so the state must be missing."""
    assert symptoms(TREE, f"drop-hook:{ARMING}", laboratory) == ["never decides"]


def unwaiting(sabotage: str = "") -> Job:
    """Always OFF, and the scheduler may not wait for a verification."""
    return Job(
        CHAIN_V2,
        [LONG],
        {"SGLANG_SPEC_SWITCH_SCHEDULE": "off"},
        f"refuse-verify-waits{sabotage}",
    )


def test_the_scheduler_of_v2_never_waits_for_an_off_step(laboratory: Laboratory) -> None:
    result = laboratory.result(unwaiting(), "long")
    assert set(result.modes) == {"off"}


def test_without_the_hook_that_overlaps_off_steps_the_scheduler_waits(
    laboratory: Laboratory,
) -> None:
    with pytest.raises(CaseError, match="waits for a verification"):
        laboratory.result(unwaiting(f"+void-hook:{RUN_BATCH}"), "long")


def test_without_v1s_extend_hook_no_draft_is_left_stale(laboratory: Laboratory) -> None:
    """The diagnostic that it serves has no effect then; `test_draft_state` shows the effect."""
    environment = {
        "SGLANG_SPEC_SWITCH_SCHEDULE": "every:4",
        "SGLANG_SPEC_SWITCH_SKIP_DRAFT_EXTEND": "1",
    }
    result = laboratory.result(Job(TREE, [LONG], environment, f"void-hook:{EXTEND_V1}"), "long")
    stock = laboratory.result(Job(TREE, [LONG]), "long")
    assert accept_ratio(result, stock) == pytest.approx(1.0, abs=0.02)
