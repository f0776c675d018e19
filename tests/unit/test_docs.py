"""The documents name what there is, and nothing else."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from router.core.admission import Waited
from router.core.calibration import Calibration
from router.core.health import ServerHealth
from router.core.learner import Learner
from router.core.ledger import Ledger
from router.core.override import PolicyInForce
from router.core.policy import make_policy
from router.core.types import EngineReport, Outcome, Reason, Role, ServerSpec, SwitchReport
from router.dataplane.admission_metrics import AdmissionSources
from router.dataplane.engine_loads import Told
from router.dataplane.metrics import Metrics, Sources
from router.dataplane.operations_metrics import OperationsSources
from router.dataplane.record import Refusal, RequestRecord
from router.dataplane.reload import InForce
from router.dataplane.steering_metrics import SteeringSources
from router.options import OPTIONS
from router.server_list import SERVER_KEYS
from router.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"


def rows(document: str, heading: str) -> dict[str, list[str]]:
    """Return the rows of the first table after a heading, by the word in their first cell."""
    text = (DOCS / document).read_text().split(f"{heading}\n", 1)[1]
    table = text[text.index("\n|") :].split("\n\n")[0].strip().splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {row[0].strip("`"): row[1:] for row in cells}


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_setting_is_documented_as_it_is() -> None:
    expected = [
        f"| {f'`{option.name}`' if option.in_file else '-'} |"
        f" {f'`{option.flag}`' if option.in_flags else '-'} | `{option.env}` |"
        f" {option.shown_default} | {option.kind.allowed} | {option.help} |"
        for option in OPTIONS
    ]
    text = (DOCS / "settings.md").read_text()
    table = text[text.index("| key | flag |") :].split("\n\n")[0].splitlines()[2:]
    assert table == expected


def test_every_setting_that_can_change_while_it_runs_is_documented() -> None:
    text = (DOCS / "settings.md").read_text().split("## Change them while it runs\n", 1)[1]
    listed = text.split("What can:\n\n", 1)[1].split("\n\n", 1)[0]
    assert words(listed) == [option.name for option in OPTIONS if option.live]


def test_every_key_of_a_server_is_documented() -> None:
    assert tuple(rows("settings.md", "## Servers")) == tuple(SERVER_KEYS)


def test_every_metric_is_documented_with_its_type_and_labels() -> None:
    server = ServerSpec("s", Role.SPEC, "http://h:1")
    health = {"s": ServerHealth(context_length=1)}
    ledger = Ledger([server])
    known = [{"role": role, "tpot": [{"sequences": 4, "s": 0.01}]} for role in Role]
    calibration = Calibration.from_json({"schema": 1, "servers": known}, "test")
    learner = Learner([server, ServerSpec("b", Role.BASE, "http://h:2")], calibration=calibration)
    learner.regret.add(1.0, 1.0, 10.0, lambda _: 20.0, lambda _: 20.0)
    switch = SwitchReport("active", "on", off_share=0.5)
    report = Told(EngineReport(running=1, queued=1, switch=switch), 0.5, 0.0)
    sources = Sources(
        servers=[server],
        ledger=ledger,
        health=health,
        policy=make_policy("threshold"),
        steering=SteeringSources(learner, ledger, lambda _: report, lambda: False),
        admission=AdmissionSources(lambda _: 1, lambda: 1),
        parity_warnings=list,
        clock=lambda: 0.0,
        version="0",
        aborts=lambda: {"sent": 0},
        log_lines_dropped=lambda: 0,
        operations=OperationsSources(
            InForce(Settings((server,))), PolicyInForce(make_policy("threshold")), ()
        ),
    )
    metrics = Metrics(sources)
    metrics.finished(
        RequestRecord(
            "r", "e", streaming=True, server="s", role=Role.SPEC, reason=Reason.FIXED, attempts=2,
            ttft_s=0.1, retry=Refusal.OVERLOAD, waited=Waited.SERVED, queue_s=0.1,
        )
    )  # fmt: skip
    metrics.gap_observer("s")(0.1)
    metrics.lag.observe((), 0.1)
    found = {}
    for family in metrics.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = [label for label in family.samples[0].labels if label != "le"]
        found[name] = [family.type, sorted(labels)]
    told = rows("metrics.md", "# Metrics")
    assert {name: [cells[0], sorted(words(cells[1]))] for name, cells in told.items()} == found


@pytest.mark.parametrize(
    ("heading", "enum"),
    [("## Reasons", Reason), ("## Outcomes", Outcome), ("## Waits", Waited)],
)
def test_every_word_of_a_closed_set_is_documented(
    heading: str, enum: type[Reason] | type[Outcome] | type[Waited]
) -> None:
    assert list(rows("metrics.md", heading)) == [member.value for member in enum]


def test_every_field_of_the_request_log_is_documented() -> None:
    text = (DOCS / "metrics.md").read_text().split("## The request log\n", 1)[1]
    assert words(text) == [field.name for field in fields(RequestRecord)]
