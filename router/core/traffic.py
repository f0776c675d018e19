"""What the traffic looks like: tokens a second, sequences in flight and how much they vary."""

import math

# The pace at which the past fades.
MEMORY_S = 30.0


class Traffic:
    """Means over the last half minute or so, weighted by time. All zero until there was any."""

    def __init__(self) -> None:
        self._tokens_at: float | None = None
        self._tokens = 0.0
        self._token_s = 0.0
        self._load_at: float | None = None
        self._load_s = 0.0
        self._sequence_s = 0.0
        self._square_s = 0.0
        self._arrivals = 0.0

    def tokens_seen(self, now: float, tokens: float) -> None:
        """Take the tokens of all servers since the last call."""
        if self._tokens_at is not None and now > self._tokens_at:
            elapsed_s = now - self._tokens_at
            kept = math.exp(-elapsed_s / MEMORY_S)
            self._tokens = self._tokens * kept + tokens
            self._token_s = self._token_s * kept + elapsed_s
        self._tokens_at = now

    def arrived(self, now: float, in_flight: int, sequences: int) -> None:
        """Take an arrival of so many sequences, and those in flight since about the one before."""
        if self._load_at is not None:
            elapsed_s = max(0.0, now - self._load_at)
            kept = math.exp(-elapsed_s / MEMORY_S)
            self._load_s = self._load_s * kept + elapsed_s
            self._sequence_s = self._sequence_s * kept + elapsed_s * in_flight
            self._square_s = self._square_s * kept + elapsed_s * in_flight * in_flight
            self._arrivals = self._arrivals * kept + sequences
        self._load_at = now

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of all servers together."""
        return self._tokens / self._token_s if self._token_s > 0 else 0.0

    @property
    def observed_s(self) -> float:
        """For how long there has been traffic, as far as it is remembered."""
        return self._load_s

    @property
    def sequences(self) -> float:
        """Mean sequences in flight."""
        return self._sequence_s / self._load_s if self._load_s > 0 else 0.0

    @property
    def dispersion(self) -> float:
        """Variance of the sequences in flight over their mean: 1 for independent arrivals, 0 where
        each client sends its next request as the last one ends.
        """
        mean = self.sequences
        return max(0.0, self._square_s / self._load_s - mean * mean) / mean if mean > 0 else 0.0

    @property
    def lifetime_s(self) -> float:
        """Mean time of a sequence in flight, by Little's law."""
        return self._sequence_s / self._arrivals if self._arrivals > 0 else 0.0
