"""Where two curves cross: up to which load the speculating server makes more tokens. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log


@dataclass(frozen=True, slots=True)
class Crossing:
    """The load at which `spec` falls behind `base`, between two levels that were measured.

    `load` and `between` are None where one server is ahead at every level; `ahead` says which one
    is at the lowest. `more` counts further crossings.
    """

    ahead: str
    load: float | None = None
    between: tuple[float, float] | None = None
    more: int = 0

    def to_json(self) -> dict[str, object]:
        """Return it as JSON values."""
        load = None if self.load is None else round(self.load, 2)
        between = None if self.between is None else list(self.between)
        return {"load": load, "between": between, "ahead": self.ahead, "more": self.more}


def find(spec_tok_s: Mapping[float, float], base_tok_s: Mapping[float, float]) -> Crossing | None:
    """Return where the rates over load cross; None if they have no level in common.

    Between two levels both rates are taken as straight in the logarithms, as loads double.
    """
    levels = sorted(
        n for n in spec_tok_s.keys() & base_tok_s.keys() if spec_tok_s[n] > 0 and base_tok_s[n] > 0
    )
    if not levels:
        return None
    lead = {n: log(spec_tok_s[n] / base_tok_s[n]) for n in levels}
    ahead = "spec" if lead[levels[0]] >= 0 else "base"
    places = [(a, b) for a, b in pairwise(levels) if (lead[a] >= 0) != (lead[b] >= 0)]
    if not places:
        return Crossing(ahead)
    # The one that steering is about: from spec to base.
    low, high = next(((a, b) for a, b in places if lead[a] >= 0), places[0])
    share = lead[low] / (lead[low] - lead[high])
    load = exp(log(low) + share * (log(high) - log(low)))
    return Crossing(ahead, load, (low, high), len(places) - 1)


def sentence(found: Crossing | None, spec: str = "spec", base: str = "base") -> str:
    """Say in words up to which load which server is the faster one."""
    if found is None:
        return f"{spec} and {base} have no level in common: nothing can be said of a crossover."
    names = {"spec": spec, "base": base}
    if found.load is None or found.between is None:
        return f"No crossover: {names[found.ahead]} makes more tokens at every level measured."
    low, high = found.between
    said = f"{spec} and {base} cross at {found.load:.3g} requests in flight, between the levels "
    said += f"{low:g} and {high:g}"
    said += (
        f": {spec} is faster below, {base} above."
        if found.ahead == "spec" or found.more
        else f": {base} is faster below, {spec} above."
    )
    if found.more:
        said += f" They cross {found.more + 1} times in all, so they are about equal around there."
    return said
