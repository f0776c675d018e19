from pathlib import Path
from typing import Any

import pytest

from loadtest.plots import draw_demo

LINE = {
    "at_s": [0.5, 1.5, 2.5],
    "tok_s": [10.0, 20.0, 10.0],
    "in_flight": {"base": [0.0, 3.0, 0.0], "spec": [1.0, 2.0, 1.0]},
    "wanted": [1, 5, 1],
}
NAMES = ("spec-only", "base-only", "least-inflight", "routed")


def found(line: dict[str, Any]) -> dict[str, Any]:
    return {
        "scenario": {"title": "T", "layout": "disjoint", "interpolated": True, "clock": 8.0},
        "runs": {name: {"tok_s": 13.3, "timeline": line} for name in NAMES},
        "rivals": {"two base": 20.0},
    }


@pytest.mark.parametrize(
    "line", [LINE, LINE | {"in_flight": {}}], ids=["served", "nothing answered"]
)
def test_the_figure_is_drawn_without_a_display(
    line: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    png, svg = draw_demo(found(line), tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    assert text.startswith("<?xml")
    assert "</svg>" in text
