"""What the traffic looks like: tokens a second, sequences in flight and how much they vary."""

import math

# The pace at which the past fades.
MEMORY_S = 30.0
# A step in load is many times what chance makes of it, and says nothing of the rest of the time.
_VARIANCE_MAX = 4.0
# Below this dispersion the load is kept by the clients, not by arrivals.
CLOSED_DISPERSION = 0.3


class Traffic:
    """Means over the last half minute or so, weighted by time. All zero until there was any."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0
        self._sequence_s = 0.0
        self._variance_s = 0.0
        self._arrivals = 0.0
        self._ended = 0.0
        self._level: float | None = None
        self._prompt_tokens = 0.0

    def passed(self, elapsed_s: float, tokens: float, sequence_s: float) -> None:
        """Take what went on, on all servers, in the time since the last call."""
        if elapsed_s <= 0:
            return
        kept = math.exp(-elapsed_s / MEMORY_S)
        level = sequence_s / elapsed_s
        before = 0.0 if self._level is None else self._level
        if self._level is not None:
            by_chance = (level + before) * (1 - math.exp(-elapsed_s / max(self.lifetime_s, 1e-3)))
            share = (level - before) ** 2 / by_chance if by_chance > 0 else 0.0
            self._variance_s = self._variance_s * kept + elapsed_s * min(share, _VARIANCE_MAX)
        self._level = level
        self._ended = self._ended * kept - (level - before)
        self._seconds = self._seconds * kept + elapsed_s
        self._tokens = self._tokens * kept + tokens
        self._sequence_s = self._sequence_s * kept + sequence_s
        self._arrivals *= kept
        self._prompt_tokens *= kept

    def arrived(self, sequences: int, prompt_tokens: int) -> None:
        """Take an arrival."""
        self._arrivals += sequences
        self._ended += sequences
        self._prompt_tokens += prompt_tokens

    @property
    def observed_s(self) -> float:
        """For how long it has been looked at, as far as that is remembered."""
        return self._seconds

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of all servers together."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    @property
    def sequences(self) -> float:
        """Mean sequences in flight."""
        return self._sequence_s / self._seconds if self._seconds > 0 else 0.0

    @property
    def level(self) -> float:
        """Mean sequences in flight between the last two calls."""
        return self._level or 0.0

    @property
    def dispersion(self) -> float:
        """How much the sequences in flight vary from one call to the next, as a share of what they
        do with independent arrivals; 0 where each client sends its next request as the last one
        ends. Over a time t that is short for their lifetime L the number n changes by chance with a
        variance of 2 n (1 - exp(-t / L)).
        """
        return self._variance_s / self._seconds if self._seconds > 0 else 0.0

    @property
    def closed(self) -> bool:
        """Whether clients that wait for their answers keep the load, rather than arrivals."""
        return self.dispersion < CLOSED_DISPERSION

    @property
    def lifetime_s(self) -> float:
        """Mean time of a sequence in flight: all of their time by those that ended, which allows
        for those that have only begun. While none has ended, all of their time; 0 where none was.
        """
        return self._sequence_s / max(self._ended, 1.0)

    @property
    def tokens_per_sequence(self) -> float:
        """Mean output tokens of a sequence, likewise; 0 while none has ended."""
        return self._tokens / self._ended if self._ended >= 1 else 0.0

    @property
    def prompt_per_sequence(self) -> float:
        """Mean prompt tokens of a sequence; 0 where none arrived."""
        return self._prompt_tokens / self._arrivals if self._arrivals > 0 else 0.0
