"""The simulator's results as tables and as the results document. Pure: results in, text out.

A cell of a table is the worst of its seeds; rivals that no figure needs were run on one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from loadtest.report import table
from loadtest.virtual.arms import BASE_ONLY, KNOWN, RIVALS, SPEC_ONLY, SPILL, SPLIT, CaseResult
from loadtest.virtual.demands import Reached
from loadtest.virtual.scenario import Scenario

Rows = list[list[str]]


def runs(results: Iterable[CaseResult]) -> dict[str, Mapping[str, object]]:
    """Return every arm's figures by `scenario/case/seed/arm`."""
    return {
        f"{r.case.scenario.name}/{r.case.label}/{r.seed}/{arm}": figures
        for r in results
        for arm, figures in r.arms.items()
    }


def demands_json(found: Iterable[Reached]) -> list[dict[str, object]]:
    """Return what was reached of each demand."""
    return [
        {
            "name": item.demand.name,
            "title": item.demand.title,
            "limit": item.demand.limit,
            "at_least": item.demand.at_least is not item.demand.must_miss,
            "value": round(item.value, 5),
            "worst": item.where,
            "seeds": item.seeds,
            "values": item.values,
            "met": item.met,
        }
        for item in found
    ]


def demand_rows(found: Iterable[Reached]) -> Rows:
    """Return the table of demands: limit, the worst value, where it was, and whether it is met."""
    rows = [["figure", "limit", "reached", "values", "worst at", ""]]
    for item in found:
        sign = "<" if item.demand.must_miss else ">=" if item.demand.at_least else "<="
        rows.append(
            [
                f"{item.demand.name}: {item.demand.title}",
                f"{sign} {item.demand.limit:g}",
                f"{item.value:.3f}",
                f"{item.values}, {item.seeds} seeds",
                item.where,
                "met" if item.met else "MISSED",
            ]
        )
    return rows


def markdown(results: Sequence[CaseResult], found: Sequence[Reached]) -> str:
    """Return all tables."""
    parts = [table(demand_rows(found))]
    for name, group in groupby(results, key=lambda r: r.case.scenario.name):
        of_scenario = list(group)
        scenario = of_scenario[0].case.scenario
        parts += [f"### {name}", _setting(scenario, of_scenario), table(_rows(of_scenario))]
    return "\n\n".join(parts) + "\n"


def _setting(scenario: Scenario, results: Sequence[CaseResult]) -> str:
    seeds = ", ".join(str(seed) for seed in sorted({result.seed for result in results}))
    length = f"{scenario.duration_s:g} s"
    if scenario.demands:
        length = f"{len(results[0].case.rows or range(scenario.requests))} requests"
    engines = " and ".join(server.params.name for server in scenario.servers)
    switch = "" if scenario.spec.threshold is None else f" with threshold {scenario.spec.threshold}"
    return (
        f"{scenario.title}. Engine models {engines}{switch}; {scenario.layout} GPUs; {length} a "
        f"run; noise {scenario.noise:g}; seeds {seeds}."
    )


def _rows(results: Sequence[CaseResult]) -> Rows:
    scenario = results[0].case.scenario
    if scenario.demands:
        reference = SPILL if SPILL in results[0].arms else "better server"
        return _table(results, f"mean completion, s: {reference}", _completion_s, max)
    if scenario.levels or not results[0].losses:
        reference = SPLIT if SPLIT in results[0].arms else "better server"
        return _table(results, f"tok/s: {reference}", _tok_s, min)
    rows = _table(results, f"tok/s: {KNOWN}", _known_tok_s, min)
    rows[0] += ["lost, s", "settled, s"]
    for row, (_, group) in zip(rows[1:], _by_label(results), strict=True):
        for at in (0, 1):
            worst = [
                max(result.losses[arm][mark][at] for result in group)
                for arm in group[0].losses
                for mark in range(len(group[0].losses[arm]))
            ]
            row.append(", ".join(f"{value:.1f}" for value in worst))
    return rows


def _completion_s(result: CaseResult, arm: str | None) -> float:
    if arm is not None:
        return result.completion_s(arm)
    if SPILL in result.arms:
        return result.completion_s(SPILL)
    return min(result.completion_s(SPEC_ONLY), result.completion_s(BASE_ONLY))


def _tok_s(result: CaseResult, arm: str | None) -> float:
    if arm is not None:
        return float(result.arms[arm]["tok_s"])
    if SPLIT in result.arms:
        return float(result.arms[SPLIT]["tok_s"])
    return max(float(result.arms[arm]["tok_s"]) for arm in (SPEC_ONLY, BASE_ONLY))


def _known_tok_s(result: CaseResult, arm: str | None) -> float:
    return float(result.arms[arm or KNOWN]["tok_s"])


def _table(
    results: Sequence[CaseResult],
    reference: str,
    value: Callable[[CaseResult, str | None], float],
    worst: Callable[[Iterable[float]], float],
) -> Rows:
    """One row for each case: the reference on its first seed, then each arm over it."""
    arms = [arm for arm in results[0].arms if arm.startswith("routed")]
    arms += [arm for arm in RIVALS if arm in results[0].arms and not reference.endswith(arm)]
    rows = [["", reference, *arms]]
    for label, group in _by_label(results):
        cells = [
            f"{worst(value(r, arm) / value(r, None) for r in group if arm in r.arms):.3f}"
            for arm in arms
        ]
        base = value(group[0], None)
        rows.append([label, f"{base:,.0f}" if base >= 100 else f"{base:.3g}", *cells])
    return rows


def _by_label(results: Sequence[CaseResult]) -> list[tuple[str, list[CaseResult]]]:
    groups: dict[str, list[CaseResult]] = {}
    for result in results:
        groups.setdefault(result.case.label, []).append(result)
    return list(groups.items())
