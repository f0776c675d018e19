"""Chromium without a screen, by its DevTools protocol."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.deploy.compose import running

DEADLINE_S = 30.0


class Page:
    """One page of the browser."""

    def __init__(self, socket: ClientConnection, session: str) -> None:
        self._socket = socket
        self._session = session
        self._count = 0
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method, return its result; what the page complains of meanwhile is kept."""
        self._count += 1
        sent = {"id": self._count, "sessionId": self._session, "method": method, "params": params}
        self._socket.send(json.dumps(sent))
        while True:
            told = json.loads(self._socket.recv(timeout=DEADLINE_S))
            if told.get("sessionId") != self._session:
                continue
            if told.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(told["params"]["exceptionDetails"]))
            elif told.get("method") == "Log.entryAdded":
                self.problems.append(json.dumps(told["params"]["entry"]))
            elif told.get("id") == self._count:
                assert "error" not in told, told
                result: dict[str, Any] = told["result"]
                return result

    def look(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        told = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, expression: str) -> None:
        """Poll until it holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.look(expression):
            assert time.monotonic() < deadline, f"did not come true: {expression}"
            time.sleep(0.1)

    def press(self, key: str) -> None:
        """Press a key and let it go."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind, more in (("keyDown", text), ("keyUp", {})):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more,
            )  # fmt: skip

    def open(self, url: str, *, scheme: str, width: int = 1280, height: int = 1000) -> None:
        """Go to a URL, as seen by someone who likes `scheme`."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.call("Page.navigate", url=url)


@contextmanager
def chromium(folder: Path) -> Iterator["Browser"]:
    """A browser with a profile of its own, ended at the end."""
    log = folder / "chromium.log"
    words = [
        *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--disable-dev-shm-usage", "--disable-background-networking"),
        *("--remote-debugging-port=0", f"--user-data-dir={folder}/profile", "about:blank"),
    ]
    with running(words, log):
        deadline = time.monotonic() + DEADLINE_S
        while not (found := re.search(r"listening on (ws://\S+)", log.read_text())):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        with connect(found[1], max_size=2**26) as socket:
            yield Browser(socket)


class Browser:
    """Makes pages."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    def page(self) -> Page:
        """A new page."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        return Page(
            self._socket,
            self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"],
        )

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._socket.send(json.dumps({"id": 0, "method": method, "params": params}))
        while True:
            told = json.loads(self._socket.recv(timeout=DEADLINE_S))
            if told.get("id") == 0 and "sessionId" not in told:
                result: dict[str, Any] = told["result"]
                return result
