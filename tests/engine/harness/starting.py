"""What the launcher makes of settings: `python -m ... TRIALS`, in a process that has SGLang.

TRIALS is JSON: for each trial the arguments of the server and the switch's environment. Prints one
JSON line a trial: the exit status (None if it goes on), what was said of the switch, and the
environment that schedulers would inherit.
"""

import contextlib
import io
import json
import os
import sys
from typing import Any

from sglang.srt.plugins import load_plugins

PREFIX = "SGLANG_SPEC_SWITCH_"


def attempt(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Read one command line as the launcher does."""
    from sglang.srt.server_args import prepare_server_args

    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    os.environ.update(environment)
    status, said = None, io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            prepare_server_args(arguments)
        except SystemExit as end:
            status = end.code
    told = [line for line in said.getvalue().splitlines() if "switch: " in line]
    inherited = {
        name.removeprefix(PREFIX): value
        for name, value in os.environ.items()
        if name.startswith(PREFIX)
    }
    return {"status": status, "told": told, "inherited": inherited}


if __name__ == "__main__":
    load_plugins()
    for trial in json.loads(sys.argv[1]):
        print(json.dumps(attempt(*trial)), flush=True)
