"""When new requests are kept to one server, so that it is seen alone."""

import pytest

from router.core.calibration import Calibration, ServerProfile, TpotPoint
from router.core.contrast import Contrast
from router.core.learner import Learner
from router.core.types import Role, ServerLoad, ServerSpec

_SERVERS = tuple(ServerSpec(str(role), role, "") for role in Role)


def contrast_after(levels: tuple[int, ...]) -> Contrast:
    """A contrast after 20 s of traffic, with so many sequences in flight in turn each second."""
    points = tuple(TpotPoint(n, 0.004 + n / 5000, 0.0, 1.0, 10) for n in (1, 4, 16, 64))
    profiles = tuple(ServerProfile(role, tpot=points) for role in Role)
    learner = Learner(_SERVERS, calibration=Calibration(profiles))
    for second in range(20):
        learner.traffic.arrived(5, 500)
        learner.passed(1.0, 1000.0, levels[second % len(levels)])
    contrast = Contrast(learner)
    assert contrast.kept(loads(10), 0.0) is None
    return contrast


def loads(each: int) -> tuple[ServerLoad, ...]:
    return tuple(ServerLoad(str(role), role, decode_sequences=each) for role in Role)


def test_not_at_the_start() -> None:
    assert contrast_after((20,)).kept(loads(10), 5.0) is None


def test_clients_that_wait_keep_their_load_so_it_begins_at_any_time() -> None:
    contrast = contrast_after((20,))
    assert contrast.kept(loads(10), 10.0) is not None
    assert contrast.kept(loads(40), 11.0) is not None
    assert contrast.kept(loads(10), 31.0) is None
    assert contrast.kept(loads(10), 600.0) is None


@pytest.mark.parametrize(("each", "begins"), [(10, False), (7, False), (5, True)])
def test_where_requests_come_whatever_happens_it_begins_in_a_lull(each: int, begins: bool) -> None:
    assert (contrast_after((10, 30)).kept(loads(each), 10.0) is not None) is begins


def test_it_is_given_up_when_requests_pile_up_and_tried_again_in_another_lull() -> None:
    contrast = contrast_after((10, 30))
    kept = contrast.kept(loads(5), 10.0)
    assert kept is not None
    assert contrast.kept(loads(10), 12.0) == kept
    assert contrast.kept(loads(12), 14.0) is None
    assert contrast.kept(loads(5), 20.0) is None
    assert contrast.kept(loads(5), 25.0) is not None
