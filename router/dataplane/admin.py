"""What an operator may change while the router runs: drain a server, override the policy.

Whoever asks has shown the admin key already (door.py). What is changed here lasts as long as the
process, or less: it is no setting.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from router.core.override import Override, PolicyInForce
from router.core.policy import (
    POLICIES,
    THRESHOLD_MAX,
    WITH_THRESHOLD,
    missing_role,
    usable_policies,
)
from router.core.types import Policy
from router.dataplane import errors
from router.dataplane.parts import Parts
from router.dataplane.policies import policy_of
from router.settings import Settings

KEY = "/crossover/key"
DRAIN = "/crossover/drain"
POLICY = "/crossover/policy"

MINUTES_MAX = 24 * 60

_log = logging.getLogger("crossover")


class _Refused(Exception):  # noqa: N818
    """The request cannot be done. The text is for the user."""


def add_admin(app: FastAPI, parts: Parts) -> None:
    """Serve the endpoints that change something."""

    @app.post(KEY)
    async def key() -> Response:
        """Say that the key is the admin's: with another one nobody comes here."""
        return _json({"admin": True})

    @app.post(DRAIN)
    async def drain(request: Request) -> Response:
        """Send a server nothing new, or send it work again."""
        return await _answer(request, lambda asked: _drain(parts, asked))

    @app.post(POLICY)
    async def override(request: Request) -> Response:
        """Put another policy in force for some minutes, or take it back."""
        return await _answer(request, lambda asked: _override(parts, asked))

    @app.delete(POLICY)
    async def restore() -> Response:
        """Take the override back."""
        return _json(_restore(parts))


def override_state(policy: PolicyInForce, now: float) -> dict[str, Any] | None:
    """Return the override in force, for `/crossover/state`."""
    override = policy.override(now)
    if override is None:
        return None
    return {
        "policy": override.policy.name,
        "threshold": override.threshold,
        "remaining_s": round(override.until - now, 3),
    }


def usable_state(settings: Settings) -> list[dict[str, Any]]:
    """Return the policies that an override may put in force, for `/crossover/state`."""
    names = usable_policies({server.role for server in settings.servers})
    return [{"name": name, "has_threshold": name in WITH_THRESHOLD} for name in names]


async def _answer(request: Request, act: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Response:
    try:
        return _json(act(_object(await request.body())))
    except _Refused as refused:
        error = errors.invalid_value(str(refused))
        headers = {name.decode(): value.decode() for name, value in error.headers()}
        return Response(error.body(), error.status, headers)


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise _Refused("The body must be a JSON object.")
    return value


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _drain(parts: Parts, asked: Mapping[str, Any]) -> dict[str, Any]:
    _only(asked, ("server", "drain"))
    name, drain = asked.get("server"), asked.get("drain")
    if not isinstance(name, str) or name not in parts.health:
        raise _Refused(f"'server' must be one of {', '.join(parts.health)}.")
    if not isinstance(drain, bool):
        raise _Refused("'drain' must be true or false.")
    drained = parts.steering.drained
    if drain != (name in drained):
        (drained.add if drain else drained.discard)(name)
        _log.info("server %s is %s", name, "drained: it gets nothing new" if drain else "back")
    sequences = parts.ledger.load(name).sequences
    return {"server": name, "drained": drain, "sequences": sequences}


def _override(parts: Parts, asked: Mapping[str, Any]) -> dict[str, Any]:
    _only(asked, ("policy", "minutes", "threshold"))
    if asked.get("policy", "") is None:
        return _restore(parts)
    minutes = asked.get("minutes")
    if not isinstance(minutes, int | float) or isinstance(minutes, bool):
        raise _Refused(f"'minutes' must be a number above 0, at most {MINUTES_MAX}.")
    if not 0 < minutes <= MINUTES_MAX:
        raise _Refused(f"'minutes' must be above 0, at most {MINUTES_MAX}, not {minutes}.")
    policy, threshold = _policy(asked, parts)
    now = parts.clock()
    parts.policy.put(Override(policy, now + minutes * 60, threshold))
    at = "" if threshold is None else f" {threshold}"
    _log.info("policy %s%s is in force for %g minutes", policy.name, at, minutes)
    return {"override": override_state(parts.policy, now)}


def _policy(asked: Mapping[str, Any], parts: Parts) -> tuple[Policy, int | None]:
    """Return the policy that is asked for, and the threshold that it has if it has one."""
    settings = parts.in_force.settings
    name, threshold = asked.get("policy", settings.policy), asked.get("threshold")
    roles = {server.role for server in settings.servers}
    if name not in POLICIES or missing_role(name, roles) is not None:
        usable = ", ".join(usable_policies(roles))
        raise _Refused(f"'policy' must be one of {usable}, or null to take an override back.")
    if threshold is None:
        if "policy" not in asked:
            raise _Refused("'policy' or 'threshold' is missing.")
        threshold, threshold_down = settings.threshold, settings.threshold_down
    elif name not in WITH_THRESHOLD:
        raise _Refused(f"Policy {name} has no threshold; these have: {', '.join(WITH_THRESHOLD)}.")
    elif type(threshold) is not int or not 0 <= threshold <= THRESHOLD_MAX:
        raise _Refused(f"'threshold' must be an integer from 0 to {THRESHOLD_MAX}.")
    else:
        threshold_down = None
    asked_for = replace(settings, policy=name, threshold=threshold, threshold_down=threshold_down)
    return policy_of(asked_for, parts.learner), threshold if name in WITH_THRESHOLD else None


def _restore(parts: Parts) -> dict[str, Any]:
    if parts.policy.restore():
        _log.info("policy %s is in force again", parts.policy.name)
    return {"override": None}


def _only(asked: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in asked:
        if key not in known:
            raise _Refused(f"Only these keys are known: {', '.join(known)}.")
