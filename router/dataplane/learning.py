"""Keeps the learner going: brings it tokens, guards it from what no longer holds, saves it.

Four times a second each server's output tokens go to the steering, which is the only clock that
learning has; nothing is done per chunk. What was learnt or measured of another model or engine
version is dropped once the server tells what it runs.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from router.core.calibration import Calibration, ServerProfile, StaleError
from router.core.learner import Learner
from router.core.parity import ServerFacts
from router.core.steering import Steering
from router.core.tokens import TokenModel
from router.core.types import Layout, ServerSpec
from router.dataplane.state_file import StateFile, combined, stamped

OBSERVE_S = 0.25
SAVE_S = 60.0
LAYOUT_S = 5.0

_log = logging.getLogger("crossover.learning")


class Memory:
    """What earlier runs and measurements have left: the state file and the calibration."""

    def __init__(
        self,
        layout: Layout,
        calibration: Calibration | None,
        calibration_source: str,
        state_file: StateFile | None,
    ) -> None:
        self.file = state_file
        state = None if state_file is None else state_file.load(layout)
        self.known = combined(state, calibration)
        self._sources = [
            (source, content)
            for source, content in (
                ("" if state_file is None else f"state file {state_file.path}", state),
                (f"calibration {calibration_source}", calibration),
            )
            if content is not None
        ]

    def check(self, server: ServerSpec, facts: ServerFacts) -> None:
        """Raise StaleError if what is remembered is not of this server as it is now."""
        now = ServerProfile(server.role, server.name, engine_version=facts.version)
        for source, content in self._sources:
            content.check_fresh(source, facts.served_model_name, server.name, now)


class Learning:
    """The task that feeds the steering, and the life of what it learns."""

    def __init__(
        self,
        steering: Steering,
        learner: Learner,
        memory: Memory,
        servers: Sequence[ServerSpec],
        tokens: Mapping[str, TokenModel],
        facts: Callable[[str], ServerFacts | None],
        clock: Callable[[], float],
    ) -> None:
        self._steering = steering
        self._learner = learner
        self._memory = memory
        self._servers = servers
        self._tokens = tokens
        self._facts = facts
        self._clock = clock
        self._checked: dict[str, ServerFacts] = {}
        self._saved_at = clock()
        self._layout_at = clock()
        self.layout_warning: str | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running loop."""
        self._task = asyncio.create_task(self._run(), name="learning")

    async def aclose(self) -> None:
        """End, and save."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.save()

    def look(self, now: float) -> None:
        """Do what is due."""
        for server in self._servers:
            facts = self._facts(server.name)
            if facts is not None and facts is not self._checked.get(server.name):
                self._check(server, facts)
        self._steering.observe(
            now, {name: tokens.total_tokens() for name, tokens in self._tokens.items()}
        )
        if now - self._layout_at >= LAYOUT_S:
            self._look_at_layout(now)

    def output_tokens(self, name: str) -> float:
        """Return all output tokens of a server so far, those of streams under way included."""
        return self._tokens[name].total_tokens()

    def save_due(self) -> bool:
        """Return whether the state file is a minute old."""
        return self._clock() - self._saved_at >= SAVE_S

    async def save(self) -> None:
        """Write the state file, if there is one and something is known."""
        self._saved_at = self._clock()
        file, learnt = self._memory.file, self._learner.learnt()
        if file is not None and any(server.tpot for server in learnt.servers):
            state = stamped(learnt, self._learner.declared, self._facts)
            # A disk may take its time; streams would wait for it.
            await asyncio.to_thread(file.save, state)

    def _look_at_layout(self, now: float) -> None:
        self._layout_at = now
        learner = self._learner
        if learner.layout is learner.declared:
            self.layout_warning = None
        elif self.layout_warning is None:
            seem = "to share GPUs" if learner.layout is Layout.SHARED else "to have their own GPUs"
            self.layout_warning = (
                f"layout is {learner.declared}, but tokens take"
                f" {learner.interference().slowdown:.1f} times as long while another server works"
                f" too: the servers seem {seem}; set layout: {learner.layout}"
            )
            _log.warning("%s", self.layout_warning)

    async def _run(self) -> None:
        while True:
            try:
                self.look(self._clock())
                if self.save_due():
                    await self.save()
            except Exception:  # noqa: BLE001  (the boundary of a task)
                _log.exception("learning failed unexpectedly")
            await asyncio.sleep(OBSERVE_S)

    def _check(self, server: ServerSpec, facts: ServerFacts) -> None:
        """Forget what was known of a server that is not what it was."""
        before = self._checked.get(server.name)
        self._checked[server.name] = facts
        if before is None:
            try:
                self._memory.check(server, facts)
            except StaleError as error:
                _log.warning("%s; not used for server %s", error, server.name)
                self._learner.forget(server.name)
        elif (before.version, before.served_model_name) != (facts.version, facts.served_model_name):
            _log.warning("server %s runs something else now: learning it anew", server.name)
            self._learner.forget(server.name)
