"""A headless Chromium for tests of pages, over its DevTools pipe: messages are JSON with a zero byte behind."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--mute-audio",
)


class Chromium:
    """`with Chromium(folder) as browser: browser.open(page)`; `folder` is its scratch. `problems` holds console errors and exceptions."""

    def __init__(self, folder: Path, seconds: float = 60) -> None:
        self.folder, self.seconds = folder, seconds
        self.number, self.rest, self.session = 0, b"", None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.seen: list[str] = []

    def __enter__(self) -> Chromium:
        # Numbers from 10 on: what the shell puts at 3 and 4 must not be one of them.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (*os.pipe(), *os.pipe())]
        its_input, self.write, self.read, its_output = ends
        words = [str(PROGRAM), *FLAGS, f"--user-data-dir={self.folder}", "about:blank"]
        shell = ["bash", "-c", f'exec "$@" 3<&{its_input} 4>&{its_output}', "_", *words]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(shell, pass_fds=(its_input, its_output), start_new_session=True, **quiet)
        os.close(its_input), os.close(its_output)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self.read), os.close(self.write)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters} | ({"sessionId": self.session} if self.session else {})
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self.number:
            self._event(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + self.seconds
        while b"\0" not in self.rest:
            if not select.select([self.read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            if not (part := os.read(self.read, 2**20)):
                raise RuntimeError("Chromium is gone")
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def _event(self, message: dict[str, Any]) -> None:
        method, params = message.get("method", ""), message.get("params", {})
        self.seen.append(method)
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(params["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, file: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.seen.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        while "Page.loadEventFired" not in self.seen:
            self._event(self._message())

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        params = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in params:
            raise RuntimeError(json.dumps(params["exceptionDetails"]))
        return params["result"].get("value")

    def pdf(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"]))
