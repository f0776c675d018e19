"""Which batches are measured at start, and which of their steps count. Pure."""

from dataclasses import dataclass, field

from sglang_patch.rule import BatchView, Mode, Rule, ScheduledRule, has_room
from sglang_patch.step_times import Sample

SHORT_PROMPT_TOKENS = 16
PLAN_CONTEXT_TOKENS = 32_768
"""Context of the one batch that shows what context costs: a second of prefill on a large GPU."""
LONG_RUNNING = 8
POOL_SHARE = 0.5
"""Of the KV pool, that a measured batch may fill: no request may be retracted."""
PHASE_STEPS = 6
"""Steps of one mode in turn: the first and the last one are no steady steps."""
SAMPLES = 4
PHASES_MAX = 4


@dataclass(frozen=True, slots=True)
class Item:
    """A batch to measure."""

    running: int
    prompt_tokens: int


def plan(
    *,
    running_max: int,
    request_tokens_max: int,
    pool_tokens: int,
    new_tokens: int,
    context_tokens: int,
) -> list[Item]:
    """Return the powers of two up to the largest batch, that itself, and one of long prompts.

    What does not fit in the pool is left out.
    """
    room = int(POOL_SHARE * pool_tokens)
    sizes = {1 << power for power in range(running_max.bit_length())} | {running_max}
    items = [
        Item(size, SHORT_PROMPT_TOKENS)
        for size in sorted(sizes)
        if size * (SHORT_PROMPT_TOKENS + 2 * new_tokens) <= room
    ]
    if not items:
        return [Item(1, SHORT_PROMPT_TOKENS)]
    running = min(LONG_RUNNING, items[-1].running)
    longest = min(request_tokens_max - new_tokens, room // running - 2 * new_tokens)
    prompt_tokens = min(longest, context_tokens // running)
    if prompt_tokens > SHORT_PROMPT_TOKENS:
        items.append(Item(1 << (running.bit_length() - 1), prompt_tokens))
    return items


@dataclass(slots=True)
class Recorder(Rule):
    """Alternates the modes every PHASE_STEPS steps, and keeps the steady steps of full batches."""

    samples: list[Sample] = field(default_factory=list)
    _running: int = 0
    _seen: dict[Mode, int] = field(default_factory=dict)

    def begin(self, running: int) -> None:
        """The next batch has this size."""
        self._running = running
        self._seen = dict.fromkeys(Mode, 0)

    @property
    def complete(self) -> bool:
        """Whether both modes have been seen often enough."""
        return all(count >= SAMPLES for count in self._seen.values())

    @staticmethod
    def new_tokens(accept_max: int) -> int:
        """Return what a request must be able to yield meanwhile."""
        return PHASES_MAX * PHASE_STEPS * (accept_max + 1)

    def decide(self, view: BatchView) -> Mode:
        """Return the mode of the phase."""
        mode = ScheduledRule(period=PHASE_STEPS).decide(view)
        return mode if has_room(view, Mode.ON) else Mode.OFF

    def timed(self, mode: Mode, running: int, context_tokens: int, seconds: float) -> None:
        """Keep a steady step of the full batch."""
        if running == self._running:
            self.samples.append(Sample(mode, running, context_tokens, seconds))
            self._seen[mode] += 1
