"""A headless Chromium, driven through its DevTools protocol: for the dashboard's tests."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

START_S = 60.0
"""A browser that shares a busy machine takes ten seconds for its start."""

READY_S = 60.0
POLL_S = 0.05


class Navigated(Exception):
    """The page was replaced, as by its own reload, while a script was evaluated in it."""


class Tab:
    """One tab; `errors` has the errors of its scripts, and what its console and its policy reported as errors."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())
        self.errors: list[str] = []

    async def open(self, url: str, width: int = 1280, height: int = 900, theme: str = "light") -> None:
        """Opens an address and waits until the page shows its runs."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", screen)
        features = [
            {"name": "prefers-color-scheme", "value": theme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        await self.call("Emulation.setEmulatedMedia", {"features": features})
        await self.call("Page.navigate", {"url": url})
        await self.wait_for("document.documentElement?.dataset.ready === 'true'")

    async def wait_for(self, condition: str) -> None:
        """Waits until the condition, an expression, is true."""
        deadline = asyncio.get_running_loop().time() + READY_S
        while not await self._holds(condition):
            assert asyncio.get_running_loop().time() < deadline, f"{condition} is not true: {self.errors}"
            await asyncio.sleep(POLL_S)

    async def _holds(self, condition: str) -> bool:
        try:
            return bool(await self.value(condition))
        except Navigated:
            return False

    async def value(self, expression: str) -> Any:
        """The value of an expression, or of its promise, as JSON."""
        arguments = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = await self.call("Runtime.evaluate", arguments)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def call(self, method: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        number = self._number
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": arguments or {}})
        answer = await asyncio.wait_for(future, READY_S)
        if "navigated" in answer.get("error", {}).get("message", ""):
            raise Navigated(f"{method}: {answer['error']}")
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    async def close(self) -> None:
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading

    async def _read(self) -> None:
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                if future := self._answers.pop(event["id"], None):
                    future.set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.errors.append(str(event["params"]["entry"]))


@asynccontextmanager
async def browser_tab() -> AsyncIterator[Tab]:
    """A tab of a browser of its own, which has no other pages, files or network names."""
    assert CHROMIUM is not None, "there is no Chromium on this machine"
    # Processes of the browser may write there for a moment after it has ended.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--mute-audio"]
        arguments += [
            "--no-first-run",
            "--disable-extensions",
            "--disable-background-networking",
            "--disable-dev-shm-usage",
        ]
        command = [CHROMIUM, *arguments, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "HOME": profile})
        try:
            port = await _port_of(Path(profile))
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [page for page in await answer.json() if page["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    tab = Tab(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await tab.call(f"{domain}.enable")
                    yield tab
                    await tab.close()
        finally:
            process.terminate()
            process.wait(timeout=START_S)


async def _port_of(profile: Path) -> str:
    deadline = asyncio.get_running_loop().time() + START_S
    while True:
        with suppress(OSError, IndexError):
            return (profile / "DevToolsActivePort").read_text().splitlines()[0]
        assert asyncio.get_running_loop().time() < deadline, "Chromium does not start"
        await asyncio.sleep(POLL_S)
