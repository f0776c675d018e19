"""Windows, traffic, times to first token, contexts: what the learner is fed."""

import random

import pytest

from router.core.context import ContextTerm
from router.core.ledger import Ledger, Totals, TtftSample
from router.core.traffic import Traffic
from router.core.ttft import TtftLine
from router.core.types import Outcome, RequestShape, Role, ServerSpec
from router.core.windows import WindowCutter

_SERVERS = (ServerSpec("a", Role.SPEC, ""), ServerSpec("b", Role.BASE, ""))
_SHAPE = RequestShape(prompt_tokens=100)


class TestTotals:
    def test_integrals_follow_the_counts(self) -> None:
        ledger = Ledger(_SERVERS)
        first = ledger.acquire("a", _SHAPE, 10.0)
        ledger.acquire("a", RequestShape(sequences=2, prompt_tokens=300), 11.0)
        first.first_token(12.0)
        first.release(Outcome.OK, 14.0)
        assert ledger.totals("a", 15.0) == Totals(
            sequence_s=1 * 1 + 3 * 3 + 2 * 1,
            decode_sequence_s=2,
            context_token_s=100 + 400 * 3 + 300,
            busy_s=5,
            decode_busy_s=2,
            started_sequences=1,
            prefilled_tokens=100,
            ended_sequences=1,
        )

    def test_overlap_is_time_with_work_on_another_server_too(self) -> None:
        ledger = Ledger(_SERVERS)
        a = ledger.acquire("a", _SHAPE, 0.0)
        b = ledger.acquire("b", _SHAPE, 2.0)
        a.release(Outcome.OK, 5.0)
        b.release(Outcome.OK, 9.0)
        assert [ledger.totals(name, 20.0).overlap_s for name in "ab"] == [3.0, 3.0]
        assert [ledger.totals(name, 20.0).busy_s for name in "ab"] == [5.0, 7.0]

    def test_idle_time_is_in_no_integral(self) -> None:
        assert Ledger(_SERVERS).totals("a", 1e6) == Totals()


class TestTtftSamples:
    def test_a_sample_has_the_prompts_that_waited_before(self) -> None:
        ledger = Ledger(_SERVERS)
        ledger.acquire("a", _SHAPE, 0.0)
        second = ledger.acquire("a", RequestShape(prompt_tokens=50), 1.0)
        second.first_token(1.5)
        second.release(Outcome.OK, 3.0)
        assert ledger.take_ttft_samples("a") == (TtftSample(0.5, 50, 150),)
        assert ledger.take_ttft_samples("a") == ()

    def test_an_answer_in_one_piece_has_no_time_to_first_token(self) -> None:
        ledger = Ledger(_SERVERS)
        whole = ledger.acquire("a", _SHAPE, 0.0)
        whole.first_token(2.0)
        whole.release(Outcome.OK, 2.0)
        ledger.acquire("a", _SHAPE, 0.0).release(Outcome.CLIENT_DISCONNECT, 3.0)
        assert ledger.take_ttft_samples("a") == ()

    def test_memory_is_bounded(self) -> None:
        ledger = Ledger(_SERVERS)
        for at in range(1000):
            lease = ledger.acquire("a", _SHAPE, at)
            lease.first_token(at + 0.1)
            lease.release(Outcome.OK, at + 0.2)
        assert len(ledger.take_ttft_samples("a")) == 64


class TestWindows:
    def cut(self, *looks: tuple[float, float, float, int]) -> list[object]:
        """Each look: time, sequence-seconds, tokens, sequences in flight; always busy."""
        cutter = WindowCutter()
        return [
            cutter.cut(at, Totals(sequence_s=seq_s, busy_s=at), tokens, now)
            for at, seq_s, tokens, now in looks
        ]

    def test_a_window_is_time_per_token_at_a_mean_load(self) -> None:
        [none, window] = self.cut((0.0, 0.0, 0.0, 4), (0.5, 2.0, 200.0, 4))
        assert none is None
        assert window is not None
        assert (window.sequences, window.seconds_per_token) == (4.0, 0.01)  # type: ignore[attr-defined]
        assert window.usable  # type: ignore[attr-defined]

    def test_few_tokens_wait_for_more(self) -> None:
        windows = self.cut((0.0, 0, 0, 1), (0.5, 0.5, 10, 1), (1.25, 1.25, 30, 1))
        assert [window is not None for window in windows] == [False, False, True]

    def test_a_burst_within_a_window_says_nothing_of_speed(self) -> None:
        [_, window] = self.cut((0.0, 0, 0, 2), (0.25, 10.0, 100, 80))
        assert window is not None
        assert not window.usable  # type: ignore[attr-defined]

    def test_a_count_that_starts_again_starts_a_window(self) -> None:
        windows = self.cut((0.0, 0, 900, 1), (0.5, 0.5, 10, 1), (1.0, 1.0, 110, 1))
        assert windows[1] is None
        assert windows[2] is not None
        assert windows[2].tokens == 100  # type: ignore[attr-defined]


class TestTraffic:
    def test_a_kept_load_does_not_vary_and_arrivals_of_their_own_do(self) -> None:
        kept, open_ = Traffic(), Traffic()
        luck = random.Random(1)
        level = 0
        for _ in range(400):
            kept.arrived(1, 300)
            kept.passed(0.25, 100.0, 0.25 * 8)
            # Arrivals at 4 a second that each stay for 2 s or so.
            for _ in range(25):
                came = luck.random() < 0.04
                open_.arrived(int(came), 300)
                level += came - (luck.random() < 0.005 * level)
            open_.passed(0.25, 100.0, 0.25 * level)
        assert kept.sequences == pytest.approx(8)
        assert kept.dispersion < 0.05
        assert kept.closed
        assert 0.5 < open_.dispersion < 2
        assert not open_.closed
        assert kept.tokens_per_s == pytest.approx(400)

    def test_a_load_that_is_kept_in_steps_is_kept(self) -> None:
        traffic = Traffic()
        for turn in range(400):
            level = 64 if turn // 60 % 2 else 4
            if turn and turn % 60 == 0 and level == 64:
                traffic.arrived(60, 60 * 300)
            traffic.arrived(level // 4, 300)
            traffic.passed(0.25, 100.0, 0.25 * level)
            assert traffic.closed

    def test_lifetime_and_answer_follow_from_arrivals(self) -> None:
        traffic = Traffic()
        for _ in range(400):
            traffic.arrived(1, 300)
            traffic.passed(0.5, 100.0, 0.5 * 4)
        assert traffic.lifetime_s == pytest.approx(2, rel=0.05)
        assert traffic.tokens_per_sequence == pytest.approx(100, rel=0.05)
        assert traffic.prompt_per_sequence == pytest.approx(300)

    def test_sequences_that_have_only_begun_do_not_shorten_the_mean_answer(self) -> None:
        traffic = Traffic()
        for _ in range(200):
            traffic.arrived(1, 300)
            traffic.passed(0.5, 100.0, 0.5 * 4)
        traffic.arrived(64, 64 * 300)
        traffic.passed(0.5, 100.0, 0.5 * 68)
        assert traffic.tokens_per_sequence == pytest.approx(100, rel=0.1)

    def test_a_mean_answer_is_unknown_while_none_has_ended(self) -> None:
        traffic = Traffic()
        traffic.arrived(8, 800)
        traffic.passed(1.0, 400.0, 8.0)
        assert traffic.tokens_per_sequence == 0
        assert traffic.lifetime_s == 8

    def test_before_any_traffic_all_is_zero(self) -> None:
        traffic = Traffic()
        assert (traffic.sequences, traffic.dispersion, traffic.lifetime_s) == (0, 0, 0)
        assert (traffic.tokens_per_s, traffic.tokens_per_sequence) == (0, 0)


class TestTtftLine:
    def test_the_line_through_prompts_of_two_lengths(self) -> None:
        line = TtftLine()
        line.observe(TtftSample(0.01 + 2e-5 * n, n, n) for n in (256, 8192) * 20)
        estimate = line.estimate(4096)
        assert estimate is not None
        assert estimate.value == pytest.approx(0.01 + 2e-5 * 4096)
        assert line.token_s == pytest.approx(2e-5)

    def test_prompts_all_alike_give_no_slope(self) -> None:
        line = TtftLine()
        assert line.estimate(100) is None
        line.observe([TtftSample(0.02, 256, 256)] * 5)
        assert line.token_s == 0
        estimate = line.estimate(9000)
        assert estimate is not None
        assert estimate.value == pytest.approx(0.02)


class TestContextTerm:
    def test_long_prompts_cost_what_the_windows_show(self) -> None:
        term = ContextTerm()
        for turn in range(60):
            tokens = 32 * (8192 if turn % 2 else 256)
            off_s = 3e-8 * (tokens - 32 * 4224)
            term.observe(32, tokens, off_s, 1.0)
        assert term.token_s == pytest.approx(3e-8, rel=0.1)
        long, short = term.seconds(32, 32 * 8192), term.seconds(32, 32 * 256)
        assert long - short == pytest.approx(3e-8 * 32 * 7936, rel=0.1)

    def test_noise_supports_no_term(self) -> None:
        term = ContextTerm()
        for turn in range(60):
            tokens = 32 * (8192 if turn % 2 else 256)
            term.observe(32, tokens, 1e-3 if turn // 2 % 2 else -1e-3, 1.0)
        assert term.token_s == 0
        assert term.seconds(32, 10**6) == 0

    def test_prompts_all_alike_give_no_term(self) -> None:
        term = ContextTerm()
        for _ in range(20):
            term.observe(32, 32 * 256, 1e-3, 1.0)
        assert term.seconds(32, 32 * 256) == 0
