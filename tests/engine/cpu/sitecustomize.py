"""Python runs this at start-up, in spawned processes too, when this folder is on PYTHONPATH."""

import cpu_engine.boot

cpu_engine.boot.prepare()
