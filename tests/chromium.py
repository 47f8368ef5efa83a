"""A headless Chromium, driven over its own protocol (CDP) through two pipes: no client package."""

import asyncio
import base64
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATH = next((found for name in NAMES if (found := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(
    PATH is None, reason="no Chromium is here: apt-get install chromium (.ci/run does it)"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
WAIT_S = 120.0  # the longest that a busy machine may take for anything
LIMIT_BYTES = 64 * 1024 * 1024  # of one message: a picture
KEYS = {  # virtual key codes of keys that make no text
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13, "Escape": 27,
}  # fmt: skip

# it reads commands at 3 and writes answers at 4
EXEC = """
import os, sys
for fd, pipe in enumerate([os.dup2(int(fd), int(fd) + 100) for fd in sys.argv[1:3]], start=3):
    os.dup2(pipe, fd)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One running Chromium."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._number = 0

    async def listen(self) -> None:
        while True:
            raw = await self._reader.readuntil(b"\0")
            message = json.loads(raw[:-1])
            if "id" in message:
                answer = self._answers.pop(message["id"])
                if not answer.done():
                    answer.set_result(message)
            elif page := self._pages.get(message.get("sessionId", "")):
                page.hear(message["method"], message["params"])

    async def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """The result of a method. Raises AssertionError where Chromium says no."""
        self._number += 1
        answer = asyncio.get_running_loop().create_future()
        self._answers[self._number] = answer
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(WAIT_S):
            told = await answer
        assert "error" not in told, (method, told["error"])
        result: dict[str, Any] = told["result"]
        return result

    async def page(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 800,
        dark: bool = False,
        phone: bool = False,
        headers: dict[str, str] | None = None,
    ) -> "Page":
        """A page of its own, once it has loaded."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))[
            "sessionId"
        ]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await page.call("Emulation.setEmulatedMedia", features=scheme)
        await page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        if headers:
            await page.call("Network.setExtraHTTPHeaders", headers=headers)
        told = await page.call("Page.navigate", url=url)
        assert "errorText" not in told, told
        await page.until("document.readyState === 'complete'")
        return page


class Page:
    """One page. `errors`: what its console and its policy complained of; `requests`: the addresses
    it asked for.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []
        self.requests: list[str] = []

    def hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **params)

    async def evaluate(self, script: str) -> Any:
        """The value of an expression. Raises AssertionError where it throws."""
        told = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, (script, told["exceptionDetails"])
        return told["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until the expression is true."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not await self.evaluate(f"Boolean({script})"):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.evaluate("document.body.innerText")
            raise AssertionError(f"never true: {script}\n{self.errors}\n{text}") from None

    async def text(self, selector: str) -> str:
        found: str = await self.evaluate(
            f"document.querySelector({json.dumps(selector)}).innerText"
        )
        return found

    async def press(self, key: str) -> None:
        facts: dict[str, Any] = {"key": key, "code": key}
        facts |= {"windowsVirtualKeyCode": KEYS[key]} if key in KEYS else {"text": key}
        if key == "Enter":
            facts["text"] = "\r"
        await self.call("Input.dispatchKeyEvent", type="keyDown", **facts)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    async def click(self, selector: str) -> None:
        """A click with the mouse, in the middle of the element."""
        await self.until(f"document.querySelector({json.dumps(selector)})")
        at = await self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent",
                type=kind, x=at[0], y=at[1], button="left", clickCount=1,
            )  # fmt: skip

    async def screenshot(self, path: Path) -> None:
        told = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(told["data"]))


@asynccontextmanager
async def chromium(*flags: str) -> AsyncIterator[Browser]:
    """A Chromium with a profile of its own, as long as the context lasts."""
    assert PATH is not None
    loop = asyncio.get_running_loop()
    to_read, its_write = os.pipe()
    its_read, to_write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", EXEC, str(its_read), str(its_write),
            PATH, *FLAGS, f"--user-data-dir={folder}", *flags, "about:blank",
            pass_fds=(its_read, its_write),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "HOME": folder},
        )  # fmt: skip
        os.close(its_read)
        os.close(its_write)
        reader = asyncio.StreamReader(limit=LIMIT_BYTES)
        reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(to_read, "rb")
        )
        writing, protocol = await loop.connect_write_pipe(
            lambda: asyncio.streams.FlowControlMixin(loop), os.fdopen(to_write, "wb")
        )
        browser = Browser(reader, asyncio.StreamWriter(writing, protocol, None, loop))
        listening = asyncio.create_task(browser.listen())
        try:
            yield browser
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            reading.close()
            writing.close()
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
