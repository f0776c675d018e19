"""The load message with one field more. The HTTP server unpickles it by this name and prints every
field.
"""

from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.io_struct import GetLoadsReqOutput


@dataclass
class SwitchLoads(GetLoadsReqOutput):  # type: ignore[misc]
    """SGLang's dispatcher falls back on the base class (sglang/utils.py:644-660), so this needs no
    route.
    """

    spec_switch: dict[str, Any] | None = None
