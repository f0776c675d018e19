"""Profile sim with a load on it: what dashboards and the live page are looked at on."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from loadtest.sim_server import MODEL_NAME
from tests.deploy.compose import Node, example_environment, free_ports, read, running

# On both sides of where the servers cross, so that the learner can know it.
LOAD = "1/5,4/5,8/5,24/5,48/5,8/600"


@contextmanager
def node_under_load(folder: Path) -> Iterator[tuple[Node, str]]:
    """The node, and the router's URL."""
    router, spec, base = free_ports(3)
    node = Node(
        read({**example_environment(), "LAYOUT": "disjoint"})["services"],
        {"30000": router, "30001": spec, "30002": base},
    )
    url = f"http://127.0.0.1:{router}"
    load = [
        *("crossover-loadtest", "run", "--url", url, "--model", MODEL_NAME),
        *("--concurrency", LOAD, "--output-tokens", "64"),
    ]
    with ExitStack() as stack:
        stack.enter_context(node.up("sim", "router"))
        node.wait_for(f"{url}/readyz")
        stack.enter_context(running(load, folder / "load.log"))
        yield node, url
