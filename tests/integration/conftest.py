"""The router runs on uvloop in production; what depends on the loop is tested on both (rig.py)."""

import pytest


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}
