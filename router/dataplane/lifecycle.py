"""How far the router is on its way to its end.

    SERVING --signal--> DRAINING --all done, time over, or another signal--> ENDING

While it drains it refuses new work, and what is under way goes on. There is no way back.
"""

from enum import StrEnum


class Stage(StrEnum):
    """Where it stands. A closed set: `/crossover/state` uses these words."""

    SERVING = "serving"
    DRAINING = "draining"
    ENDING = "ending"


class Lifecycle:
    """The stage of one router. Whoever refuses work or says that it is ready looks here."""

    def __init__(self) -> None:
        self.stage = Stage.SERVING

    @property
    def serving(self) -> bool:
        """Whether new work is taken."""
        return self.stage is Stage.SERVING

    @property
    def ending(self) -> bool:
        """Whether nothing is waited for any more."""
        return self.stage is Stage.ENDING

    def stop(self) -> Stage:
        """Take a signal to stop: the first one drains, any other ends. Return the new stage."""
        self.stage = Stage.DRAINING if self.serving else Stage.ENDING
        return self.stage
