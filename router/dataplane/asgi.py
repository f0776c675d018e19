"""The ASGI types, as far as the data plane speaks them."""

from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any

Scope = Mapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]
Headers = list[tuple[bytes, bytes]]
