"""Just enough of a headless Chromium: commands of its debugging protocol over a pipe, without any package."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path


def find_chromium() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Browser:
    """One page."""

    def __init__(self, program: str, profile: Path, *, width: int = 1120, height: int = 1000) -> None:
        there_out, self._to = os.pipe()
        self._from, there_in = os.pipe()
        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars", f"--user-data-dir={profile}", f"--window-size={width},{height}",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        # The protocol wants file descriptors 3 and 4.
        line = f'exec "$@" 3<&{there_out} 4>&{there_in}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, "browser", *command],
            pass_fds=(there_out, there_in),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there_out)
        os.close(there_in)
        self._ids, self._left = itertools.count(1), b""
        self.problems: list[str] = []
        """Uncaught errors of the page's scripts."""
        target = next(t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self.call("Runtime.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **params):
        """A command to the page."""
        return self._call(method, session=self._session, **params)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str):
        """The value of a JavaScript expression; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = 60.0):
        """Until the expression is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.run(script):
                return value
            time.sleep(0.1)
        raise AssertionError(f"did not become true: {script}")

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._to)
        os.close(self._from)

    def _call(self, method: str, session: str | None = None, **params):
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(answer["params"]["exceptionDetails"]))
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self):
        while b"\0" not in self._left:
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser has ended"
            self._left += piece
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)
