"""The router as a process, in front of servers that are up."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.gpu.processes import ROOT, Process, free_port

ROUTER = "router"


def own_environment(wheels: Path | None) -> dict[str, str]:
    """Environment of the project's own processes: with the packages that SGLang's lack."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("CROSSOVER_")}
    if wheels is not None:
        own["PYTHONPATH"] = f"{own.get('PYTHONPATH', '')}{os.pathsep}{wheels}".strip(os.pathsep)
    return own


class Router(Process):
    """`crossover serve` in front of the two servers."""

    def __init__(
        self,
        servers: Mapping[str, Process],
        arguments: Sequence[str],
        wheels: Path | None,
        log: Path,
    ) -> None:
        port = free_port()
        urls = [word for role, at in servers.items() for word in (f"--{role}-url", at.url)]
        command = ["-m", "router", "serve", "--host", "127.0.0.1", "--port", str(port)]
        super().__init__(
            ROUTER,
            [*command, *urls, *arguments],
            own_environment(wheels),
            log,
            port=port,
            folder=ROOT,
            ready_path="/readyz",
        )
