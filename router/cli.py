"""The command `crossover`. Whatever is wrong, its user is told in a few lines, not a traceback."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

import yaml

from router import __version__
from router.configuration import DEFAULT_ORIGIN, Resolved, resolve
from router.core.policy import WITH_THRESHOLD
from router.kinds import OneOf
from router.options import OPTIONS
from router.problems import SettingsError, unknown
from router.settings import Settings

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

_HELP_ALL = "--help-all"

_OVERVIEW = f"""\
crossover {__version__}: one URL for an EAGLE-3 and a plain SGLang server of the same model.
Each request goes to the server that serves it better at the present load.

usage: crossover COMMAND [options]

{{commands}}

examples:
  crossover serve --spec-url http://127.0.0.1:30001 --base-url http://127.0.0.1:30002
  crossover serve --config crossover.yaml --port 8000
  CROSSOVER_POLICY=threshold crossover check-config --config crossover.yaml
  crossover demo

crossover COMMAND --help shows the common options of a command, --help-all every one."""

_SETTINGS_HELP = """\
Each option is also an environment variable and a key of the YAML file: --queue-max 99,
CROSSOVER_QUEUE_MAX=99, queue_max: 99. A flag wins over the environment, that over the file.
Servers with names and GPUs are listed in the file: docs/settings.md.

examples:
  crossover {command} --spec-url http://127.0.0.1:30001 --base-url http://127.0.0.1:30002
  crossover {command} --config crossover.yaml --policy threshold --threshold 16"""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps each option on a line of its own, on a screen of 100 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=29, width=100)


@dataclass(frozen=True, slots=True)
class _Command:
    help: str
    run: Callable[[Sequence[str]], int]


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that its complaint joins the others."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError([message])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:13} {each.help}" for name, each in _COMMANDS.items())
        print(_OVERVIEW.format(commands=commands))
        return EXIT_OK
    if command in ("-V", "--version"):
        print(f"crossover {__version__}")
        return EXIT_OK
    if command not in _COMMANDS:
        print(f"crossover: {unknown(f'command {command}', command, _COMMANDS)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        return _COMMANDS[command].run(rest)
    except SettingsError as error:
        for problem in error.problems:
            print(f"crossover: {problem}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_OK


def _demo(arguments: Sequence[str]) -> int:
    from loadtest.demo import main as demo

    return demo(arguments)


def _status(arguments: Sequence[str]) -> int:
    from router.status import main as status

    parser = _Parser(
        prog="crossover status",
        description=_COMMANDS["status"].help,
        epilog="example:\n  crossover status --url http://127.0.0.1:30000",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    return status(arguments, parser)


def _serve(arguments: Sequence[str]) -> int:
    parser = _parser("serve", arguments)
    parser.add_argument(
        "--print-config", action="store_true", help="print the settings in force, and exit"
    )
    resolved, options = _resolve(parser, arguments)
    if options.print_config:
        print(printed(resolved), end="")
        return EXIT_OK
    return _run(resolved, lambda: _resolve(parser, arguments)[0])


def _check_config(arguments: Sequence[str]) -> int:
    resolved, _ = _resolve(_parser("check-config", arguments), arguments)
    print(f"settings are good: {_summary(resolved.settings)}")
    return EXIT_OK


def _doctor(arguments: Sequence[str]) -> int:
    from router.doctor import main as doctor

    parser = _parser("doctor", arguments)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    resolved, options = _resolve(parser, arguments)
    return doctor(resolved.settings, as_json=options.json)


def _run(resolved: Resolved, load: Callable[[], Resolved]) -> int:
    """Serve until a signal. `load` reads the settings again."""
    from router.dataplane.app import create_app
    from router.dataplane.listener import BindError, address_of, bind, serve
    from router.dataplane.logs import configure
    from router.dataplane.reload import Reloader

    settings = resolved.settings
    try:
        sock = bind(settings.host, settings.port)
    except BindError as error:
        where = ", ".join(f"{key}: {resolved.origins[key]}" for key in ("host", "port"))
        raise SettingsError([f"{error} ({where})"]) from None
    with sock:
        handler = configure(settings.log_format, settings.log_level)
        log = logging.getLogger("crossover")
        try:
            for warning in start_warnings(resolved):
                log.warning(warning)
            app = create_app(settings, log_lines_dropped=lambda: handler.dropped_lines)
            line = f"listening on {address_of(sock, settings.security.tls)}: {_summary(settings)}"
            reloader = Reloader(resolved, load, app.in_force, app.configure)
            came_up = serve(
                app, sock, lambda: log.info(line), reloader.request, settings.security.tls
            )
        finally:
            logging.getLogger().removeHandler(handler)
            handler.close()
    return EXIT_OK if came_up else EXIT_FAILED


def start_warnings(resolved: Resolved) -> list[str]:
    """Return what the operator should know although it is allowed."""
    settings = resolved.settings
    warnings: list[str] = []
    if settings.policy in WITH_THRESHOLD and resolved.origins["threshold"] == DEFAULT_ORIGIN:
        warnings.append(
            f"threshold {settings.threshold} is a default that was not measured on these servers:"
            " the load at which they cross depends on model, draft and GPU; set threshold"
        )
    if settings.policy not in WITH_THRESHOLD and resolved.origins["threshold"] != DEFAULT_ORIGIN:
        warnings.append(
            f"{resolved.origins['threshold']}: threshold {settings.threshold} does nothing with"
            f" policy {settings.policy}; set policy: threshold to steer by it"
        )
    return warnings


def printed(resolved: Resolved) -> str:
    """Return the settings as a YAML file that would give them again; comments say their sources."""
    lines = [f"# crossover {__version__}: the settings in force, and where each is from"]
    lines.append(f"servers:  # {_servers_origin(resolved)}")
    for server in resolved.settings.servers:
        fields: dict[str, object] = {
            "name": server.name, "role": server.role.value, "url": server.url,
        }  # fmt: skip
        if server.gpus:
            fields["gpus"] = list(server.gpus)
        fields |= resolved.access[server.name]
        lines.append(f"  - {_yaml(fields)}")
    for option in OPTIONS:
        if not option.in_file or option.repeated:
            continue
        value, origin = resolved.values[option.name], resolved.origins[option.name]
        if option.name.endswith(("key_file", "keys_file")) and value is not None:
            origin += "; what is in it: ***"
        if value is None or value == ():
            lines.append(f"# {option.name}: not set ({option.shown_default})")
        else:
            plain = str(value) if isinstance(value, str) else value
            plain = list(plain) if isinstance(plain, tuple) else plain
            lines.append(f"{option.name}: {_yaml(plain)}  # {origin}")
    return "\n".join(lines) + "\n"


def _servers_origin(resolved: Resolved) -> str:
    origins = dict.fromkeys(
        resolved.origins[name] for name in ("spec_url", "base_url") if resolved.values[name]
    )
    return ", ".join(origins) or f"{resolved.values['config']}"


def _yaml(value: object) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=1_000_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _summary(settings: Settings) -> str:
    servers = ", ".join(
        f"{server.name} ({server.role}) {server.url}" for server in settings.servers
    )
    threshold = f" {settings.threshold}" if settings.policy in WITH_THRESHOLD else ""
    return f"{servers}; policy {settings.policy}{threshold}; layout {settings.layout}"


def _parser(command: str, arguments: Sequence[str]) -> _Parser:
    """Build a command's parser from the table: it takes every option, its help has the common ones.

    The help for which `arguments` ask with --help-all has them all.
    """
    parser = _Parser(
        prog=f"crossover {command}",
        usage=f"crossover {command} [options]",
        description=_COMMANDS[command].help,
        epilog=_SETTINGS_HELP.format(command=command),
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(_HELP_ALL, action="help", help="show this help with every option, and exit")
    shows_all = _HELP_ALL in arguments
    for option in OPTIONS:
        if not option.in_flags:
            continue
        repeat = "; may be repeated" if option.repeated else ""
        default = f" ({option.shown_default})" if option.has_default else ""
        words = option.kind.words if isinstance(option.kind, OneOf) else ()
        choices = f": {', '.join(words)}" if len(words) > 2 else ""
        shown = option.common or shows_all
        parser.add_argument(
            option.flag,
            dest=option.name,
            action="append",
            metavar=option.kind.metavar,
            help=f"{option.help}{choices}{repeat}{default}" if shown else argparse.SUPPRESS,
        )
    return parser


def _resolve(parser: _Parser, arguments: Sequence[str]) -> tuple[Resolved, argparse.Namespace]:
    """Parse the flags and resolve the settings; all problems of both are raised together."""
    namespace, extra = parser.parse_known_args(arguments)
    flags = [option.flag for option in OPTIONS if option.in_flags]
    problems: list[str] = []
    for before, word in pairwise(["", *extra]):
        name = word.partition("=")[0]
        if name.startswith("-"):
            problems.append(unknown(f"flag {name}", name, flags))
        elif not before.startswith("-"):  # else it is the value of an unknown flag
            problems.append(f"argument {word!r}: expected flags only")
    given = {name: texts for name, texts in vars(namespace).items() if isinstance(texts, list)}
    try:
        resolved = resolve(given, os.environ)
    except SettingsError as error:
        raise SettingsError([*problems, *error.problems]) from None
    if problems:
        raise SettingsError(problems)
    return resolved, namespace


_COMMANDS: Mapping[str, _Command] = {
    "serve": _Command("run the router", _serve),
    "check-config": _Command("check the settings, and exit", _check_config),
    "doctor": _Command("look at the servers, and say what to change", _doctor),
    "status": _Command("show a running router: its servers, what it has learnt, a plot", _status),
    "demo": _Command("two simulated servers, the router, a load that rises and falls", _demo),
}
