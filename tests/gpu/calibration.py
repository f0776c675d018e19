"""The router's calibration file from what each server did alone. Pure.

Each level was measured once, so the bounds are not measured: they are the spread that repeated
rounds on this machine have shown.
"""

import json
from collections.abc import Mapping, Sequence

from router.core.calibration import Calibration, ServerProfile, TpotPoint, TtftPoint
from router.core.types import Layout, Role
from tests.gpu.figures import Row

SPREAD = 0.05
LEARN_WINDOW_S = 0.25  # how often the router would have learnt from the same time


def calibration(rows: Sequence[Row], arms: Mapping[Role, str], model: str) -> str:
    """The file's text; `arms` are the names of the servers' rows by role."""
    servers = tuple(
        ServerProfile(
            role,
            tpot=tuple(_tpot(row, role) for row in rows if row["arm"] == arm and row["tpot_s"]),
            ttft=_ttft([row for row in rows if row["arm"] == arm]),
        )
        for role, arm in arms.items()
    )
    found = Calibration(servers, model=model, layout=Layout.SHARED)
    return json.dumps(found.to_json(), indent=1) + "\n"


def _tpot(row: Row, role: Role) -> TpotPoint:
    seconds = row["tpot_s"]
    switch = (row["switch"] or {}).get(role) or {}
    return TpotPoint(
        row["sequences"],
        seconds,
        seconds * (1 - SPREAD),
        seconds * (1 + SPREAD),
        max(row["duration_s"] / LEARN_WINDOW_S, 1.0),
        switch.get("mode"),
    )


def _ttft(rows: Sequence[Row]) -> tuple[TtftPoint, ...]:
    waves = sorted(tuple(row["first_wave"]) for row in rows if row["first_wave"])
    return tuple(
        TtftPoint(tokens, seconds, seconds * (1 - SPREAD), seconds * (1 + SPREAD))
        for tokens, seconds in waves
    )
