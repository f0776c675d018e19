"""Crossover's router: steers each request to the server that serves it better now.

`core/` decides and does no I/O; `dataplane/` relays bytes and does no deciding; `settings.py` is
what they run with, `configuration.py` the one place that reads it; `cli.py` is the command
`crossover`.
"""

__version__ = "0.1.0"
