"""What the length of contexts adds to the time per token, where it shows.

A decode step reads the keys and values of all tokens in flight. So of two windows with as many
sequences the one with the longer prompts is the slower. The term is

    k * (prompt tokens in flight - n * mean prompt of the traffic)

with k the slope of a line through the windows of the last minutes, and no term while k is not
clearly above zero. As a difference to the traffic's mean it is zero where prompts are all alike:
there the curve itself holds their cost.
"""

import math

_MEMORY_WINDOWS = 300.0
_SIGMAS = 4.0
_WEIGHT_MIN = 2.0
_SUMS = ("w", "x", "y", "xx", "xy", "yy")
_MEAN_MEMORY = 60.0


class ContextTerm:
    """Seconds per token that each prompt token in flight adds, for one server."""

    def __init__(self) -> None:
        # The term k; 0 while the windows do not support one.
        self.token_s = 0.0
        self._mean_tokens: float | None = None
        self._sums = dict.fromkeys(_SUMS, 0.0)

    def seconds(self, sequences: float, context_tokens: float) -> float:
        """Return what prompts of so many tokens together add to the time per token."""
        if self.token_s <= 0 or self._mean_tokens is None:
            return 0.0
        return self.token_s * (context_tokens - sequences * self._mean_tokens)

    def observe(self, sequences: float, context_tokens: float, off_s: float, weight: float) -> None:
        """Take a window: its prompt tokens in flight, and by how much it missed the curve."""
        mean = context_tokens / sequences
        if self._mean_tokens is None:
            self._mean_tokens = mean
        x = context_tokens - sequences * self._mean_tokens
        kept = math.exp(-weight / _MEMORY_WINDOWS)
        for name, value in zip(
            _SUMS, (1.0, x, off_s, x * x, x * off_s, off_s * off_s), strict=True
        ):
            self._sums[name] = self._sums[name] * kept + weight * value
        self._mean_tokens += weight / _MEAN_MEMORY * (mean - self._mean_tokens)
        self.token_s = self._supported()

    def _supported(self) -> float:
        w, x, y, xx, xy, yy = (self._sums[name] for name in _SUMS)
        spread = xx - x * x / w
        if w < _WEIGHT_MIN or spread <= 0:
            return 0.0
        common = xy - x * y / w
        k = common / spread
        left = max(yy - y * y / w - k * common, 1e-30)
        doubt = math.sqrt(left / (w - 1) / spread)
        return k if k > _SIGMAS * doubt else 0.0
