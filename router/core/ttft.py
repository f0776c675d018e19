"""One server's time to first token as a line over the prompt tokens that wait to be prefilled."""

import math
from collections.abc import Iterable

from router.core.ledger import TtftSample
from router.core.types import Estimate

# What each further sample leaves of the ones before: the line rests on about the last 100.
_KEEP = 0.99
_TTFT_S_MAX = 3600.0


class TtftLine:
    """Least squares of ttft = a + b * prefill tokens, with forgetting. Times in seconds."""

    def __init__(self) -> None:
        self.samples = 0
        # Seconds that each prompt token ahead adds; 0 until prompts of two lengths were seen.
        self.token_s = 0.0
        self._w = self._x = self._y = self._xx = self._xy = self._yy = 0.0

    @property
    def known(self) -> bool:
        """Whether there was any sample."""
        return self._w > 0

    def observe(self, samples: Iterable[TtftSample]) -> None:
        """Take samples in the order of their ends."""
        for sample in samples:
            if 0 <= sample.ttft_s <= _TTFT_S_MAX:
                self.add(sample.prefill_tokens, sample.ttft_s)
                self.samples += 1

    def add(self, tokens: float, seconds: float, weight: float = 1.0) -> None:
        """Take one point."""
        keep = _KEEP**weight
        self._w = self._w * keep + weight
        self._x = self._x * keep + weight * tokens
        self._y = self._y * keep + weight * seconds
        self._xx = self._xx * keep + weight * tokens * tokens
        self._xy = self._xy * keep + weight * tokens * seconds
        self._yy = self._yy * keep + weight * seconds * seconds
        x, y = self._x / self._w, self._y / self._w
        spread = self._xx / self._w - x * x
        told = spread > 1e-6 * max(x * x, 1.0)
        self.token_s = max(0.0, (self._xy / self._w - x * y) / spread) if told else 0.0

    def estimate(self, tokens: float) -> Estimate | None:
        """Return the estimate with its band; None while nothing is known."""
        if not self.known:
            return None
        slope = self.token_s
        x, y = self._x / self._w, self._y / self._w
        value = max(0.0, y + slope * (tokens - x))
        spread = self._xx / self._w - x * x
        left = max(0.0, self._yy / self._w - y * y - slope * slope * max(spread, 0.0))
        margin = 1.96 * math.sqrt(left / self._w)
        return Estimate(value, max(0.0, value - margin), value + margin)
