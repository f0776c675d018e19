"""Profile sim with a load on it: what dashboards and the live page are looked at on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtest.sim_server import MODEL_NAME
from tests.deploy.compose import Node, example_environment, free_ports, read, running

# On both sides of where the servers cross, so that the learner can know it.
LOAD = "1/5,4/5,8/5,24/5,48/5,8/600"


@contextmanager
def node(**chosen: str) -> Iterator[tuple[Node, str]]:
    """The node without a load, with these variables set, and the router's URL."""
    router, spec, base = free_ports(3)
    document = read({**example_environment(), "LAYOUT": "disjoint", **chosen})
    it = Node(document, {"30000": router, "30001": spec, "30002": base})
    url = f"http://127.0.0.1:{router}"
    with it.up("sim", "router"):
        it.wait_for(f"{url}/readyz")
        yield it, url


@contextmanager
def node_under_load(folder: Path, **chosen: str) -> Iterator[tuple[Node, str]]:
    """The node, and the router's URL."""
    with node(**chosen) as (it, url):
        load = [
            *("crossover-loadtest", "run", "--url", url, "--model", MODEL_NAME),
            *("--concurrency", LOAD, "--output-tokens", "64"),
        ]
        with running(load, folder / "load.log"):
            yield it, url
