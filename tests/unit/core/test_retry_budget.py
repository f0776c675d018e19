from router.core.retry_budget import FLOOR, RetryBudget


def taken(budget: RetryBudget, now: float) -> int:
    count = 0
    while budget.take(now):
        count += 1
        assert count < 10_000
    return count


def test_retries_are_a_share_of_the_requests() -> None:
    budget = RetryBudget(share=0.2)
    for _ in range(100):
        budget.request(1.0)
    assert taken(budget, 1.0) == 20
    for _ in range(50):
        budget.request(2.0)
    assert taken(budget, 2.0) == 10


def test_a_little_traffic_has_a_floor() -> None:
    assert taken(RetryBudget(share=0.2), 1.0) == FLOOR


def test_no_share_means_no_retry() -> None:
    assert taken(RetryBudget(share=0.0), 1.0) == 0


def test_old_requests_and_old_retries_are_forgotten() -> None:
    budget = RetryBudget(share=0.5)
    for _ in range(100):
        budget.request(0.0)
    assert taken(budget, 9.0) == 50
    budget.request(11.0)
    assert taken(budget, 11.0) == 0  # the period before still counts
    assert taken(budget, 40.0) == FLOOR
