"""What is measured: each arm is one way to run the same model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ACCEPT_LENGTH = 2.2
MAX_RUNNING_REQUESTS = 256
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 256
# 256 requests of 512 tokens, and 16 draft slots a request while a tree is verified.
POOL_TOKENS = MAX_RUNNING_REQUESTS * (PROMPT_TOKENS + OUTPUT_TOKENS + 32)

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

SWITCH = "SGLANG_SPEC_SWITCH_"


@dataclass(frozen=True, slots=True)
class Arm:
    """One server configuration. `simulated`: the accept length is drawn, token ids mean nothing."""

    name: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    speculative: bool = False
    simulated: bool = False
    patched: bool = False


def _speculative(
    name: str,
    shape: tuple[int, int, int],
    switch: Mapping[str, str] | None = None,
    accept_length: float = ACCEPT_LENGTH,
    **options,
) -> Arm:
    steps, topk, tokens = shape
    simulated = options.get("simulated", True)
    environment = {f"{SWITCH}{key}": value for key, value in (switch or {}).items()}
    if simulated:
        environment["SGLANG_SIMULATE_ACC_LEN"] = str(accept_length)
    return Arm(
        name,
        (
            *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", str(steps)),
            *("--speculative-eagle-topk", str(topk)),
            *("--speculative-num-draft-tokens", str(tokens)),
            *options.get("arguments", ()),
        ),
        environment,
        speculative=True,
        simulated=simulated,
        patched=bool(switch),
    )


TREE = (2, 4, 16)  # the v1 worker: no overlap
CHAIN = (3, 1, 4)  # the v2 worker: overlap


def arms(
    tree_threshold: int, chain_threshold: int, accept_length: float = ACCEPT_LENGTH
) -> dict[str, Arm]:
    """Every arm by name; the two thresholds are those of the patched arms."""
    eagle = partial(_speculative, accept_length=accept_length)
    tree = {"DISABLE_BATCH_THRESHOLD": str(tree_threshold)}
    chain = {"DISABLE_BATCH_THRESHOLD": str(chain_threshold)}
    deferred = {"DRAFT_SYNC": "deferred"}
    off = {"SCHEDULE": "off"}
    unsynced = {"SCHEDULE": "off", "SKIP_DRAFT_EXTEND": "1"}
    goodput = {"POLICY": "goodput"}
    toggle = {"SCHEDULE": "every:3"}
    table = (
        Arm("plain"),
        Arm("plain-noov", ("--disable-overlap-schedule",)),
        eagle("tree", TREE),
        eagle("tree-patched", TREE, tree),
        eagle("tree-goodput", TREE, goodput),
        eagle("tree-off", TREE, tree | off),
        eagle("tree-off-nosync", TREE, tree | unsynced),
        eagle("tree-toggle", TREE, tree | toggle, simulated=False),
        eagle("tree-page16", TREE, tree | toggle, simulated=False, arguments=("--page-size", "16")),
        eagle("chain", CHAIN),
        eagle("chain-patched", CHAIN, chain),
        eagle("chain-goodput", CHAIN, goodput),
        eagle("chain-deferred", CHAIN, chain | deferred),
        eagle("chain-off", CHAIN, chain | off),
        eagle("chain-off-nosync", CHAIN, chain | unsynced),
        eagle("chain-toggle", CHAIN, chain | toggle, simulated=False),
        eagle("chain-deferred-toggle", CHAIN, chain | deferred | toggle, simulated=False),
        eagle("adaptive", CHAIN, arguments=("--speculative-adaptive",)),
    )
    return {arm.name: arm for arm in table}


@dataclass(frozen=True, slots=True)
class Site:
    """Where the servers run: models, arguments common to all arms, and the bounds of a prompt."""

    target: Path
    draft: Path
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    levels: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    token_ids: range
    ramp: tuple[int, int, int]
    simulates: bool = True

    def command(self, arm: Arm, port: int, nccl_port: int) -> list[str]:
        """Arguments after `python`."""
        draft = ("--speculative-draft-model-path", str(self.draft)) if arm.speculative else ()
        ports = ("--host", "127.0.0.1", "--port", str(port), "--nccl-port", str(nccl_port))
        return [
            *("-m", "sglang.launch_server", "--model-path", str(self.target)),
            *(*self.arguments, *ports, *arm.arguments, *draft),
        ]

    def server_environment(self, arm: Arm, plugin: Path | None) -> dict[str, str]:
        """Environment of the arm's server; only a patched arm can find the plugin."""
        own = dict(arm.environment)
        if not self.simulates:
            own.pop("SGLANG_SIMULATE_ACC_LEN", None)
        environment = {**self.environment, "SGLANG_RECORD_STEP_TIME": "1", **own}
        if arm.patched and plugin is not None:
            known = environment.get("PYTHONPATH", "")
            environment["PYTHONPATH"] = f"{plugin}:{known}" if known else str(plugin)
            environment[f"{SWITCH}CACHE"] = str(plugin.with_name("step-times"))
        return environment


COMMON = (
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--random-seed", "1"),
    *("--enable-metrics", "--decode-log-interval", "10", "--skip-server-warmup"),
    "--sleep-on-idle",  # an idle server beside the measured one takes neither GPU nor CPU
)


def gpu_site(models: Path, environment: Mapping[str, str], graph_sizes: tuple[int, ...]) -> Site:
    """One GPU of 141 GB, up to three servers of an 8B model on it.

    SGLang sizes the KV pool from the memory that is free at start, so servers that start together
    would see each other. `--max-total-tokens` fixes the pool instead; the fraction only has to be
    so large that what SGLang profiles is never the smaller of the two, in whatever order.
    Each server: weights 15 GiB, KV 17 (128 KiB a token), draft 1, graphs and activations up to 10.
    """
    arguments = (
        *("--load-format", "dummy", "--dtype", "bfloat16", "--context-length", "4096"),
        *("--attention-backend", "fa3", "--disable-piecewise-cuda-graph"),
        *("--max-running-requests", str(MAX_RUNNING_REQUESTS)),
        *("--mem-fraction-static", "0.95", "--max-total-tokens", str(POOL_TOKENS)),
        *("--cuda-graph-bs", *map(str, graph_sizes)),
        *COMMON,
    )
    settings = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_DISABLE_CUDNN_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return Site(
        models / "target",
        models / "draft",
        arguments,
        {**environment, **settings},
        levels=(1, 8, 32, 64, 128, 256),
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        token_ids=range(1000, 120_000),
        ramp=(4, 200, 4),
    )


def cpu_site(models: Path, environment: Mapping[str, str]) -> Site:
    """Tiny models on the CPU: runs every line of this driver, and measures nothing.

    Simulated acceptance writes to a CUDA device, so it stays off here.
    """
    arguments = (
        *("--device", "cpu", "--dtype", "float32", "--attention-backend", "triton"),
        *("--disable-cuda-graph", "--max-running-requests", "8", "--max-total-tokens", "4096"),
        *("--context-length", "256", "--chunked-prefill-size", "64"),
        *COMMON,
    )
    return Site(
        models / "target",
        models / "draft",
        arguments,
        environment,
        levels=(1, 2, 4),
        prompt_tokens=12,
        output_tokens=32,
        token_ids=range(4, 100),
        ramp=(1, 6, 1),
        simulates=False,
    )
