"""A headless Chromium, driven by its own protocol over a websocket. Needs only aiohttp."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.scene import PATIENCE_S, wait_for

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium (apt install chromium)"
)


class Browser:
    """One page in a separate browser."""

    def __init__(self, runner: asyncio.Runner, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._run = runner.run
        self._socket = socket
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        """All events of the browser: requests, responses, messages of the console."""

    async def listen(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._waiting.pop(told["id"]).set_result(told)
            else:
                self.events.append(told)

    def do(self, method: str, **parameters: object) -> dict[str, Any]:
        async def done() -> dict[str, Any]:
            self._number += 1
            answer = self._waiting[self._number] = asyncio.get_running_loop().create_future()
            order = {"id": self._number, "method": method, "params": parameters}
            await self._socket.send_json(order)
            return await asyncio.wait_for(answer, PATIENCE_S)

        told = self._run(done())
        assert "error" not in told, told
        return told["result"]

    def js(self, code: str) -> Any:
        told = self.do("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, code: str) -> Any:
        """Wait until an expression is true; return its value.

        While a page loads, the expression may fail.
        """
        tried = f"(() => {{ try {{ return {code} }} catch {{ return null }} }})()"
        return wait_for(lambda: self.js(tried), code, rest=self.rest)

    def rest(self, seconds: float) -> None:
        """Let the server and the browser run for some time."""
        self._run(asyncio.sleep(seconds))

    def key(self, key: str, text: str | None = None) -> None:
        for kind in ("keyDown", "keyUp"):
            more = {"text": text or key} if kind == "keyDown" and (text or len(key) == 1) else {}
            self.do("Input.dispatchKeyEvent", type=kind, key=key, **more)

    def resize(self, width: int, height: int, *, dark: bool) -> None:
        """Set the size and the colour scheme of the window, and wait until the page is drawn."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.do("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.do("Emulation.setDeviceMetricsOverride", **size)
        self.js("new Promise((it) => requestAnimationFrame(() => requestAnimationFrame(it)))")

    def requests(self) -> list[str]:
        return [
            told["params"]["request"]["url"]
            for told in self.events
            if told["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Return the messages of the console: errors of scripts, and blocks by the content security
        policy.
        """
        told = [(each["method"], each["params"]) for each in self.events]
        exceptions = [str(more) for method, more in told if method == "Runtime.exceptionThrown"]
        entries = [more["entry"] for method, more in told if method == "Log.entryAdded"]
        return exceptions + [
            f"{each['text']} {each.get('url')}" for each in entries if each["source"] != "network"
        ]


@contextmanager
def browser(folder: Path, runner: asyncio.Runner) -> Iterator[Browser]:
    """Start a browser with its own profile in `folder`; it ends with all its children."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}", "about:blank",
    ]  # fmt: skip
    silent, home = subprocess.DEVNULL, {**os.environ, "HOME": str(folder)}
    process = psutil.Popen(command, stdout=silent, stderr=silent, start_new_session=True, env=home)
    told = folder / "profile" / "DevToolsActivePort"

    async def opened(session: aiohttp.ClientSession, port: str) -> aiohttp.ClientWebSocketResponse:
        async with session.get(f"http://127.0.0.1:{port}/json") as answer:
            (page,) = [each for each in await answer.json() if each["type"] == "page"]
        return await session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)

    async def begun() -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    session = runner.run(begun())
    try:
        lines = wait_for(
            lambda: told.exists() and len(lines := told.read_text().splitlines()) == 2 and lines,
            "port of the browser",
        )
        made = Browser(runner, runner.run(opened(session, lines[0])))
        listening = runner.get_loop().create_task(made.listen())
        for domain in ("Page", "Network", "Runtime", "Log"):
            made.do(f"{domain}.enable")
        yield made
        listening.cancel()
    finally:
        runner.run(session.close())
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.Error):
                each.kill()
        process.wait()
