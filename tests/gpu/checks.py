"""What must hold beside the figures: greedy ids of plain, switching under load. And a profile."""

import gzip
import json
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.gpu.arms import Site
from tests.gpu.load import burst, greedy_ids, prompts, ramp
from tests.gpu.servers import Server

ID_TOKENS = 64
PROFILE_STEPS_GPU, PROFILE_STEPS_CPU = 12, 1  # interpreted kernels trace a great many events
PROFILE_WAIT_S = 30
TOP_KERNELS = 30


def id_prompts(site: Site) -> list[list[int]]:
    """Four prompts of different lengths."""
    longest = site.prompt_tokens
    lengths = (max(longest // 32, 2), max(longest // 8, 3), longest // 2, longest)
    return [prompts(site, 1, f"ids {length}", length)[0] for length in lengths]


def compare_ids(server: Server, plain: Server, site: Site) -> dict[str, Any]:
    """Greedy ids of both servers, each prompt alone."""
    work = id_prompts(site)
    tokens = min(ID_TOKENS, site.output_tokens)
    expected = greedy_ids(plain.url, work, tokens)
    got = greedy_ids(server.url, work, tokens)
    differing = [
        next(
            (at for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b),
            None,
        )
        for mine, theirs in zip(got, expected, strict=True)
    ]
    return {
        "check": "ids",
        "arm": server.arm.name,
        "ok": all(at is None for at in differing),
        "first_difference": differing,
        "distinct_ids": [len(set(ids)) for ids in expected],
        "switch": server.switch() if server.arm.patched else None,
    }


def check_ramp(server: Server, site: Site, phase_s: float, tokens: int) -> dict[str, Any]:
    """Low, high and low load: every reply complete, and speculation on, off, and on again."""

    def look() -> tuple[str | None, int | None]:
        return (server.switch() or {}).get("mode"), server.running()

    before = server.switch() or {}
    outcome = ramp(server.url, site, phase_s, tokens, look)
    last = burst(server.url, prompts(site, 1, "after the ramp"), 1, min(tokens, site.output_tokens))
    after = server.switch() or {}
    seen = [mode for _, mode, _ in outcome.modes]
    changes = [mode for at, mode in enumerate(seen) if at == 0 or mode != seen[at - 1]]
    switched = (after.get("switches_total") or 0) - (before.get("switches_total") or 0)
    return {
        "check": "ramp",
        "arm": server.arm.name,
        "ok": "off" in changes and after.get("mode") == "on" and switched >= 2 and last.tokens > 0,
        "loads": site.ramp,
        "requests": outcome.requests,
        "tokens": outcome.tokens,
        "wall_s": round(outcome.wall_s, 2),
        "modes": changes,
        "switches": switched,
        "samples": outcome.modes,
        "switch": after,
    }


def profile(server: Server, site: Site, level: int, folder: Path, gpu: bool) -> dict[str, Any]:
    """Trace a few decode steps at one level and add up the time by kernel name."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "output_dir": str(folder),
        "num_steps": PROFILE_STEPS_GPU if gpu else PROFILE_STEPS_CPU,
        "activities": ["CPU", "GPU"] if gpu else ["CPU"],
    }
    work = prompts(site, level, "profile")
    enough = threading.Event()

    def keep_decoding() -> None:
        while not enough.is_set():
            burst(server.url, work, level, site.output_tokens)

    load = threading.Thread(target=keep_decoding, daemon=True)
    load.start()
    try:
        _wait_for_decoding(server, level)
        server.post("/start_profile", settings)
        deadline = time.monotonic() + PROFILE_WAIT_S
        while not (traces := sorted(folder.glob("*.trace.json.gz"))):
            if time.monotonic() > deadline:
                return {"check": "profile", "arm": server.arm.name, "level": level, "ok": False}
            time.sleep(0.25)
    finally:
        enough.set()
    load.join(PROFILE_WAIT_S)
    return {"check": "profile", "arm": server.arm.name, "level": level, **_add_up(traces[0], gpu)}


def _wait_for_decoding(server: Server, level: int) -> None:
    deadline = time.monotonic() + PROFILE_WAIT_S
    while time.monotonic() < deadline:
        if server.running() == level:
            return
        time.sleep(0.02)


def _add_up(trace: Path, gpu: bool) -> dict[str, Any]:
    deadline = time.monotonic() + PROFILE_WAIT_S
    while True:  # the file appears before it is complete
        try:
            events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
            break
        except (EOFError, OSError, ValueError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"} if gpu else {"cpu_op"}
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    spans = []
    for event in events:
        if event.get("cat") in kinds:
            total[event["name"][:140]][0] += event["dur"] / 1e3
            total[event["name"][:140]][1] += 1
            spans.append((event["ts"], event["ts"] + event["dur"]))
    spans.sort()
    busy, end = 0.0, float("-inf")
    for begin, stop in spans:
        busy += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    wall = max(stop for _, stop in spans) - spans[0][0] if spans else 0.0
    top = sorted(total.items(), key=lambda item: -item[1][0])[:TOP_KERNELS]
    return {
        "ok": bool(spans),
        "wall_ms": round(wall / 1e3, 2),
        "busy_ms": round(busy / 1e3, 2),
        "kernels": [
            {"name": name, "ms": round(ms, 3), "count": int(count)} for name, (ms, count) in top
        ],
    }
