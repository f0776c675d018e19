"""The choice on shared GPUs before engine models, whose prefill blocks decoding: a patched chain
beside plain, with a calibration of few points and little weight, as one is measured in minutes.
"""

from functools import cache
from itertools import pairwise

import pytest

from loadtest.engines import ENGINES
from loadtest.pacing import ClosedLoop, Ramp
from loadtest.virtual.curves import measure
from loadtest.virtual.loop import World
from loadtest.virtual.record import Run
from loadtest.virtual.station import Server, server_specs
from loadtest.workload import Drawn, Uniform, Workload
from router.core.calibration import Calibration, ServerProfile, TpotPoint
from router.core.learner import Learner
from router.core.policy import make_policy
from router.core.types import Layout, Role

SPEC = Server("spec", Role.SPEC, ENGINES["h200-chain-v2"], threshold=90)
BASE = Server("base", Role.BASE, ENGINES["h200-plain"])
LENGTHS = Drawn(Uniform(256, 1000), Uniform(250, 262))
LEVELS = (1, 8, 32, 64, 128)


@cache
def profile(server: Server) -> ServerProfile:
    table_s = measure(server, LENGTHS, LEVELS[-1]).table_s
    points = tuple(TpotPoint(n, s, 0.9 * s, 1.1 * s, 2.0) for n in LEVELS if (s := table_s[n]))
    return ServerProfile(server.role, tpot=points)


class Node:
    """Both servers on the same GPUs, and what the router knows of them."""

    def __init__(self, seed: int = 1) -> None:
        given = Calibration((profile(SPEC), profile(BASE)))
        self.learner = Learner(server_specs((SPEC, BASE)), layout=Layout.SHARED, calibration=given)
        self.policy = make_policy("marginal", learner=self.learner)
        self.seed = seed

    def run(self, *stairs: tuple[int, float]) -> Run:
        """Hold so many requests for so many seconds, one stair after the other."""
        points, now = [], 0.0
        for level, seconds in stairs:
            points += [(now, float(level)), (now + seconds, float(level))]
            now += seconds
        world = World(
            (SPEC, BASE),
            self.policy,
            Layout.SHARED,
            learner=self.learner,
            seed=self.seed,
            noise=0.05,
        )
        workload = Workload("m", LENGTHS, self.seed)
        looks_s = [at for at, _ in points]
        return world.run(
            ClosedLoop(Ramp(tuple(points)), duration_s=now), workload, now, (), looks_s
        )


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_burst_of_prompts_is_not_taken_for_a_slower_server(seed: int) -> None:
    node = Node(seed)
    run = node.run((1, 15), (32, 15), (1, 15), (64, 15))
    assert node.policy.mode is Role.SPEC
    assert run.mode_switches == ()


def test_up_and_down_the_stairs_it_moves_at_most_once_a_minute_and_ends_where_it_is_right() -> None:
    node = Node()
    run = node.run(*((level, 15) for level in (1, 8, 32, 64, 128, 1, 8)), (8, 60))
    assert node.policy.mode is Role.SPEC
    assert all(later - sooner >= 60 for sooner, later in pairwise(run.mode_switches))
    before = [at for at in run.mode_switches if at < 60]
    assert before == []


def test_a_node_that_was_misled_returns_within_two_minutes() -> None:
    node = Node()
    curve = node.learner.servers["spec"].on
    for k in range(8):
        curve.observe(k / 4, 8, 2.5 * curve.settled().seconds(8), 0.25)
    assert curve.changes == 1
    run = node.run((8, 120))
    assert node.policy.mode is Role.SPEC
    assert len(run.mode_switches) <= 1
