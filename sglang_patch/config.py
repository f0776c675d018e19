"""What the operator asked for: flags, exported to the environment, which is what reaches the
scheduler processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_patch.rule import Mode, Rule, ScheduledRule, ThresholdRule

PREFIX = "SGLANG_SPEC_SWITCH_"
DEFAULT_DWELL_STEPS = 16
DEFAULT_ENABLE_SHARE = 0.8
DEFAULT_SYNC_WINDOW = 16
SYNC_WINDOW_MAX = 128
EACH_STEP, DEFERRED = "each-step", "deferred"
THRESHOLD, GOODPUT = "threshold", "goodput"


class ConfigError(ValueError):
    """A setting that cannot be used. The text names it, says why, and how to go on."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its flag (None for a diagnostic), its name in the environment, and its help."""

    name: str
    flag: str | None
    help: str
    switch: bool = False
    metavar: str = "N"

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.name

    @property
    def spelled(self) -> str:
        """How messages call it."""
        return self.flag or self.variable


POLICY = Setting(
    "POLICY",
    "--speculative-switch-policy",
    f"{THRESHOLD}: by running requests. {GOODPUT}: speculate where measured step times and accept "
    f"lengths say that it is faster (default: {THRESHOLD}).",
    metavar=f"{THRESHOLD}|{GOODPUT}",
)
DISABLE = Setting(
    "DISABLE_BATCH_THRESHOLD",
    "--speculative-disable-batch-threshold",
    "Decode without speculation while more than this many requests are running.",
)
ENABLE = Setting(
    "ENABLE_BATCH_THRESHOLD",
    "--speculative-enable-batch-threshold",
    "Speculate again once this many requests or fewer are running "
    f"(default: {DEFAULT_ENABLE_SHARE} of the disabling threshold).",
)
DWELL = Setting(
    "DWELL_STEPS",
    "--speculative-switch-dwell-steps",
    f"Decode steps without speculation before it may resume (default: {DEFAULT_DWELL_STEPS}).",
)
OPTIONAL = Setting(
    "OPTIONAL",
    "--speculative-switch-optional",
    "Start without the switch, with a warning, where it cannot work (default: refuse to start).",
    switch=True,
)
DRAFT_SYNC = Setting(
    "DRAFT_SYNC",
    "--speculative-switch-draft-sync",
    f"{EACH_STEP}: every OFF step extends the draft. {DEFERRED}: OFF steps keep what that takes, "
    f"and the draft catches up in one pass (default: {EACH_STEP}).",
    metavar=f"{EACH_STEP}|{DEFERRED}",
)
SYNC_WINDOW = Setting(
    "SYNC_WINDOW",
    "--speculative-switch-sync-window",
    "Most OFF steps that the draft may be behind if it catches up "
    f"(1 to {SYNC_WINDOW_MAX}, default: {DEFAULT_SYNC_WINDOW}).",
)
CACHE = Setting(
    "CACHE",
    None,
    f"Folder that keeps the step times which {GOODPUT} measures at start "
    "(default: crossover in the user's cache).",
)
TIMES = Setting(
    "TIMES", None, f"Diagnostic: file of step times that {GOODPUT} takes as they are, for good."
)
SCHEDULE = Setting(
    "SCHEDULE", None, "Diagnostic: on, off, every:K or random:SEED forces the mode by decode step."
)
TRACE = Setting("TRACE", None, "Diagnostic: file that gets one JSON line per decode step and rank.")
SKIP_DRAFT_EXTEND = Setting(
    "SKIP_DRAFT_EXTEND",
    None,
    "Diagnostic: OFF steps leave the draft stale. For timing only: acceptance collapses.",
    switch=True,
)
SETTINGS = (
    *(POLICY, DISABLE, ENABLE, DWELL, DRAFT_SYNC, SYNC_WINDOW, OPTIONAL),
    *(CACHE, TIMES, SCHEDULE, TRACE, SKIP_DRAFT_EXTEND),
)
DEPENDENT = (ENABLE, DWELL, DRAFT_SYNC, SYNC_WINDOW)
"""Settings that say how to switch, and so nothing where nothing switches."""
FLAGS = tuple(setting for setting in SETTINGS if setting.flag)


@dataclass(frozen=True, slots=True)
class Config:
    """A valid configuration in which speculation may switch.

    `sync_window` is the number of OFF steps that the draft may be behind, None if each extends it.
    """

    disable_above: int | None
    enable_at: int | None
    dwell_steps: int = DEFAULT_DWELL_STEPS
    sync_window: int | None = None
    optional: bool = False
    schedule: ScheduledRule | None = None
    trace: str | None = None
    skip_draft_extend: bool = False
    policy: str = THRESHOLD
    cache: str | None = None
    times: str | None = None

    @property
    def asked_by(self) -> str:
        """The setting that asked for switching, for messages."""
        if self.policy == GOODPUT:
            return f"{POLICY.flag} {GOODPUT}"
        return (DISABLE if self.disable_above is not None else SCHEDULE).spelled

    @property
    def measures(self) -> bool:
        """Whether step times have to be known before the rule can be made."""
        return self.policy == GOODPUT and self.schedule is None

    def make_rule(self) -> Rule:
        """Build a fresh rule: the schedule, if one is set, overrides all else. A rule that needs
        step times follows later; until then speculation stays on.
        """
        if self.schedule is not None:
            return self.schedule
        if self.measures:
            return ScheduledRule(period=0, first=Mode.ON)
        assert self.disable_above is not None
        assert self.enable_at is not None
        return ThresholdRule(self.disable_above, self.enable_at, self.dwell_steps)


def is_requested(environ: Mapping[str, str]) -> bool:
    """Tell whether anything asks for switching; if not, the engine is left exactly as it is."""
    asking = (POLICY, DISABLE, SCHEDULE, *DEPENDENT)
    return any(environ.get(setting.variable, "") for setting in asking)


def is_optional(environ: Mapping[str, str]) -> bool:
    """Tell whether to go on without the switch where it cannot work."""
    return _switch(environ, OPTIONAL)


def read_config(environ: Mapping[str, str]) -> Config | None:
    """Return the configuration, None if nothing asks for switching. ConfigError on what cannot be
    used.
    """
    if not is_requested(environ):
        return None
    policy, disable_above = _policy(environ), _number(environ, DISABLE)
    schedule = _schedule(environ)
    if policy == THRESHOLD and disable_above is None and schedule is None:
        given = next(s for s in (POLICY, *DEPENDENT) if environ.get(s.variable, ""))
        raise ConfigError(
            f"{given.spelled} has no effect without {DISABLE.flag}. Set that, or remove this."
        )
    return Config(
        disable_above=disable_above,
        enable_at=_enable_at(environ, disable_above),
        dwell_steps=_number(environ, DWELL, DEFAULT_DWELL_STEPS) or 0,
        sync_window=_sync_window(environ),
        optional=is_optional(environ),
        schedule=schedule,
        trace=environ.get(TRACE.variable) or None,
        skip_draft_extend=_switch(environ, SKIP_DRAFT_EXTEND),
        policy=policy,
        cache=environ.get(CACHE.variable) or None,
        times=environ.get(TIMES.variable) or None,
    )


def _policy(environ: Mapping[str, str]) -> str:
    policy = environ.get(POLICY.variable, "") or THRESHOLD
    if policy not in (THRESHOLD, GOODPUT):
        raise ConfigError(f"{POLICY.flag} must be {THRESHOLD} or {GOODPUT}, not {policy!r}.")
    if policy == THRESHOLD and environ.get(TIMES.variable, ""):
        raise ConfigError(
            f"{TIMES.variable} has no effect without {POLICY.flag} {GOODPUT}. "
            "Set that, or remove this."
        )
    given = next((s for s in (DISABLE, ENABLE) if environ.get(s.variable, "")), None)
    if policy == GOODPUT and given is not None:
        raise ConfigError(
            f"{given.flag} belongs to {POLICY.flag} {THRESHOLD}: {GOODPUT} finds the batch size by "
            "itself. Remove one of them."
        )
    return policy


def _enable_at(environ: Mapping[str, str], disable_above: int | None) -> int | None:
    enable_at = _number(environ, ENABLE)
    if disable_above is None:
        return enable_at
    if enable_at is None:
        return max(min(1, disable_above), int(DEFAULT_ENABLE_SHARE * disable_above))
    if enable_at > disable_above:
        raise ConfigError(
            f"{ENABLE.flag} {enable_at} exceeds {DISABLE.flag} {disable_above}: "
            f"the mode would be undefined between them. Use at most {disable_above}."
        )
    if enable_at == 0 < disable_above:
        raise ConfigError(
            f"{ENABLE.flag} 0 would never switch speculation on again, "
            "since a decode step has one request at least. Use 1 or more."
        )
    return enable_at


def _sync_window(environ: Mapping[str, str]) -> int | None:
    kind = environ.get(DRAFT_SYNC.variable, "") or EACH_STEP
    if kind not in (EACH_STEP, DEFERRED):
        raise ConfigError(f"{DRAFT_SYNC.flag} must be {EACH_STEP} or {DEFERRED}, not {kind!r}.")
    steps = _number(environ, SYNC_WINDOW)
    if kind == EACH_STEP:
        if steps is not None:
            raise ConfigError(
                f"{SYNC_WINDOW.flag} has no effect without {DRAFT_SYNC.flag} {DEFERRED}. "
                "Set that, or remove this."
            )
        return None
    if _switch(environ, SKIP_DRAFT_EXTEND):
        raise ConfigError(
            f"{SKIP_DRAFT_EXTEND.variable} leaves the draft stale, and "
            f"{DRAFT_SYNC.flag} {DEFERRED} keeps it in step. Remove one of them."
        )
    steps = DEFAULT_SYNC_WINDOW if steps is None else steps
    if not 1 <= steps <= SYNC_WINDOW_MAX:
        raise ConfigError(
            f"{SYNC_WINDOW.flag} must be 1 to {SYNC_WINDOW_MAX} OFF steps, not {steps}."
        )
    return steps


def _number(environ: Mapping[str, str], setting: Setting, default: int | None = None) -> int | None:
    text = environ.get(setting.variable, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{setting.spelled} must be a whole number of 0 or more, not {text!r}.")
    return int(text)


def _switch(environ: Mapping[str, str], setting: Setting) -> bool:
    text = environ.get(setting.variable, "").lower()
    if text not in ("", "0", "false", "1", "true"):
        raise ConfigError(f"{setting.spelled} must be 1 or 0, not {text!r}.")
    return text in ("1", "true")


def _schedule(environ: Mapping[str, str]) -> ScheduledRule | None:
    text = environ.get(SCHEDULE.variable, "")
    if not text:
        return None
    try:
        return ScheduledRule.parse(text)
    except ValueError as error:
        raise ConfigError(f"{SCHEDULE.variable}: {error}.") from None
