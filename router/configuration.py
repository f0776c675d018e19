"""From flags, environment, file and defaults to `Settings`, or to everything that is wrong.

The only place that reads the settings file and the environment.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from router import server_list
from router.bounded_file import FileError, read_bytes
from router.core.admission import Limits, Room
from router.core.calibration import Calibration, CalibrationError
from router.core.policy import make_policy, missing_role, usable_policies
from router.core.types import Layout, Objective, Role, ServerSpec
from router.options import ENV_PREFIX, OPTIONS, Option
from router.problems import SettingsError, not_allowed, unknown
from router.security import Reading
from router.settings import Admission, Security, Settings, Timeouts
from router.yaml_file import YamlFile, read_file

CALIBRATION_BYTES_MAX = 4 * 2**20
DEFAULT_ORIGIN = "default"

_URL_KEYS: Mapping[Role, str] = {role: f"{role}_url" for role in Role}
_SERVER_SOURCES = (server_list.SERVERS, *_URL_KEYS.values())


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings, and by option its value and where that is from.

    `access` has, by server, what was given for that server alone of how it is reached.
    """

    settings: Settings
    values: Mapping[str, object]
    origins: Mapping[str, str]
    access: Mapping[str, Mapping[str, object]]


def resolve(flags: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> Resolved:
    """Resolve the settings: a flag wins over the environment, that over the file, over defaults.

    `flags` maps an option's name to the texts it was given. SettingsError lists every problem.
    """
    draft = _Draft()
    file = draft.take(flags, environ)
    servers = draft.take_servers(file)
    security = Reading(draft.values, draft.origins, environ, draft.problems).security(servers)
    calibration = draft.read_calibration()
    draft.check(servers)
    if draft.problems:
        # Once each: what all servers share is looked at for each of them.
        raise SettingsError(list(dict.fromkeys(draft.problems)))
    settings = _settings(draft.values, [placed.server for placed in servers], security, calibration)
    access = {placed.server.name: placed.access for placed in servers}
    return Resolved(settings, draft.values, draft.origins, access)


@dataclass(frozen=True, slots=True)
class LiveChange:
    """What reading the settings again leads to, and in words what has changed and what cannot."""

    resolved: Resolved
    changed: Sequence[str]
    kept: Sequence[str]


def changed_live(old: Resolved, new: Resolved) -> LiveChange:
    """Return `old` with what of `new` can change while requests run.

    SettingsError if that makes no sense together.
    """
    values, origins = dict(old.values), dict(old.origins)
    changed: list[str] = []
    kept = _kept_by_content(old.settings, new.settings)
    for option in OPTIONS:
        before, after = old.values[option.name], new.values[option.name]
        if option.live:
            values[option.name], origins[option.name] = after, new.origins[option.name]
            if before != after:
                where = new.origins[option.name]
                changed.append(f"{option.name} {_told(before)} -> {_told(after)} ({where})")
        elif before != after:
            kept.append(f"{_named(option, new.origins[option.name])} {_NEEDS_RESTART}")
    settings = old.settings
    problems = _role_problems(values, origins, {server.role for server in settings.servers})
    if problems:
        raise SettingsError([f"{problem} (servers {_NEEDS_RESTART})" for problem in problems])
    made = _settings(values, settings.servers, settings.security, settings.calibration)
    return LiveChange(replace(old, settings=made, values=values, origins=origins), changed, kept)


_NEEDS_RESTART = "cannot change without a restart, and stays as it was"


def _kept_by_content(old: Settings, new: Settings) -> list[str]:
    """Name what is no option of its own, or the content of a file."""
    parts = {
        "servers": old.servers != new.servers,
        "keys, certificates and origins": old.security != new.security,
        "what the calibration file says": old.calibration != new.calibration,
    }
    return [f"{part} {_NEEDS_RESTART}" for part, differs in parts.items() if differs]


def _named(option: Option, origin: str) -> str:
    """Return an option with where it is from; a place in a file ends with the name already."""
    return origin if origin.endswith(f" {option.name}") else f"{origin}: {option.name}"


def _told(value: object) -> str:
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _role_problems(
    values: Mapping[str, Any], origins: Mapping[str, str], roles: set[Role]
) -> list[str]:
    policy = values["policy"]
    missing = missing_role(policy, roles)
    if missing is None:
        return []
    usable = ", ".join(usable_policies(roles))
    what = f"{policy!r} needs a {missing} server and there is none, expected one of {usable}"
    return [f"{origins['policy']} policy: {what}"]


def _settings(
    values: Mapping[str, Any],
    servers: Sequence[ServerSpec],
    security: Security,
    calibration: Calibration | None,
) -> Settings:
    return Settings(
        servers=tuple(servers),
        layout=Layout(values["layout"]),
        policy=values["policy"],
        objective=Objective(values["objective"]),
        calibration=calibration,
        calibration_source=values["calibration"] or "",
        state_file=Path(values["state_file"]) if values["state_file"] else None,
        threshold=values["threshold"],
        threshold_down=values["threshold_down"],
        dwell_s=values["dwell_s"],
        host=values["host"],
        port=values["port"],
        timeouts=Timeouts(
            connect_s=values["connect_timeout_s"],
            first_byte_s=values["first_byte_timeout_s"],
            idle_s=values["idle_timeout_s"],
        ),
        body_limit_bytes=values["body_limit_mb"] * 2**20,
        admission=_admission(values, servers),
        keepalive_s=values["keepalive_s"],
        drain_timeout_s=values["drain_timeout_s"],
        allow_target=values["allow_target"],
        probe_interval_s=values["probe_interval_s"],
        log_format=values["log_format"],
        log_level=values["log_level"],
        security=security,
    )


def _admission(values: Mapping[str, Any], servers: Sequence[ServerSpec]) -> Admission:
    sequences, tokens = values["server_sequences_max"], values["server_prefill_tokens_max"]
    limits = Limits(
        total=Room(values["sequences_max"], values["prefill_tokens_max"]),
        each=Room(sequences, tokens),
        of={
            server.name: Room(
                server.sequences_max or sequences, server.prefill_tokens_max or tokens
            )
            for server in servers
            if server.sequences_max or server.prefill_tokens_max
        },
    )
    return Admission(
        limits,
        queue_max=values["queue_max"],
        queue_timeout_s=values["queue_timeout_s"],
        retry_share=values["retry_share"],
        breaker_failures=values["breaker_failures"],
        slow_start_s=values["slow_start_s"],
    )


class _Draft:
    """The values so far, where each is from, and what is wrong."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        # The kinds of the table check every type.
        self.values: dict[str, Any] = {option.name: option.default for option in OPTIONS}
        self.origins: dict[str, str] = dict.fromkeys(self.values, DEFAULT_ORIGIN)
        self._bad: set[str] = set()

    def take(
        self, flags: Mapping[str, Sequence[str]], environ: Mapping[str, str]
    ) -> YamlFile | None:
        """Read all sources, the weakest first. Return the file if one is named and readable."""
        by_env = {option.env: option for option in OPTIONS}
        by_name = {option.name: option for option in OPTIONS}
        paths = flags.get("config") or [environ.get(by_name["config"].env, "")]
        file = self._take_file(paths[-1]) if paths[-1] else None
        for name, text in environ.items():
            if name in by_env and text:
                self._take_texts(by_env[name], (text,), f"environment {name}")
            elif name.startswith(ENV_PREFIX) and name not in by_env:
                self.problems.append(unknown(f"environment {name}", name, by_env))
        for name, texts in flags.items():
            self._take_texts(by_name[name], texts, f"flag {by_name[name].flag}")
        return file

    def _take_file(self, path: str) -> YamlFile | None:
        try:
            file = read_file(path)
        except FileError as error:
            self.problems.append(str(error))
            self._bad.add(server_list.SERVERS)
            return None
        by_key = {option.name: option for option in OPTIONS if option.in_file}
        for key, value in file.values.items():
            option, where = by_key.get(key), file.where(key)
            if option is not None:
                try:
                    self._set(option, option.kind.from_yaml(value), where)
                except ValueError:
                    self._refuse(option, value, where)
            elif key != server_list.SERVERS:
                self.problems.append(unknown(where, key, (*by_key, server_list.SERVERS)))
        return file

    def _take_texts(self, option: Option, texts: Sequence[str], where: str) -> None:
        values: list[Any] = []
        for text in texts:
            try:
                values.append(option.kind.from_text(text))
            except ValueError:
                self._refuse(option, text, where)
                return
        if option.repeated:
            self._set(option, tuple(chain.from_iterable(values)), where)
        elif len(values) > 1:
            self.problems.append(f"{where}: given {len(values)} times, expected once")
        else:
            self._set(option, values[0], where)

    def _set(self, option: Option, value: object, where: str) -> None:
        self.values[option.name] = value
        self.origins[option.name] = where

    def _refuse(self, option: Option, value: object, where: str) -> None:
        self._bad.add(option.name)
        self.problems.append(not_allowed(where, value, option.kind.allowed))

    def take_servers(self, file: YamlFile | None) -> list[server_list.Placed]:
        """Take the servers from the file's list, or from the URLs by role."""
        given = [key for key in _URL_KEYS.values() if self.values[key]]
        if file is not None and server_list.SERVERS in file.values:
            where = file.where(server_list.SERVERS)
            self.problems.extend(
                f"{self.origins[key]}: {where} lists the servers, expected only one of the two"
                for key in given
            )
            before = len(self.problems)
            servers = server_list.listed(file, self.problems)
            if len(self.problems) > before:
                self._bad.add(server_list.SERVERS)
            return servers
        if not given and not self._bad.intersection(_SERVER_SOURCES):
            self.problems.append(
                "no servers, expected --spec-url URL and --base-url URL, or a list"
                f" '{server_list.SERVERS}' in the file given by --config"
            )
        return server_list.by_role(
            {role: self.values[key] for role, key in _URL_KEYS.items()},
            {role: self.origins[key] for role, key in _URL_KEYS.items()},
        )

    def read_calibration(self) -> Calibration | None:
        """Read the calibration file; a problem with it names the key in it, and what is allowed."""
        path, where = self.values["calibration"], self.origins["calibration"]
        if path is None:
            return None
        try:
            data = read_bytes(path, CALIBRATION_BYTES_MAX)
            return Calibration.from_json(json.loads(data), path)
        except (FileError, CalibrationError) as error:
            self.problems.append(f"{where}: {error}")
        except (ValueError, RecursionError) as error:
            self.problems.append(f"{where}: {path}: not JSON: {error}")
        return None

    def check(self, servers: Sequence[server_list.Placed]) -> None:
        """Find what is impossible together, among values that are good by themselves."""
        self._check_state_file()
        if "layout" not in self._bad:
            server_list.check(servers, Layout(self.values["layout"]), self.problems)
        self._check_roles({placed.server.role for placed in servers})
        self._check_thresholds()

    def _check_state_file(self) -> None:
        path = self.values["state_file"]
        if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
            self.problems.append(
                f"{self.origins['state_file']}: {path}: expected a file in a directory that exists"
            )

    def _check_roles(self, roles: set[Role]) -> None:
        # While the servers themselves are in doubt, what they lack says nothing.
        if roles and not self._bad.intersection(("policy", *_SERVER_SOURCES)):
            self.problems.extend(_role_problems(self.values, self.origins, roles))

    def _check_thresholds(self) -> None:
        if self._bad.intersection(("threshold", "threshold_down", "policy")):
            return
        try:
            make_policy(
                self.values["policy"],
                threshold=self.values["threshold"],
                threshold_down=self.values["threshold_down"],
                dwell_s=self.values["dwell_s"],
            )
        except ValueError as error:
            self.problems.append(f"{self.origins['threshold_down']}: {error}")
