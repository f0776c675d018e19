"""Reading the settings again, without dropping a stream.

What can change while requests run takes effect at once; what cannot is named and stays. Settings
that are wrong change nothing, and are told of in the words of a refused start.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from router.configuration import Resolved, changed_live
from router.problems import SettingsError
from router.settings import Settings

_log = logging.getLogger("crossover.reload")


@dataclass(slots=True)
class InForce:
    """The settings in force, whether they are the latest that were read, and since when.

    `loaded_at` is in seconds since the epoch.
    """

    settings: Settings
    latest: bool = True
    loaded_at: float = field(default_factory=time.time)

    def put(self, settings: Settings) -> None:
        """Take note that the latest settings are in force, from now on."""
        self.settings, self.latest, self.loaded_at = settings, True, time.time()


class Reloader:
    """Reads the settings when asked to: `load` from the same sources as at the start.

    `apply` puts settings in force, on the event loop. One reading at a time; who asks while one is
    under way has another after it.
    """

    def __init__(
        self,
        resolved: Resolved,
        load: Callable[[], Resolved],
        in_force: InForce,
        apply: Callable[[Settings], None],
    ) -> None:
        self._resolved = resolved
        self._load = load
        self._in_force = in_force
        self._apply = apply
        self._again = False
        self._task: asyncio.Task[None] | None = None

    def request(self) -> None:
        """Read the settings soon. To be called on the event loop."""
        self._again = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._again:
                self._again = False
                await self.reload()
        finally:
            self._task = None

    async def reload(self) -> None:
        """Read the settings and put them in force, or say why not."""
        try:
            # In a thread: files may be slow to read and to parse.
            read = await asyncio.to_thread(self._load)
            change = changed_live(self._resolved, read)
        except SettingsError as error:
            self._refuse(error.problems)
            return
        except Exception:  # noqa: BLE001  (the boundary of a task)
            _log.exception("reload failed unexpectedly; nothing has changed")
            self._in_force.latest = False
            return
        self._apply(change.resolved.settings)
        self._in_force.put(change.resolved.settings)
        self._resolved = change.resolved
        for line in change.kept:
            _log.warning("reload: %s", line)
        _log.info("reload: %s", ", ".join(change.changed) or "no setting in force has changed")

    def _refuse(self, problems: tuple[str, ...]) -> None:
        self._in_force.latest = False
        for problem in problems:
            _log.error("reload: %s", problem)
        _log.error("reload: nothing has changed, the settings before stay in force")
