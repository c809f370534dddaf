"""The status page in a real browser, and what it shows."""

import itertools
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from serving.api.http.endpoints.operation import waiting
from serving.api.metrics import Metrics
from serving.core.errors import WaitReason
from serving.engine.requests.output import CompletionOutput, RequestMetrics, RequestOutput
from tests.serving.core.drive import Loop
from tests.support.waiting import comes_true

PAGE = Path(__file__).resolve().parents[3] / "serving/api/static/index.html"


def test_the_script_names_elements_that_exist():
    page = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r'(?:\$|bars|map)\("(\w+)"', page)) | {"slotslegend", "pageslegend"}
    assert named <= set(re.findall(r'id="(\w+)"', page))
    assert {"latency", "waits"} <= named


def test_who_waits_and_why():
    loop = Loop(num_slots=20, max_num_seqs=1)
    begun = time.monotonic() - 60
    for client, count in (("key a", 1), ("key b", 3), ("key a", 1)):
        for _ in range(count):
            request = loop.add([1] * 7, max_tokens=3, client=client)
            output = RequestOutput("r", None, [1], [], finished=False, metrics=RequestMetrics(begun))
            request.user = SimpleNamespace(parent=SimpleNamespace(output=output))
    loop.step()
    control = SimpleNamespace(why_held=None)
    engine = SimpleNamespace(loop=loop, control=control)
    rows = waiting([engine])
    assert [(row["requests"], row["prompt_tokens"]) for row in rows] == [(3, 21), (1, 7)]
    assert len({row["client"] for row in rows}) == 2
    assert {row["reason"] for row in rows} == {WaitReason.ROWS}
    assert all(60 <= row["seconds"] < 600 for row in rows)
    assert "key" not in str(rows).replace("keys", "")
    control.why_held = "the engine is paused"
    assert {row["reason"] for row in waiting([engine, engine])} == {"the engine is paused"}
    loop.finish()
    assert waiting([engine]) == []


def test_reasons_to_wait():
    loop = Loop(num_slots=40, num_pages=10, max_num_seqs=4)
    loop.add([1] * 8, max_tokens=6)
    for _ in range(2):
        loop.add([2] * 9, max_tokens=6)
    loop.step()
    reasons = {loop.scheduler.wait_reason(request) for request in loop.scheduler.queues.waiting}
    assert reasons == {WaitReason.MEMORY, WaitReason.TURN}
    loop.scheduler.hold_new()
    late = loop.add([3] * 5, max_tokens=2)
    assert loop.scheduler.wait_reason(late) == WaitReason.PAUSED


def test_latencies_are_those_of_the_latest_requests():
    metrics = Metrics("tiny")
    assert metrics.latency() == {}
    for seconds in range(1, 101):
        observe = metrics.request(5)
        for tokens, finished in (([1], False), ([2], True)):
            choice = CompletionOutput(0, "a", tokens, finish_reason="stop" if finished else None)
            observe(RequestOutput("r", None, [1], [choice], finished=finished), time.monotonic() + seconds)
    found = metrics.latency()
    assert set(found) == {"first_token", "between_tokens", "whole"}
    assert 50 < found["whole"]["p50"] < 53
    assert 99 < found["whole"]["p99"] < 102


@pytest.fixture
def browser(tmp_path):
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium here (Debian: apt install chromium)")
    browser = Browser(program, tmp_path / "profile")
    yield browser
    browser.close()


def test_the_page(server, browser):
    for _ in range(2):
        server.complete("The page shows what is cached", max_tokens=4)
    server.complete("and drafts", max_tokens=30, logit_bias={"70": 100})
    browser.call("Page.navigate", url=server.url + "/")
    browser.wait("document.getElementById('state')?.textContent === 'ready'")
    browser.wait("document.getElementById('slotslegend').textContent.includes('60 in all')")
    assert "160 in all" in browser.run("document.getElementById('pageslegend').textContent")
    assert "whole prompt cached" in browser.run("document.getElementById('reasons').textContent")
    assert "place 1" in browser.run("document.getElementById('places').textContent")
    assert "%" in browser.run("document.getElementById('cached').textContent")
    # The map is drawn: not all of it has one color.
    drawn = """(() => { const c = document.getElementById('slots');
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new Set();
        for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
        return seen.size; })()"""
    assert browser.run(drawn) >= 3

    for chat in (False, True):
        browser.run(
            f"document.getElementById('chat').checked = {str(chat).lower()}; "
            "document.getElementById('tokens').value = 12; document.getElementById('form').requestSubmit()"
        )
        browser.wait("document.getElementById('usage').textContent.includes('12 new')")
        assert browser.run("document.getElementById('answer').textContent")
    expected = server.complete("The state of a recurrent model", max_tokens=12).json()["choices"][0]["text"]
    browser.run("document.getElementById('chat').checked = false; document.getElementById('form').requestSubmit()")
    browser.wait("!document.getElementById('send').disabled")
    assert browser.run("document.getElementById('answer').textContent") == expected

    assert "ms" in browser.run("document.getElementById('latency').textContent")
    assert "no requests wait" in browser.run("document.getElementById('waits').textContent")
    assert "JAX" in browser.run("document.getElementById('model').textContent")
    browser.run(
        "document.getElementById('prompt').value = 'word '.repeat(3000); "
        "document.getElementById('form').requestSubmit()"
    )
    browser.wait("document.getElementById('answer').textContent.includes('at most 511 are allowed')")
    browser.wait("rates.length >= 2")
    assert not browser.problems


class Browser:
    """One page."""

    def __init__(self, program: str, profile: Path) -> None:
        there_out, self._to = os.pipe()
        self._from, there_in = os.pipe()
        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars", f"--user-data-dir={profile}", "--window-size=1120,1000",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        # The protocol wants file descriptors 3 and 4.
        line = f'exec "$@" 3<&{there_out} 4>&{there_in}'
        silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        words = ["bash", "-c", line, "browser", *command]
        self._process = subprocess.Popen(words, pass_fds=(there_out, there_in), **silent)
        os.close(there_out)
        os.close(there_in)
        self._ids, self._left = itertools.count(1), b""
        self.problems: list[str] = []
        """Uncaught errors of the page's scripts."""
        self._session: dict[str, str] = {}
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.call("Runtime.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=1120, height=1000, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **params):
        """A command to the page: its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params} | self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(answer["params"]["exceptionDetails"]))
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def run(self, script: str):
        """The value of a JavaScript expression; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, script: str) -> None:
        """Until the expression is true."""
        assert comes_true(lambda: self.run(script), every=0.1), f"did not become true: {script}"

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._to)
        os.close(self._from)

    def _next(self):
        while b"\0" not in self._left:
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser has ended"
            self._left += piece
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)
