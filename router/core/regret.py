"""How far from the best: tokens that were made, beside those that an oracle would have made.

The oracle sees the same sequences in flight, n, at each moment, and serves them at

    O1  max(S(n), B(n))                      the better of the two roles alone
    O2  S(min(n, K)) + B(n - min(n, K))      the best fixed rule: one K for the whole run
    O3  max over k of S(k) + B(n - k)        the best split

S and B are the roles' tokens per second; split work runs `slowdown` times slower. Regret is the
integral of what was missed over the integral of what the oracle makes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

Rate = Callable[[float], float]

THRESHOLDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Splits that are tried for O3 with many sequences; up to so many all of them are.
_SPLITS = 32


@dataclass(slots=True)
class Regret:
    """Tokens of a run and of its oracles, since the start."""

    tokens: float = 0.0
    single_tokens: float = 0.0
    split_tokens: float = 0.0
    fixed_tokens: dict[int, float] = field(default_factory=lambda: dict.fromkeys(THRESHOLDS, 0.0))

    def add(
        self,
        elapsed_s: float,
        sequences: float,
        tokens: float,
        spec: Rate,
        base: Rate,
        slowdown: float = 1.0,
    ) -> None:
        """Account for a short time with so many sequences in flight that made so many tokens.

        `spec` and `base` give a role's tokens per second at a load above 0.
        """
        self.tokens += tokens
        if sequences <= 0 or elapsed_s <= 0:
            return

        def split(on_spec: float) -> float:
            on_base = sequences - on_spec
            if on_base <= 0:
                return spec(sequences)
            if on_spec <= 0:
                return base(sequences)
            return (spec(on_spec) + base(on_base)) / slowdown

        parts = min(_SPLITS, max(1, round(sequences)))
        splits = [split(sequences * part / parts) for part in range(parts + 1)]
        self.single_tokens += elapsed_s * max(splits[0], splits[-1])
        self.split_tokens += elapsed_s * max(splits)
        for threshold in THRESHOLDS:
            self.fixed_tokens[threshold] += elapsed_s * split(min(sequences, threshold))

    @property
    def best_threshold(self) -> int:
        """The K of O2: the one that would have made the most tokens in all."""
        return max(self.fixed_tokens, key=self.fixed_tokens.__getitem__)

    def oracle_tokens(self) -> dict[str, float]:
        """Return each oracle's tokens."""
        return {
            "o1": self.single_tokens,
            "o2": self.fixed_tokens[self.best_threshold],
            "o3": self.split_tokens,
        }

    def shares(self) -> dict[str, float | None]:
        """Return the regret against each oracle as a share of its tokens; None before any.

        Negative where the run was better than the oracle, as it can be than O1 and O2.
        """
        return {
            name: (best - self.tokens) / best if best > 0 else None
            for name, best in self.oracle_tokens().items()
        }
