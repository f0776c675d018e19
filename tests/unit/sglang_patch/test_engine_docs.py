from pathlib import Path

from sglang_patch.adapters.exporter import COUNTERS, GAUGES
from sglang_patch.config import SETTINGS, Config
from sglang_patch.hooks import TABLE, Kind
from sglang_patch.switch import Switch

TEXT = (Path(__file__).parents[3] / "docs" / "engine.md").read_text()


def table(heading: str) -> list[str]:
    rows = TEXT[TEXT.index(heading) :].split("|---|---|---|\n", 1)[1]
    return rows.split("\n\n", 1)[0].splitlines()


def test_every_setting_is_documented_as_it_is() -> None:
    assert table("## Settings") == [
        f"| {f'`{s.flag}`' if s.flag else '-'} | `{s.variable}` | {s.help} |" for s in SETTINGS
    ]


def test_every_hook_is_documented_with_its_process_and_reason() -> None:
    assert [row for row in table("## Hooks") if row.startswith("|")] == [
        f"| `{hook.path.removeprefix('sglang.srt.')}` | {hook.role} | {hook.why} |"
        for hook in TABLE
        if hook.kind is Kind.HOOK
    ]


def test_every_figure_of_the_load_metrics_is_documented() -> None:
    switch = Switch(Config(8, 6), clock=lambda: 0.0)
    listed = TEXT[TEXT.index("`policy, state") :].split("`", 2)[1].replace("\n", " ").split(", ")
    assert set(switch.snapshot()) == set(listed)


def test_every_metric_is_documented_with_its_labels() -> None:
    metrics = TEXT[TEXT.index("| metric | type |") :]
    rows = metrics.split("|---|---|---|---|\n", 1)[1].split("\n\n", 1)[0].splitlines()
    names = [row.split("|")[1].strip(" `").removeprefix("sglang:spec_switch_") for row in rows]
    assert sorted(names) == sorted(
        [name for name, _, _ in GAUGES] + [f"{name}_total" for name, _, _ in COUNTERS]
    )
