from array import array

from loadtest.record import Ending, RequestRow, RunResult
from loadtest.validity import client_figures


def result(latency_s: float, lags_s: list[float], ending: Ending = Ending.OK) -> RunResult:
    rows = [RequestRow(n, 0.0, 0.0, 8, end_s=latency_s, ending=ending) for n in range(9)]
    warm = [RequestRow(-1, -1.0, -1.0, 8, ending=Ending.HTTP)]
    return RunResult(rows, 10.0, 3.0, array("d", lags_s), warmup=warm, processes=2)


def test_a_lag_over_one_percent_of_the_median_latency_is_invalid() -> None:
    found = client_figures(result(1.0, [0.0101] * 100))
    assert found["valid"] is False
    (reason,) = found["invalid_because"]
    assert "10.1 ms (p99)" in reason
    assert "1000.0 ms" in reason


def test_a_lag_up_to_one_percent_is_valid_and_so_is_a_rare_late_moment() -> None:
    found = client_figures(result(1.0, [0.0099] * 999 + [0.5]))
    assert found["valid"] is True
    assert found["client"]["lag_ms"]["max"] == 500


def test_a_run_without_an_answer_is_invalid() -> None:
    found = client_figures(result(1.0, [0.0], Ending.TIMEOUT))
    assert found["invalid_because"] == ["no request was answered"]


def test_cpu_is_a_share_of_one_core_and_the_warm_up_is_stated() -> None:
    found = client_figures(result(1.0, [0.0]))
    assert found["client"]["cpu_share_of_core"] == 0.15
    assert found["warmup"] == {"requests": 1, "errors": 1, "excluded": True}
