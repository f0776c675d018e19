from loadtest.bench import Bench

BENCH = Bench("m", 32, 64, True, 1, None, 1.0, 1, None)


def test_visits_of_a_round_have_the_same_lengths_and_words_of_their_own() -> None:
    """Else the router would find in the servers' prefix caches what they were asked directly."""
    first, second = BENCH.workload(0, 3), BENCH.workload(0, 4)
    asks = [(first.ask(index), second.ask(index)) for index in range(50)]
    assert all(a == b for a, b in asks)
    prompts = {w.prompt(w.ask(index)) for w in (first, second) for index in range(50)}
    assert len(prompts) == 100


def test_rounds_have_lengths_of_their_own_that_spread_around_the_mean() -> None:
    lengths = [[BENCH.workload(r, 0).ask(i).output_tokens for i in range(400)] for r in (0, 1)]
    assert lengths[0] != lengths[1]
    for drawn in lengths:
        assert (min(drawn), max(drawn)) == (32, 96)
        assert 60 < sum(drawn) / len(drawn) < 68
