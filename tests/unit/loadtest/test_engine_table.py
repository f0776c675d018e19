"""The H200 models against what was measured: whole-run output rates of closed loops, tokens per
second.
"""

import pytest

from loadtest.engines import ENGINES
from loadtest.virtual.closed_loop import derive_points, mean_rate_tok_s

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# SGLang 0.5.12.post1 on one H200, 256 tokens in and out, simulated accept length 2.2.
MEASURED_TOK_S = {
    "h200-plain": (203, 391, 781, 1519, 2863, 5001, 8088, 11584, 13941),
    "h200-tree-v1": (208, 445, 877, 1510, 2281, 3033, 3403, 3798, 3813),
    "h200-chain-v2": (280, 547, 1098, 2272, 3660, 6560, 9559, 11096, 11660),
    "h200-chain-v1": (204, 392, 863, 1620, 2942, 5270, 7731, 10323, 10624),
}
CELLS = [
    pytest.param(name, concurrency, rate, id=f"{name}-{concurrency}")
    for name, rates in MEASURED_TOK_S.items()
    for concurrency, rate in zip(CONCURRENCIES, rates, strict=True)
]


@pytest.mark.parametrize(("name", "concurrency", "measured"), CELLS)
def test_a_closed_loop_runs_within_5_percent_of_the_measured_rate(
    name: str, concurrency: int, measured: float
) -> None:
    # A seed that the step times were not derived with.
    rate = mean_rate_tok_s(ENGINES[name], concurrency, 2026)
    assert rate == pytest.approx(measured, rel=0.05)


def test_step_times_follow_from_the_measured_rates() -> None:
    params = ENGINES["h200-plain"]
    derived = derive_points(params, MEASURED_TOK_S["h200-plain"], 3, iterations=1)
    for (_, step_s), (_, committed_s) in zip(derived, params.decode.points, strict=True):
        assert step_s == pytest.approx(committed_s, rel=0.01)


@pytest.mark.parametrize(
    ("name", "base_ms", "slope_ms"), [("field-plain", 9.88, 1.29), ("field-eagle", 7.58, 2.82)]
)
@pytest.mark.parametrize("requests", [1, 8, 64])
def test_the_field_models_run_on_their_lines(
    name: str, base_ms: float, slope_ms: float, requests: int
) -> None:
    line_tok_s = 1e3 * requests / (base_ms + slope_ms * requests)
    rate = mean_rate_tok_s(ENGINES[name], requests, 1)
    assert rate == pytest.approx(line_tok_s, rel=0.05)


def test_only_the_field_models_are_marked_as_interpolated() -> None:
    marked = {name for name, params in ENGINES.items() if params.interpolated}
    assert marked == {"field-plain", "field-eagle"}


def test_a_draft_leaves_less_kv_and_fewer_running_requests() -> None:
    plain, tree = ENGINES["h200-plain"], ENGINES["h200-tree-v1"]
    assert tree.kv_tokens < plain.kv_tokens
    assert tree.max_running_requests == 48
