"""The router's own endpoints: whether it lives, whether it is ready, what it knows and decides."""

from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from router.core.admission import Priority
from router.core.health import ServerHealth
from router.core.steering import DecisionRecord
from router.core.types import ServerLoad
from router.dataplane.admin import DRAIN, KEY, POLICY, add_admin, override_state, usable_state
from router.dataplane.page import PAGE_PATHS, Kept, add_page
from router.dataplane.parts import Parts
from router.dataplane.probe import Prober

HEALTHZ = "/healthz"
READYZ = "/readyz"
METRICS = "/metrics"
STATE = "/crossover/state"
MODEL = "/crossover/model"
DECISIONS = "/crossover/decisions"
# Whoever asks for these says no key: load balancers and orchestrators.
TO_ALL = frozenset({HEALTHZ, READYZ})
PATHS = (
    frozenset({HEALTHZ, READYZ, METRICS, STATE, MODEL, DECISIONS, KEY, DRAIN, POLICY}) | PAGE_PATHS
)

# Load balancers ask for their checks with either.
_READ = ["GET", "HEAD"]


def create_control(parts: Parts) -> FastAPI:
    """Build the application of the router's own endpoints."""
    app = FastAPI(
        title="Crossover", version=parts.version, docs_url=None, redoc_url=None, openapi_url=None
    )

    @app.api_route(HEALTHZ, methods=_READ)
    async def healthz() -> dict[str, str]:
        """Live: this process answers. Says nothing about the servers."""
        return {"status": "live"}

    @app.api_route(READYZ, methods=_READ)
    async def readyz() -> JSONResponse:
        """Ready: work is taken, and at least one server may be sent some."""
        if not parts.lifecycle.serving:
            body = {"status": "not ready", "reason": "shutting down"}
            return JSONResponse(body, status_code=503)
        drained = parts.steering.drained
        if any(health.up and name not in drained for name, health in parts.health.items()):
            return JSONResponse({"status": "ready"})
        servers = {
            name: "drained" if name in drained else health.last_error or "no answer yet"
            for name, health in parts.health.items()
        }
        reason = "no server is up"
        if any(health.up for health in parts.health.values()):
            reason = "every server that is up is drained"
        return JSONResponse(
            {"status": "not ready", "reason": reason, "servers": servers}, status_code=503
        )

    @app.get(METRICS)
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(generate_latest(parts.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    kept_state = Kept(lambda: _state(parts), parts.clock)
    kept_model = Kept(parts.learner.snapshot, parts.clock)
    kept_decisions = Kept(lambda: _decisions(parts), parts.clock)

    @app.get(STATE)
    async def state(request: Request) -> Response:
        """Servers, loads and policy as they are now."""
        return kept_state.answer(request)

    @app.get(MODEL)
    async def model(request: Request) -> Response:
        """Return what is learnt: a curve for each server, with bands, and where they cross."""
        return kept_model.answer(request)

    @app.get(DECISIONS)
    async def decisions(request: Request) -> Response:
        """Return the latest decisions, newest first, with the loads that each was made on."""
        return kept_decisions.answer(request)

    add_admin(app, parts)
    add_page(app)
    return app


def _decisions(parts: Parts) -> dict[str, Any]:
    now = parts.clock()
    return {
        "decisions": [
            {
                "age_s": round(now - made.at, 3),
                "server": made.decision.server,
                "reason": made.decision.reason,
                "mode": _mode(parts, made),
                "loads": {load.name: _load(load) for load in made.loads},
            }
            for made in reversed(parts.steering.recent)
        ]
    }


def _state(parts: Parts) -> dict[str, Any]:
    settings, policy, now = parts.in_force.settings, parts.policy, parts.clock()
    override = override_state(policy, now)
    return {
        "version": parts.version,
        "at_s": round(now, 3),
        "stage": parts.lifecycle.stage,
        "settings_latest": parts.in_force.latest,
        "has_admin_key": settings.security.admin_key is not None,
        "layout": settings.layout,
        "policy": {
            "name": policy.name,
            "objective": settings.objective,
            "mode": policy.mode,
            "switches": policy.switches,
            "threshold": settings.threshold,
            "threshold_down": settings.threshold_down,
            "dwell_s": settings.dwell_s,
            "configured": policy.configured.name,
            "override": override,
            "usable": usable_state(settings),
        },
        "servers": [
            {
                "name": server.name,
                "role": server.role,
                "url": server.url,
                "gpus": server.gpus,
                "load": _load(parts.ledger.load(server.name)),
                "totals": _totals(parts, server.name),
                **_health(parts.health[server.name], now),
                "drained": server.name in parts.steering.drained,
                "facts": _facts(parts.prober, server.name),
                "engine": _engine(parts, server.name, now),
            }
            for server in settings.servers
        ],
        "queue": {each.value: parts.gate.line.depth(each) for each in Priority},
        "parity_warnings": parts.prober.parity_warnings,
        "layout_warning": parts.learning.layout_warning,
        "oldest_request_s": parts.ledger.oldest_age_s(now),
    }


def _load(load: ServerLoad) -> dict[str, int]:
    return {
        "sequences": load.sequences,
        "prefill_sequences": load.prefill_sequences,
        "decode_sequences": load.decode_sequences,
        "prefill_tokens": load.prefill_tokens,
    }


def _totals(parts: Parts, name: str) -> dict[str, float]:
    """Return counts since the start: whoever asks twice has rates and a mean time between."""
    count, ttft_s = parts.metrics.first_tokens(name)
    tokens = parts.learning.output_tokens(name)
    return {"output_tokens": tokens, "first_tokens": count, "first_token_s": ttft_s}


def _health(health: ServerHealth, now: float) -> dict[str, Any]:
    token_at = health.last_token_at
    return {
        "state": health.state,
        "up": health.up,
        "breaker": health.breaker.state,
        "state_age_s": None if health.since is None else round(now - health.since, 3),
        "last_token_age_s": None if token_at is None else round(now - token_at, 3),
        "last_error": health.last_error,
        "context_length": health.context_length,
    }


def _facts(prober: Prober, name: str) -> dict[str, Any] | None:
    facts = prober.facts(name)
    return None if facts is None else asdict(facts)


def _mode(parts: Parts, made: DecisionRecord) -> str | None:
    """Return whether the chosen server, if it switches by itself, speculates with one more."""
    threshold = parts.learner.servers[made.decision.server].threshold
    if threshold is None:
        return None
    (load,) = (load for load in made.loads if load.name == made.decision.server)
    return "on" if load.sequences < threshold else "off"


def _engine(parts: Parts, name: str, now: float) -> dict[str, Any] | None:
    """Return what the engine says of itself, None if it has said nothing of late."""
    told = parts.poller.told(name)
    if told is None:
        return None
    switch = told.report.switch
    return {
        "age_s": round(now - told.at, 3),
        "running": told.report.running,
        "queued": told.report.queued,
        "token_usage": told.token_usage,
        "switch": None if switch is None else asdict(switch),
    }
