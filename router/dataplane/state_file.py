"""What is learnt, on disk: written whole or not at all, read with suspicion."""

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from router.core.calibration import Calibration, CalibrationError, ServerProfile
from router.core.parity import ServerFacts
from router.core.types import Layout

STATE_BYTES_MAX = 4 * 2**20
CORRUPT_SUFFIX = ".corrupt"


class StateFile:
    """The state file at `path`. `warn` takes what the operator should know, a line each."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self._warn = warn

    def load(self, layout: Layout) -> Calibration | None:
        """Return what is in the file; None if there is none or it cannot be used.

        A file that makes no sense is set aside under another name, never overwritten.
        """
        try:
            with self.path.open("rb") as file:
                data = file.read(STATE_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"state file {self.path}: cannot be read: {error.strerror}: starting fresh")
            return None
        if len(data) > STATE_BYTES_MAX:
            self._set_aside(f"{self.path}: more than {STATE_BYTES_MAX} bytes")
            return None
        try:
            state = Calibration.from_json(json.loads(data), str(self.path))
        except CalibrationError as error:
            self._set_aside(str(error))
            return None
        except (ValueError, RecursionError) as error:
            self._set_aside(f"{self.path}: not JSON: {error}")
            return None
        if state.layout not in (None, layout):
            self._warn(
                f"state file {self.path}: layout is {state.layout}, but the servers are"
                f" {layout}: not used"
            )
            return None
        return state

    def save(self, state: Calibration) -> bool:
        """Replace the file in one step; False, with a warning, if that fails."""
        text = json.dumps(state.to_json(), separators=(",", ":"), allow_nan=False)
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        try:
            with beside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
        except OSError as error:
            self._warn(f"state file {self.path}: cannot be written: {error.strerror}")
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            return False
        return True

    def _set_aside(self, problem: str) -> None:
        aside = self.path.with_name(self.path.name + CORRUPT_SUFFIX)
        try:
            self.path.replace(aside)
        except OSError as error:
            self._warn(f"state file {problem}; cannot be set aside: {error.strerror}")
        else:
            self._warn(f"state file {problem}; set aside as {aside}, starting fresh")


def combined(state: Calibration | None, calibration: Calibration | None) -> Calibration | None:
    """Return what both know: of a server, the state if that knows its speed, else the calibration.

    The state names servers; the calibration may speak of a role. A name is looked for first.
    """
    if state is None or calibration is None:
        return state or calibration
    learnt = tuple(server for server in state.servers if server.tpot)
    named = {(server.name, server.role) for server in learnt}
    given = tuple(
        server for server in calibration.servers if (server.name, server.role) not in named
    )
    return replace(
        state,
        servers=learnt + given,
        model=state.model or calibration.model,
        interference=state.interference or calibration.interference,
    )


def stamped(
    learnt: Calibration, declared: Layout, facts: Callable[[str], ServerFacts | None]
) -> Calibration:
    """Return what is learnt with the declared layout, the model and the engine versions.

    All of them have to be the same again for it to hold.
    """
    model = learnt.model
    servers: list[ServerProfile] = []
    for server in learnt.servers:
        told = facts(server.name) if server.name is not None else None
        if told is not None:
            model = told.served_model_name or model
            server = replace(server, engine_version=told.version)  # noqa: PLW2901
        servers.append(server)
    return replace(learnt, servers=tuple(servers), model=model, layout=declared)
