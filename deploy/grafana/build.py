"""Write the dashboards of `dashboards/` from the tables below; `--check` only compares."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders.common import VizLegendOptions, VizTooltipOptions
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef

FOLDER = Path(__file__).with_name("dashboards")
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH, HEIGHT = 8, 8
SERVER = 'server=~"$server"'


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and how its series are called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Graph:
    """Curves over time. `unit` is Grafana's name of it."""

    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]
    at_least_zero: bool = True


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, large."""

    title: str
    about: str
    unit: str
    query: Query


@dataclass(frozen=True, slots=True)
class Page:
    """A dashboard: rows of panels."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Graph | Figure, ...]], ...]


def _quantiles(
    metric: str, title: str, about: str, by: str = "server", matching: str = SERVER
) -> Graph:
    return Graph(
        title,
        about,
        "s",
        tuple(
            Query(
                f"histogram_quantile({q}, sum by (le, {by}) "
                f"(rate({metric}_bucket{{{matching}}}[$__rate_interval])))",
                f"{{{{{by}}}}} p{int(100 * q)}",
            )
            for q in (0.5, 0.99)
        ),
    )


def _engine(name: str) -> str:
    """Name a metric of SGLang as it exports it, or as some pipelines rename it."""
    return f'{{__name__=~"sglang[:_]{name}", {SERVER}}}'


OVERVIEW = Page(
    "crossover-overview",
    "Crossover / overview",
    (
        (
            "Now",
            (
                Figure(
                    "Servers that take requests",
                    "Up, and not drained.",
                    "none",
                    Query("sum(router_server_up * (1 - router_server_drained))", ""),
                ),
                Figure(
                    "Sequences in flight",
                    "By the router's own count.",
                    "none",
                    Query("sum(router_inflight_sequences)", ""),
                ),
                Figure(
                    "Output tokens per second",
                    "Of requests that ended.",
                    "none",
                    Query('sum(rate(router_tokens_total{token_type="output"}[1m]))', ""),
                ),
                Figure(
                    "Waiting in the router",
                    "Requests that found room on no server.",
                    "none",
                    Query("sum(router_queue_depth)", ""),
                ),
                Figure(
                    "Breakers not closed",
                    "Servers that failed several times in a row, and are left alone.",
                    "none",
                    Query("sum(router_breaker_state > bool 0)", ""),
                ),
                Figure(
                    "Override of the policy, time left",
                    "0: the configured policy is in force.",
                    "s",
                    Query("router_policy_override_seconds", ""),
                ),
            ),
        ),
        (
            "Traffic",
            (
                Graph(
                    "Sequences in flight",
                    "By server and phase.",
                    "none",
                    (Query(f"router_inflight_sequences{{{SERVER}}}", "{{server}} {{phase}}"),),
                ),
                Graph(
                    "Output tokens per second",
                    "Of requests that ended, by server.",
                    "none",
                    (Query(f"crossover:output_tokens:rate1m{{{SERVER}}}", "{{server}}"),),
                ),
                Graph(
                    "Requests per second",
                    "By how they ended.",
                    "reqps",
                    (
                        Query(
                            "sum by (outcome) (rate(router_requests_total[$__rate_interval]))",
                            "{{outcome}}",
                        ),
                    ),
                ),
            ),
        ),
        (
            "Queue",
            (
                Graph(
                    "Waiting in the router for room",
                    "By class. The engines' own queues are on the other dashboard.",
                    "none",
                    (Query("router_queue_depth", "{{priority}}"),),
                ),
                _quantiles(
                    "router_queue_wait_seconds",
                    "Wait for room",
                    "Of those that had to wait, however that ended.",
                    by="priority",
                    matching="",
                ),
                Graph(
                    "Refused for want of room, per second",
                    "full: the queue was; shed: for an interactive one; timeout: waited for too "
                    "long. All get a 429.",
                    "reqps",
                    (
                        Query(
                            "sum by (priority, result) (rate(router_queue_requests_total"
                            '{result=~"full|shed|timeout"}[$__rate_interval]))',
                            "{{priority}} {{result}}",
                        ),
                    ),
                ),
            ),
        ),
        (
            "Latency",
            (
                _quantiles("router_ttft_seconds", "Time to first token", "Streams only."),
                _quantiles(
                    "router_inter_token_latency_seconds",
                    "Time between chunks",
                    "A chunk has the tokens of one engine step: several under speculation.",
                ),
                _quantiles(
                    "router_request_duration_seconds", "Request duration", "Arrival to end."
                ),
            ),
        ),
        (
            "Steering",
            (
                Graph(
                    "Decisions per second",
                    "Why a server was chosen.",
                    "reqps",
                    (
                        Query(
                            "sum by (reason) (rate(router_decisions_total[$__rate_interval]))",
                            "{{reason}}",
                        ),
                    ),
                ),
                Graph(
                    "Crossing, and where the load is",
                    "The fewest sequences at which a base server alone is believed faster, and "
                    "the sequences in flight now.",
                    "none",
                    (
                        Query("router_crossover_concurrency", "crossing"),
                        Query("sum(router_inflight_sequences)", "in flight"),
                    ),
                ),
                Graph(
                    "Believed speed at the present load",
                    "Tokens per second, with bounds.",
                    "none",
                    (
                        Query(
                            f"router_model_throughput_tokens_per_second{{{SERVER}}}",
                            "{{server}} {{bound}}",
                        ),
                    ),
                ),
                Graph(
                    "Regret over 15 minutes",
                    "Share of an oracle's tokens that was missed. o1: the better role alone; o2: "
                    "the best fixed rule; o3: the best split.",
                    "percentunit",
                    (Query("crossover:regret:ratio15m", "{{oracle}}"),),
                    at_least_zero=False,
                ),
                Graph(
                    "Changes of mode",
                    "In 10 minutes, by policies that have a mode.",
                    "none",
                    (Query("increase(router_policy_switches_total[10m])", "changes"),),
                ),
                Graph(
                    "Slowdown while the other server works",
                    "1 on GPUs of their own.",
                    "none",
                    (Query("router_interference_ratio", "{{bound}}"),),
                ),
            ),
        ),
    ),
)

ENGINES = Page(
    "crossover-engines",
    "Crossover / engines",
    (
        (
            "Load",
            (
                Graph(
                    "Running requests",
                    "As the engine says.",
                    "none",
                    (Query(_engine("num_running_reqs"), "{{server}}"),),
                ),
                Graph(
                    "Queued requests",
                    "Waiting in the engine.",
                    "none",
                    (Query(_engine("num_queue_reqs"), "{{server}}"),),
                ),
                Graph(
                    "KV cache in use",
                    "Share of its tokens.",
                    "percentunit",
                    (Query(_engine("token_usage"), "{{server}}"),),
                ),
            ),
        ),
        (
            "Speed",
            (
                Graph(
                    "Generated tokens per second",
                    "As the engine says.",
                    "none",
                    (Query(_engine("gen_throughput"), "{{server}}"),),
                ),
                Graph(
                    "What the router sees in the engines",
                    "Sequences, other clients' too.",
                    "none",
                    (Query(f"router_engine_sequences{{{SERVER}}}", "{{server}} {{state}}"),),
                ),
                Graph(
                    "Accept length",
                    "Tokens per decode step and request.",
                    "none",
                    (Query(_engine("spec_accept_length"), "{{server}}"),),
                ),
                Graph(
                    "Steps that did not speculate",
                    "Share, of servers with the plugin.",
                    "percentunit",
                    (Query(f"router_engine_off_share_ratio{{{SERVER}}}", "{{server}}"),),
                ),
            ),
        ),
    ),
)

ROUTER = Page(
    "crossover-router",
    "Crossover / router",
    (
        (
            "Process",
            (
                Graph("CPU", "Cores in use; one is all that it can use.", "none",
                      (Query('rate(process_cpu_seconds_total{job="crossover"}[$__rate_interval])',
                             "cores"),)),
                Graph("Resident memory", "", "bytes",
                      (Query('process_resident_memory_bytes{job="crossover"}', "resident"),)),
                Graph("Event loop lag", "Above 50 ms the process is starved.", "s",
                      (Query("histogram_quantile(0.99, sum by (le) "
                             "(rate(router_event_loop_lag_seconds_bucket[$__rate_interval])))",
                             "p99"),)),
            ),
        ),
        (
            "Relay",
            (
                Graph("Responses per second", "By the status that the client was sent.", "reqps",
                      (Query("sum by (code) (rate(router_responses_total[$__rate_interval]))",
                             "{{code}}"),)),
                Graph("Time to decide", "", "s",
                      (Query("histogram_quantile(0.99, sum by (le) "
                             "(rate(router_overhead_seconds_bucket[$__rate_interval])))", "p99"),)),
                Graph("Sent to a second server, per second",
                      "After a refusal; denied: the budget did not let them.", "reqps",
                      (Query("sum(rate(router_retries_total[$__rate_interval])) or vector(0)",
                             "sent again"),
                       Query("rate(router_retries_denied_total[$__rate_interval])", "denied"))),
                Graph("Waits for room, per second", "By how they ended.", "reqps",
                      (Query("sum by (result) "
                             "(rate(router_queue_requests_total[$__rate_interval]))",
                             "{{result}}"),)),
                Graph("Oldest request in flight", "Growing without traffic it means a leak.", "s",
                      (Query("router_lease_age_max_seconds", "age"),)),
            ),
        ),
        (
            "Servers",
            (
                Graph("Up", "1 if the server may be sent work.", "none",
                      (Query(f"router_server_up{{{SERVER}}}", "{{server}}"),)),
                Graph("Breaker", "0 closed, 1 open: left alone, 2 half open: one request tries it.",
                      "none", (Query(f"router_breaker_state{{{SERVER}}}", "{{server}}"),)),
                Graph("Drained", "1 if an operator has drained it: it gets nothing new.", "none",
                      (Query(f"router_server_drained{{{SERVER}}}", "{{server}}"),)),
                Graph("Age of what the engine said", "", "s",
                      (Query(f"router_signal_age_seconds{{{SERVER}}}", "{{server}}"),)),
                Graph("Prompt tokens waiting", "Of requests without a first token yet.", "none",
                      (Query(f"router_prefill_tokens{{{SERVER}}}", "{{server}}"),)),
            ),
        ),
        (
            "Operation",
            (
                Graph("Settings read last are in force", "0: they are wrong, the log says how.",
                      "none", (Query("router_config_last_reload_successful", "in force"),)),
                Graph("Since settings were put in force", "At the start, or by SIGHUP.", "s",
                      (Query("time() - router_config_last_reload_success_timestamp_seconds",
                             "age"),)),
                Graph("Override of the policy, time left", "0 without one.", "s",
                      (Query("router_policy_override_seconds", "left"),)),
            ),
        ),
    ),
)  # fmt: skip

PAGES: Sequence[Page] = (OVERVIEW, ENGINES, ROUTER)


def dashboard(page: Page) -> str:
    """Return a page as Grafana's JSON."""
    builder = (
        Dashboard(page.title)
        .uid(page.uid)
        .tags(["crossover"])
        .refresh("5s")
        .time("now-15m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            QueryVariable("server")
            .label("Server")
            .datasource(SOURCE)
            .query("label_values(router_server_up, server)")
            .multi(True)
            .include_all(True)
            .all_value(".+")
        )
    )
    for title, panels in page.rows:
        builder = builder.with_row(Row(title))
        for panel in panels:
            builder = builder.with_panel(
                _graph(panel) if isinstance(panel, Graph) else _figure(panel)
            )
    return JSONEncoder(sort_keys=True, indent=2).encode(builder.build()) + "\n"


def _graph(graph: Graph) -> TimeSeries:
    panel = (
        TimeSeries()
        .title(graph.title)
        .description(graph.about)
        .datasource(SOURCE)
        .unit(graph.unit)
        .span(WIDTH)
        .height(HEIGHT)
        .line_width(2)
        .fill_opacity(8)
        .legend(
            VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if graph.at_least_zero:
        panel = panel.min(0)
    for place, query in enumerate(graph.queries):
        panel = panel.with_target(_target(query, chr(ord("A") + place)))
    return panel


def _figure(figure: Figure) -> Stat:
    return (
        Stat()
        .title(figure.title)
        .description(figure.about)
        .datasource(SOURCE)
        .unit(figure.unit)
        .span(WIDTH)
        .height(HEIGHT // 2)
        .with_target(_target(figure.query, "A"))
    )


def _target(query: Query, ref: str) -> Dataquery:
    return Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref)


def main(arguments: Sequence[str]) -> int:
    """Write the files, or compare them; exit 1 where one is not current."""
    stale = []
    for page in PAGES:
        path = FOLDER / f"{page.uid.removeprefix('crossover-')}.json"
        text = dashboard(page)
        if path.exists() and path.read_text() == text:
            continue
        if "--check" in arguments:
            stale.append(path.name)
        else:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text)
    if stale:
        print(f"not current: {', '.join(stale)}; run python {sys.argv[0]}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
