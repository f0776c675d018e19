"""The figures that steering has to reach, each with its limit: one table, and what was reached.

A figure is taken of every case and seed of its scenarios, and the worst one counts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from loadtest.virtual.arms import (
    BASE_ONLY,
    LEAST,
    SPEC_ONLY,
    SPILL,
    SPLIT,
    TWO_BASE,
    TWO_SPEC,
    CaseResult,
    routed,
)
from loadtest.virtual.scenario import Start

COLD, CALIBRATED, MISJUDGED = (routed(start) for start in Start)
Value = Callable[[CaseResult], float | None]


@dataclass(frozen=True, slots=True)
class Demand:
    """A figure and its limit. `scenarios` are patterns of names; a value of None does not count.

    `must_miss`: a rival's figure, of which the worst must lie beyond the limit.
    """

    name: str
    title: str
    scenarios: tuple[str, ...]
    value: Value
    limit: float
    at_least: bool = True
    must_miss: bool = False

    def reached(self, results: Iterable[CaseResult]) -> "Reached | None":
        """Return the worst value among the results; None if none of them has one."""
        found = [
            (value, result)
            for result in results
            if any(fnmatch(result.case.scenario.name, pattern) for pattern in self.scenarios)
            and (value := self.value(result)) is not None
        ]
        if not found:
            return None
        pick = min if self.at_least else max
        value, result = pick(found, key=lambda item: item[0])
        where = f"{result.case.scenario.name}, {result.case.label}, seed {result.seed}"
        return Reached(self, value, where, len({r.seed for _, r in found}), len(found))


@dataclass(frozen=True, slots=True)
class Reached:
    """A demand's worst value, where that was, and of how many seeds and values it is the worst."""

    demand: Demand
    value: float
    where: str
    seeds: int
    values: int

    @property
    def met(self) -> bool:
        """Whether the figure is as demanded."""
        demand = self.demand
        within = self.value >= demand.limit if demand.at_least else self.value <= demand.limit
        return within is not demand.must_miss


def _better_single(result: CaseResult) -> float:
    return max(result.tokens(SPEC_ONLY), result.tokens(BASE_ONLY))


def _against_single(arm: str) -> Value:
    return lambda result: result.tokens(arm) / _better_single(result)


def _against(arm: str, rival: str, level: int | None = None) -> Value:
    def value(result: CaseResult) -> float | None:
        if level is not None and result.case.level != level:
            return None
        return result.tokens(arm) / result.tokens(rival)

    return value


def _least_worst(result: CaseResult) -> float | None:
    """Least-inflight against both limits of the table that it must fail: 1 is the limit."""
    if LEAST not in result.arms:
        return None
    return min(
        result.tokens(LEAST) / _better_single(result) / 0.98,
        result.tokens(LEAST) / result.tokens(SPLIT) / 0.95,
    )


def _completion(arm: str) -> Value:
    return lambda result: result.completion_s(arm) / result.completion_s(SPILL)


def _tail(result: CaseResult) -> float | None:
    demand = result.case.demand
    if demand is None or demand < 0.5:
        return None
    return result.p99_s[COLD] / result.p99_s[SPILL]


def _completion_static(arm: str) -> Value:
    return lambda result: (
        result.completion_s(arm)
        / min(result.completion_s(SPEC_ONLY), result.completion_s(BASE_ONLY))
    )


def _lost_s(result: CaseResult) -> float:
    return max(lost for lost, _ in result.losses[COLD])


def _settle_s(result: CaseResult) -> float:
    return max(settle for _, settle in result.losses[COLD])


def _second_half(result: CaseResult) -> float:
    def half(arm: str) -> float:
        return float(result.arms[arm]["half_tok_s"][1])

    return half(COLD) / max(half(SPEC_ONLY), half(BASE_ONLY))


def _switches(result: CaseResult) -> float:
    return float(result.arms[COLD]["switches"])


def _switches_a_minute(result: CaseResult) -> float:
    return max(
        float(figures["switches_a_minute_max"])
        for arm, figures in result.arms.items()
        if arm in (COLD, CALIBRATED)
    )


def _known_share(result: CaseResult) -> float:
    return result.tokens(COLD) / result.tokens("known-curves")


DEMANDS: tuple[Demand, ...] = (
    Demand(
        "steady-single",
        "disjoint, each level, cold: tokens / better server",
        ("steady-*",),
        _against_single(COLD),
        0.98,
    ),
    Demand(
        "steady-split",
        "disjoint, each level, cold: tokens / best split",
        ("steady-*",),
        _against(COLD, SPLIT),
        0.95,
    ),
    Demand(
        "steady-least-inflight",
        "the same of least-inflight, over its limits: must fail",
        ("steady-*",),
        _least_worst,
        1.0,
        must_miss=True,
    ),
    Demand(
        "trace-cold",
        "disjoint, trace, cold: completion / best spill",
        ("trace-chain", "trace-tree"),
        _completion(COLD),
        1.015,
        at_least=False,
    ),
    Demand(
        "trace-calibrated",
        "disjoint, trace, calibrated: completion / best spill",
        ("trace-chain", "trace-tree"),
        _completion(CALIBRATED),
        1.01,
        at_least=False,
    ),
    Demand(
        "trace-misjudged",
        "disjoint, trace, one server 30% misjudged: completion / best spill",
        ("trace-chain", "trace-tree"),
        _completion(MISJUDGED),
        1.01,
        at_least=False,
    ),
    Demand(
        "trace-p99",
        "disjoint, trace at 0.5 and more, cold: p99 time per token / best spill",
        ("trace-chain", "trace-tree"),
        _tail,
        1.0,
        at_least=False,
    ),
    Demand(
        "step-settle", "8 to 128 and back: s to settle", ("step-*",), _settle_s, 3.0, at_least=False
    ),
    Demand(
        "step-lost", "8 to 128 and back: s of rate lost", ("step-*",), _lost_s, 2.0, at_least=False
    ),
    Demand(
        "slowdown",
        "a used server slows x1.8: s of rate lost",
        ("slowdown-*",),
        _lost_s,
        3.0,
        at_least=False,
    ),
    Demand(
        "recovery",
        "an unused server recovers x1.8: s of rate lost in 240 s",
        ("recovery-*",),
        _lost_s,
        15.0,
        at_least=False,
    ),
    Demand(
        "oscillation", "oscillation: tokens / known curves", ("oscillation-*",), _known_share, 0.97
    ),
    Demand(
        "shared-single",
        "shared, each level, calibrated: tokens / better server",
        ("shared-chain", "shared-tree", "shared-field", "shared-stairs-*"),
        _against_single(CALIBRATED),
        0.98,
    ),
    Demand(
        "shared-cold-half",
        "shared, cold: tokens / better server, second half of 300 s",
        ("shared-cold-*",),
        _second_half,
        0.98,
    ),
    Demand(
        "shared-cold-switches",
        "shared, cold: switches in 300 s",
        ("shared-cold-*",),
        _switches,
        2.0,
        at_least=False,
    ),
    Demand(
        "shared-trace",
        "shared, trace, calibrated: completion / better server",
        ("trace-shared-*",),
        _completion_static(CALIBRATED),
        1.05,
        at_least=False,
    ),
    Demand(
        "shared-switches",
        "shared: switches within any minute",
        ("*shared-*",),
        _switches_a_minute,
        1.0,
        at_least=False,
    ),
    Demand(
        "patched-high",
        "patched chain, 256 requests: tokens / two plain servers",
        ("patched-chain",),
        _against(COLD, TWO_BASE, 256),
        0.97,
    ),
    Demand(
        "patched-low",
        "patched chain, 2 requests: tokens / two speculating servers",
        ("patched-chain",),
        _against(COLD, TWO_SPEC, 2),
        0.97,
    ),
)


def demand(name: str) -> Demand:
    """Return the demand of this name. KeyError if there is none."""
    return {item.name: item for item in DEMANDS}[name]


def reached(results: Sequence[CaseResult]) -> list[Reached]:
    """Return what was reached of every demand that the results bear on."""
    found = (item.reached(results) for item in DEMANDS)
    return [item for item in found if item is not None]
