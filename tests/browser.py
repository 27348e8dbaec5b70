"""A headless Chromium, driven over a pipe by the Chrome DevTools protocol: no package, no port.

It has no network but 127.0.0.1.

with Browser() as browser:
    page = browser.open(path)
    page.click("#tab-layers")
    assert page.evaluate("document.title") == "..."
    assert page.problems == [] and page.requests == []
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_CHROMIUM = "no Chromium on this machine"

_TIMEOUT_S = 60.0
_FLAGS = (
    "--headless=new",
    "--disable-ipc-flooding-protection",  # which slows down who goes to many addresses
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-default-browser-check",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--proxy-server=127.0.0.1:9",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and writes answers to 4.
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_FIRST_FREE = 10  # descriptors of ours that cannot be 3 or 4
_KEYS = {"Enter": ("\r", 13), " ": (" ", 32), "Tab": ("\t", 9), "ArrowDown": ("", 40), "ArrowUp": ("", 38)}
_KEYS |= {"ArrowLeft": ("", 37), "ArrowRight": ("", 39), "Home": ("", 36), "End": ("", 35), "Escape": ("", 27)}


class BrowserError(Exception):
    """The browser answered with an error, or a script in the page raised."""


class Browser:
    """One Chromium; each page that it opens is a tab of its own."""

    def __enter__(self) -> Browser:
        if CHROMIUM is None:
            raise BrowserError(NO_CHROMIUM)
        self._user = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        theirs_in, self._write = _far_pipe()
        self._read, theirs_out = _far_pipe()
        command = [sys.executable, "-c", _LAUNCH, str(theirs_in), str(theirs_out), CHROMIUM, *_FLAGS]
        command += [f"--user-data-dir={self._user.name}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = bytearray()
        self._last_id = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.call("Browser.close", timeout_s=10)
        except (BrowserError, OSError):
            self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._user.cleanup()

    def open(
        self, path: Path | str, *, address: str = "", width: int = 1366, height: int = 768, dark: bool = False
    ) -> Page:
        """The page at `path`, a file or a URL, with `address` behind its `#`, once it has loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.set_dark(dark)
        page.go(path, address)
        return page

    def call(self, method: str, *, session: str | None = None, timeout_s: float = _TIMEOUT_S, **params: Any) -> Any:
        """The result of one command."""
        self._last_id += 1
        number = self._last_id
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._write, data) :]
        until = time.monotonic() + timeout_s
        while number not in self._answers:
            self.receive(until, what=method)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error'].get('message')}")
        return answer["result"]

    def receive(self, until: float, *, what: str) -> None:
        """Takes in what the browser says next."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise BrowserError(f"no answer in time to {what}")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise BrowserError(f"Chromium ended during {what}, exit code {self._process.poll()}")
            self._buffer += piece
        text, _, rest = bytes(self._buffer).partition(b"\0")
        self._buffer = bytearray(rest)
        message = json.loads(text)
        if "id" in message:
            self._answers[message["id"]] = message
        elif message.get("sessionId") in self._pages:
            self._pages[message["sessionId"]].take(message["method"], message["params"])


class Page:
    """One tab. `problems`: errors and warnings of its console; `requests`: what it asked for beside itself."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self._loaded = self._has_page = False
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []

    def call(self, method: str, **params: Any) -> Any:
        """The result of one command to this tab."""
        return self._browser.call(method, session=self._session, **params)

    def take(self, method: str, params: dict[str, Any]) -> None:
        """Notes an event."""
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if params.get("type") != "Document" and not url.startswith(("data:", "blob:")):
                self.requests.append(url)
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])

    def go(self, path: Path | str, address: str = "") -> None:
        """Loads the page anew."""
        self._loaded = False
        url = (path if isinstance(path, str) else path.resolve().as_uri()) + (f"#{address}" if address else "")
        if self._has_page:
            self.call("Page.navigate", url="about:blank")
            self._wait_for_load()
        self._has_page = True
        self.call("Page.navigate", url=url)
        self._wait_for_load()

    def reload(self) -> None:
        """The same address anew."""
        self._loaded = False
        self.call("Page.reload")
        self._wait_for_load()

    def _wait_for_load(self) -> None:
        until = time.monotonic() + _TIMEOUT_S
        while not self._loaded:
            self._browser.receive(until, what="loading")
        self._loaded = False

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; of a promise, what it becomes."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def wait(self, condition: str, *, timeout_s: float = _TIMEOUT_S) -> None:
        """Until the JavaScript expression is true."""
        until = time.monotonic() + timeout_s
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > until:
                raise BrowserError(f"not so within {timeout_s:.0f} s: {condition}")
            time.sleep(0.03)

    def text(self, selector: str) -> str:
        """What is to be read in the first element that `selector` finds."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def texts(self, selector: str) -> list[str]:
        """The same of all of them."""
        found = self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.innerText)")
        return [str(one) for one in found]

    def count(self, selector: str) -> int:
        """How many elements there are."""
        return int(self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def click(self, selector: str, *, at: int = 0) -> None:
        """A real click in the middle of the `at`-th element that `selector` finds, of text in lines of the first."""
        x, y = self.evaluate(
            f"(() => {{ const one = document.querySelectorAll({json.dumps(selector)})[{at}]; "
            "one.scrollIntoView({block: 'center', inline: 'center'}); const [box] = one.getClientRects(); "
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """One key."""
        letter, code = _KEYS[key]
        common = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": letter} if letter else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def to_front(self) -> None:
        """Makes it the tab that is seen: in others frames, and so some events, may not come."""
        self.call("Page.bringToFront")

    def resize(self, width: int, height: int) -> None:
        """The size of the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def set_dark(self, dark: bool) -> None:
        """What the system prefers."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        """What the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """Closes the tab."""
        self._browser.call("Target.closeTarget", targetId=self._target)


def _far_pipe() -> tuple[int, int]:
    """A pipe whose ends are neither descriptor 3 nor 4."""
    near = os.pipe()
    far = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for end in near)
    for end in near:
        os.close(end)
    return far[0], far[1]
