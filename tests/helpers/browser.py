"""A headless chromium, driven over its DevTools protocol through two pipes.

Pipes need no port and no WebSocket, so the standard library is enough.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-dev-shm-usage", "--disable-default-apps",
    "--hide-scrollbars", "--force-device-scale-factor=1", "--remote-debugging-pipe",
)  # fmt: skip
_SECONDS = 60.0  # that an answer may take
_KEYS = {
    "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, "Enter": 13,
    "Tab": 9, "Home": 36, "End": 35, "Escape": 27,
}  # fmt: skip


def find_chromium() -> str | None:
    """The program, or None where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    return None


class BrowserError(AssertionError):
    """The browser did not answer, or says that something went wrong."""


class Browser:
    """One chromium process; every page is a tab of it."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="torchspmd-browser-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The protocol is on descriptors 3 and 4; bash moves the pipes there.
        command = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        words = [program, *_OPTIONS, f"--user-data-dir={self._folder}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "browser", *words],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Send a command and wait for its answer."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _SECONDS
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") != number:
                self.events.append(answer)
                continue
            if "error" in answer:
                raise BrowserError(f"{method}: {answer['error']['message']}")
            return answer["result"]

    def _next(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._read], [], [], max(0.0, left))
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                raise BrowserError(f"chromium did not answer {method}")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer

    @contextlib.contextmanager
    def open(self, path: Path, **options: Any) -> Iterator["Tab"]:
        """A file in a tab of its own; see ``Tab.load``."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        tab = Tab(self, attached["sessionId"])
        try:
            tab.load(path, **options)
            yield tab
        finally:
            self.call("Target.closeTarget", targetId=target)

    def close(self) -> None:
        """End the process and remove its folder."""
        with contextlib.suppress(BrokenPipeError, BrowserError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._folder, ignore_errors=True)


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **parameters: Any) -> Any:
        """A command of the protocol, to this page."""
        return self._browser.call(method, self._session, **parameters)

    def load(
        self, path: Path, *, width: int = 1366, height: int = 768, dark: bool = False
    ) -> None:
        """Open the file without a network, and wait until it is drawn."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.absolute().as_uri())
        self.wait("document.documentElement?.dataset.ready === 'yes'")
        self.settle()

    def resize(self, width: int, height: int) -> None:
        """The window's size, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def js(self, expression: str) -> Any:
        """The value of an expression, as plain data; promises are waited for."""
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            text = details.get("exception", {}).get("description", details["text"])
            raise BrowserError(f"{expression}: {text}")
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + _SECONDS
        while not self.js(expression):
            if time.monotonic() > deadline:
                raise BrowserError(f"never true: {expression}; {self.problems()}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Until what was asked for is on the screen."""
        self.js(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def view(self, name: str) -> None:
        """Click the tab of a view."""
        self.click(f"#tab-{name}")

    def click(self, selector: str) -> None:
        """Click the middle of an element."""
        self.js(f"{_one(selector)}.scrollIntoView({{block: 'center'}})")
        x, y = self.js(
            f"(() => {{ const b = {_one(selector)}.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.click_at(x, y)

    def click_at(self, x: float, y: float) -> None:
        """Press and release the left button."""
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", clickCount=1, buttons=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)
        self.settle()

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Move with the left button held."""
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, button="left", clickCount=1, buttons=1)
        for part in (0.5, 1.0):
            x, y = (a + part * (b - a) for a, b in zip(start, end, strict=True))
            self.mouse("mouseMoved", x, y, button="left", buttons=1)
        self.mouse("mouseReleased", *end, button="left", clickCount=1)
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """One event of the mouse."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def wheel(self, x: float, y: float, delta: float) -> None:
        """Turn the wheel; positive is towards the user."""
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=delta)
        self.settle()

    def key(self, key: str) -> None:
        """Press and release a key."""
        code = _KEYS.get(key, ord(key.upper()) if len(key) == 1 else 0)
        text = {"text": key} if len(key) == 1 else {}
        if key == "Enter":
            text = {"text": "\r"}
        self.call(
            "Input.dispatchKeyEvent",
            type="keyDown",
            key=key,
            windowsVirtualKeyCode=code,
            **text,
        )
        self.call(
            "Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code
        )
        self.settle()

    def type(self, selector: str, text: str) -> None:
        """Put the focus on a field and write."""
        self.js(f"({_one(selector)}).focus()")
        self.call("Input.insertText", text=text)
        self.settle()

    def text(self, selector: str) -> str:
        """What a reader sees of an element."""
        return str(self.js(f"{_one(selector)}.innerText"))

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """What the window shows, or the whole page, as PNG."""
        options: dict[str, Any] = {"format": "png", "optimizeForSpeed": False}
        if whole:
            options["captureBeyondViewport"] = True
        data = self.call("Page.captureScreenshot", **options)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self) -> bytes:
        """The page as it is printed."""
        data = self.call("Page.printToPDF", printBackground=True)["data"]
        return base64.b64decode(data)

    def problems(self) -> list[str]:
        """Errors and warnings of this page so far, and requests that it made."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            method, parameters = event["method"], event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"].get("exception")))
            elif method == "Runtime.consoleAPICalled":
                found.append(str(parameters["args"]))
            elif method == "Log.entryAdded":
                found.append(str(parameters["entry"]["text"]))
            elif method == "Page.javascriptDialogOpening":
                found.append(f"a dialog: {parameters['message']}")
            elif method == "Network.requestWillBeSent":
                url = parameters["request"]["url"]
                if not url.startswith("file:"):
                    found.append(f"a request: {url[:80]}")
        return found


def _one(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)})"
