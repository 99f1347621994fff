"""A headless Chromium, driven through the two pipes of its DevTools protocol; nothing to install beside the browser."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SECONDS = 60  # for any answer: a busy machine is slow


def find_chromium() -> str:
    """The browser's command. Where TRANSFORMER_CHROMIUM is `required`, as in .ci/run, its absence is a failure."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None and os.environ.get("TRANSFORMER_CHROMIUM") == "required":
        pytest.fail("no Chromium: apt-get install chromium")
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium")
    return found


class Browser:
    """One page of a running browser, and what it said: its errors, and the addresses that it asked for."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []

        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command, and wait for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        """The next message; what the page says by itself is noted."""
        until = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"no answer from Chromium in {SECONDS} seconds"
            part = os.read(self._answers, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)

        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            case "Log.entryAdded" if message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
        return dict(message)

    def open(self, path: Path, fragment: str = "", *, drawn: str = ".explorer[data-ready]") -> None:
        """Show a file, and wait until there is an element that a selector names, such as a drawn explorer."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"{path.as_uri()}{fragment and '#'}{fragment}")
        self.wait_for(f"document.querySelector({json.dumps(drawn)}) !== null")

    def visit(self, address: str, *, drawn: str) -> None:
        """Show what a server has, and wait until there is an element that a selector names."""
        self.call("Page.navigate", url=address)
        self.wait_for(f"document.querySelector({json.dumps(drawn)}) !== null")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; of a promise, once it is kept."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + SECONDS
        while self.evaluate(expression) is not True:
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.02)

    def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        """Show the page in a window of this size, in CSS pixels, and wait until it is laid out and drawn in it."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        self.wait_for(f"document.documentElement.clientWidth === {width}")
        self.wait_for_frame()

    def wait_for_frame(self) -> None:
        """Wait until the page has been drawn as it is by now, and what it does in answer to a new size is done."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def choose_scheme(self, scheme: str) -> None:
        """`light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.wait_for_frame()

    def move_to(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Press and release the left button."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: str) -> None:
        """Press and release a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code)

    def middle_of(self, selector: str) -> tuple[float, float]:
        """Where an element is, in the window."""
        box = self.evaluate(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        return box[0], box[1]

    def screenshot(self) -> bytes:
        """A picture of the whole page, as PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])


@contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    """A browser that keeps what it writes in `profile`, and ends with the context."""
    chromium = find_chromium()
    commands_read, commands_write = os.pipe()
    answers_read, answers_write = os.pipe()
    flags = (
        *("--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"),
        *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),
        *("--hide-scrollbars", "--force-color-profile=srgb"),
    )
    # The protocol is spoken over the descriptors 3 and 4.
    shell = f'exec "$0" "$@" 3<&{commands_read} 4>&{answers_write}'
    process = subprocess.Popen(
        ["bash", "-c", shell, chromium, *flags],
        pass_fds=(commands_read, answers_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(profile)},
    )
    os.close(commands_read)
    os.close(answers_write)
    try:
        browser = Browser(commands_write, answers_read)
        yield browser
        browser._session = None
        browser.call("Browser.close")
    finally:
        os.close(commands_write)
        os.close(answers_read)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
