import pytest

from sglang_patch.estimates import MEDIAN_WINDOW, Figures, Means, Medians


@pytest.mark.parametrize("kind", [Means(window=10, prior=4), Medians()])
def test_nothing_seen_is_unknown(kind: Means | Medians) -> None:
    assert kind.figures().at(8) is None


def test_a_size_not_seen_is_taken_for_all_of_them() -> None:
    means, medians = Means(window=10, prior=4), Medians()
    means.add(2, 3.0, 1)
    for _ in range(MEDIAN_WINDOW):
        medians.add(2, 3.0)
    assert means.figures().at(256) == medians.figures().at(256) == pytest.approx(3.0)


def test_sizes_that_are_seen_often_speak_for_themselves() -> None:
    means, medians = Means(window=100, prior=4), Medians()
    for _ in range(100):
        for size, value in ((1, 3.0), (64, 1.5)):
            means.add(size, value, 1)
            medians.add(size, value)
    for figures in (means.figures(), medians.figures()):
        assert figures.at(1) == pytest.approx(3.0, abs=0.1)
        assert figures.at(50) == pytest.approx(1.5, abs=0.1)


def test_the_latest_window_counts() -> None:
    means, medians = Means(window=20, prior=0), Medians()
    for value in [3.0] * 50 + [1.0] * 100:
        means.add(1, value, 1)
        medians.add(1, value)
    for figures in (means.figures(), medians.figures()):
        assert figures.at(1) == pytest.approx(1.0, abs=0.02)


def test_a_step_of_many_requests_weighs_more() -> None:
    means = Means(window=1000, prior=0)
    means.add(64, 2.0, weight=64)
    means.add(1, 4.0, weight=1)
    assert means.figures().overall == pytest.approx((64 * 2 + 4) / 65)


def test_an_average_not_seen_for_long_yields_to_what_is() -> None:
    means = Means(window=100, prior=10)
    for _ in range(100):
        means.add(64, 1.0, 1)
    for _ in range(400):
        means.fade()
        means.add(1, 3.0, 1)
    assert means.figures().at(64) == pytest.approx(3.0, abs=0.1)


def test_a_batch_size_that_is_misjudged_does_not_speak_for_those_that_were_seen() -> None:
    """As on an H200, where one request's OFF steps took half as long again as measured at start."""
    medians = Medians()
    for running, ratio in ((128, 1.2), (256, 0.95), (1, 1.5)):
        for _ in range(10 * MEDIAN_WINDOW):
            medians.add(running, ratio)
    assert medians.figures().at(256) == 0.95
    assert medians.figures().at(32) == 1.2


@pytest.mark.parametrize("first", range(4))
def test_a_median_holds_from_where_a_stall_is_outvoted(first: int) -> None:
    """Even if the stall comes first of all."""
    medians = Medians()
    for step in range(MEDIAN_WINDOW // 2):
        medians.add(1, 50.0 if step == first else 1.0)
    assert medians.figures() == Figures()
    medians.add(1, 1.0)
    assert medians.figures().at(1) == 1.0
