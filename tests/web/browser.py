"""A headless Chromium, driven by its own protocol over a websocket: no package but aiohttp."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.scene import PATIENCE_S

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium (apt install chromium)"
)


class Browser:
    """One page in a browser of its own."""

    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse, process: asyncio.subprocess.Process
    ) -> None:
        self._socket = socket
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.process = process
        self.events: list[dict[str, Any]] = []
        """All that the browser told: requests, responses, messages of the console."""

    async def listen(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._waiting.pop(told["id"]).set_result(told)
            else:
                self.events.append(told)

    async def do(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        answer = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        told = await asyncio.wait_for(answer, PATIENCE_S)
        assert "error" not in told, told
        return told["result"]

    async def js(self, code: str) -> Any:
        told = await self.do(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, code: str) -> Any:
        """Wait until an expression is true; return its value.

        While a page loads there may be nothing to ask.
        """
        return await until(
            lambda: self.js(f"(() => {{ try {{ return {code} }} catch {{ return null }} }})()"),
            code,
        )

    async def key(self, key: str, text: str | None = None) -> None:
        for kind in ("keyDown", "keyUp"):
            more = {"text": text or key} if kind == "keyDown" and (text or len(key) == 1) else {}
            await self.do("Input.dispatchKeyEvent", type=kind, key=key, **more)

    async def resize(self, width: int, height: int, *, dark: bool, to: Path | None) -> None:
        """Give the window this size and scheme; keep a picture of it in a file, if one is named."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.do("Emulation.setEmulatedMedia", features=scheme)
        await self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        await asyncio.sleep(0.3 if to is None else 1.0)
        if to is not None:
            told = await self.do("Page.captureScreenshot", format="png")
            to.write_bytes(base64.b64decode(told["data"]))

    def requests(self) -> list[str]:
        return [
            told["params"]["request"]["url"]
            for told in self.events
            if told["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """What the console said: errors of scripts, and what the content security policy has blocked."""
        told = [(each["method"], each["params"]) for each in self.events]
        exceptions = [str(more) for method, more in told if method == "Runtime.exceptionThrown"]
        entries = [more["entry"] for method, more in told if method == "Log.entryAdded"]
        return exceptions + [
            f"{each['text']} {each.get('url')}" for each in entries if each["source"] != "network"
        ]


async def until(ask: Callable[[], Any], what: str) -> Any:
    """Ask until the answer is true; return it. `wait_for` of `tests.scene` for coroutines."""
    ends_s = asyncio.get_running_loop().time() + PATIENCE_S
    while asyncio.get_running_loop().time() < ends_s:
        if answer := await ask():
            return answer
        await asyncio.sleep(0.05)
    raise AssertionError(f"no {what} within {PATIENCE_S:.0f} s")


@asynccontextmanager
async def browser(folder: Path, *options: str) -> AsyncIterator[Browser]:
    """Start a browser with its own profile in `folder`; it ends with all its children."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}", *options, "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    told = folder / "profile" / "DevToolsActivePort"
    try:
        async with aiohttp.ClientSession() as session:

            async def port() -> str:
                lines = told.read_text().splitlines() if told.exists() else []
                return lines[0] if len(lines) == 2 else ""

            found = await until(port, "port of the browser")
            async with session.get(f"http://127.0.0.1:{found}/json") as answer:
                (page,) = [each for each in await answer.json() if each["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                made = Browser(socket, process)
                listening = asyncio.create_task(made.listen())
                for domain in ("Page", "Network", "Runtime", "Log"):
                    await made.do(f"{domain}.enable")
                yield made
                listening.cancel()
    finally:
        children = []
        with suppress(psutil.Error):
            children = psutil.Process(process.pid).children(recursive=True)
        for each in children:
            with suppress(psutil.Error):
                each.send_signal(signal.SIGKILL)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
