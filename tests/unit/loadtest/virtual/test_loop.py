"""The loop in virtual time: what it keeps, and that it is the same for a seed."""

from array import array
from dataclasses import replace
from itertools import pairwise

import pytest

from loadtest.engines import ENGINES
from loadtest.pacing import ClosedLoop, OpenLoop, Ramp
from loadtest.virtual.curves import CURVE_SEED, measure
from loadtest.virtual.loop import OBSERVE_S, World
from loadtest.virtual.record import Run
from loadtest.virtual.station import Event, Server, server_specs
from loadtest.virtual.synthetic import synthetic_trace
from loadtest.workload import CHAT_MIX, Fixed, Workload
from router.core.learner import Learner
from router.core.policy import make_policy
from router.core.types import Layout, Role

SPEC = Server("spec", Role.SPEC, ENGINES["h200-chain-v2"])
BASE = Server("base", Role.BASE, ENGINES["h200-plain"])
PAIR = (SPEC, BASE)


def held(
    level: int,
    policy: str = "marginal",
    *,
    seconds: float = 20.0,
    seed: int = 1,
    layout: Layout = Layout.DISJOINT,
    events: tuple[Event, ...] = (),
    requests: int | None = None,
) -> tuple[World, Run]:
    learner = Learner(server_specs(PAIR), layout=layout) if policy == "marginal" else None
    made = make_policy(policy, learner=learner)
    world = World(PAIR, made, layout, learner=learner, seed=seed, noise=0.05)
    loop = ClosedLoop(Ramp(((0.0, float(level)),)), requests=requests, duration_s=seconds)
    until_s = seconds if requests is None else 1e9
    return world, world.run(loop, Workload("m", CHAT_MIX, seed), until_s, events, looks_s=())


def story(run: Run) -> list[object]:
    return [(r.server, r.first_s, r.end_s) for r in run.requests]


def test_a_seed_gives_the_same_run_and_another_seed_another() -> None:
    first, again, other = (held(8, seed=seed)[1] for seed in (1, 1, 2))
    assert story(first) == story(again)
    assert first.ticks == again.ticks
    assert story(first) != story(other)


@pytest.mark.parametrize("layout", list(Layout))
def test_all_that_was_asked_for_is_answered_token_for_token_and_the_ledger_ends_at_zero(
    layout: Layout,
) -> None:
    world, run = held(16, seconds=1e6, requests=200, layout=layout)
    assert len(run.requests) == 200
    assert all(r.end_s is not None and not r.failed for r in run.requests)
    assert run.tokens == sum(r.ask.output_tokens for r in run.requests)
    assert run.leases_left == 0
    assert all(load.sequences == load.prefill_tokens == 0 for load in world.ledger.loads())


def test_a_held_level_is_held() -> None:
    _, run = held(12)
    assert run.leases_left == 12
    assert sum(run.in_flight_s.values()) == pytest.approx(20.0)
    assert run.in_flight_s[12] == pytest.approx(20.0, rel=1e-3)
    assert {sum(tick.in_flight) for tick in run.ticks[1:]} == {12}


def test_the_router_is_shown_the_tokens_every_quarter_of_a_second() -> None:
    _, run = held(4)
    assert [tick.at_s for tick in run.ticks] == [n * OBSERVE_S for n in range(81)]
    for before, after in pairwise(run.ticks):
        assert all(b <= a for b, a in zip(before.tokens, after.tokens, strict=True))
    assert sum(run.ticks[-1].tokens) == run.tokens


def test_an_open_loop_starts_what_the_trace_says_when_it_says() -> None:
    rows = synthetic_trace(50, seed=3)
    times_s = array("d", (row.at_s for row in rows))
    world = World(PAIR, make_policy("least-inflight"))
    run = world.run(OpenLoop(times_s), Workload("m", Fixed(100, 20), 1), looks_s=())
    assert [r.intended_s for r in run.requests] == list(times_s)
    assert all(r.end_s is not None and r.end_s > r.intended_s for r in run.requests)


def test_a_lost_server_fails_what_had_begun_and_gets_nothing_until_it_is_back() -> None:
    events = (Event(8.0, "spec", alive=False), Event(14.0, "spec", alive=True))
    world, run = held(16, "least-inflight", seconds=24.0, events=events)
    failed = [r for r in run.requests if r.failed]
    assert failed
    assert all(r.server == "spec" and r.first_s is not None and r.end_s == 8.0 for r in failed)
    meanwhile = [r for r in run.requests if 8.0 < r.intended_s < 14.0]
    after = [r for r in run.requests if r.intended_s > 14.0]
    assert {r.server for r in meanwhile} == {"base"}
    assert {r.server for r in after} == {"spec", "base"}
    assert run.leases_left == len(world.ledger) == 16


def test_a_slower_server_makes_fewer_tokens_from_then_on() -> None:
    _, run = held(4, "spec-only", events=(Event(10.0, "spec", slowness=2.0),))
    half = sum(run.ticks[40].tokens)
    assert (run.tokens - half) / half == pytest.approx(0.5, rel=0.1)


def test_a_lower_accept_length_makes_fewer_tokens_from_then_on() -> None:
    drafts = SPEC.params.decode.acceptance
    assert drafts is not None
    decode = replace(SPEC.params.decode, acceptance=replace(drafts, mean=1.1))
    _, run = held(
        4, "spec-only", events=(Event(10.0, "spec", params=replace(SPEC.params, decode=decode)),)
    )
    half = sum(run.ticks[40].tokens)
    assert (run.tokens - half) / half == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("level", [5, 10, 28])
def test_a_closed_loop_runs_at_the_known_rate_between_the_levels_measured(level: int) -> None:
    curve = measure(BASE, CHAT_MIX, reach=32)
    world = World((BASE,), make_policy("base-only"))
    loop = ClosedLoop(Ramp(((0.0, float(level)),)), duration_s=210.0)
    # The requests that the curve was measured with: other ones' lengths differ by a per cent or so.
    run = world.run(loop, Workload("m", CHAT_MIX, CURVE_SEED), 210.0, looks_s=())
    steady = (run.tokens - sum(run.ticks[40].tokens)) / 200.0
    assert steady == pytest.approx(curve.table_tok_s[level], rel=0.02)


def test_a_server_with_the_plugin_speculates_below_its_threshold_and_not_above() -> None:
    server = Server("spec", Role.SPEC, SPEC.params, threshold=32)
    rates = {}
    for name, one in (("patched", server), ("stock", SPEC), ("plain", BASE)):
        for level in (8, 96):
            world = World((one,), make_policy("least-inflight"), seed=1)
            loop = ClosedLoop(Ramp(((0.0, float(level)),)), duration_s=15.0)
            run = world.run(loop, Workload("m", Fixed(256, 256), 1), 15.0, looks_s=())
            rates[name, level] = run.tokens
    assert rates["patched", 8] == pytest.approx(rates["stock", 8], rel=0.02)
    # An OFF step of 96 takes 1.078 of a plain one, and prefill on this server is slower, too.
    assert 0.88 < rates["patched", 96] / rates["plain", 96] < 0.94
    assert rates["patched", 96] != rates["stock", 96]


def test_noise_moves_the_speed_and_not_its_mean() -> None:
    def tokens(noise: float) -> list[int]:
        world = World((BASE,), make_policy("base-only"), seed=5, noise=noise)
        loop = ClosedLoop(Ramp(((0.0, 4.0),)), duration_s=60.0)
        run = world.run(loop, Workload("m", Fixed(16, 256), 1), 60.0, looks_s=())
        return [sum(tick.tokens) for tick in run.ticks]

    quiet, noisy = tokens(0.0), tokens(0.2)
    assert noisy[-1] == pytest.approx(quiet[-1], rel=0.03)
    most = max(b - a for a, b in pairwise(quiet))
    assert max(b - a for a, b in pairwise(noisy)) > 1.1 * most
