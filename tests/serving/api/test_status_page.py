"""The status page in a real browser."""

import os
from pathlib import Path

import pytest

from tests.support.browser import Browser, find_chromium


@pytest.fixture
def browser(tmp_path):
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here (Debian: apt install chromium)")
    browser = Browser(program, tmp_path / "profile")
    yield browser
    browser.close()


def test_the_page(server, browser):
    for _ in range(2):
        server.complete("The page shows what is cached", max_tokens=4)
    server.complete("and drafts", max_tokens=30, logit_bias={"70": 100})
    browser.go(server.url + "/")
    browser.wait("document.getElementById('state')?.textContent === 'ready'")
    browser.wait("document.getElementById('slotslegend').textContent.includes('60 in all')")
    assert "160 in all" in browser.run("document.getElementById('pageslegend').textContent")
    assert "whole prompt cached" in browser.run("document.getElementById('reasons').textContent")
    assert "place 1" in browser.run("document.getElementById('places').textContent")
    assert "%" in browser.run("document.getElementById('cached').textContent")
    # The map is drawn: not all of it has one colour.
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

    picture = browser.screenshot()
    browser.run(
        "document.getElementById('prompt').value = 'word '.repeat(3000); "
        "document.getElementById('form').requestSubmit()"
    )
    browser.wait("document.getElementById('answer').textContent.includes('at most 511 are allowed')")
    browser.wait("rates.length >= 2")
    assert not browser.problems
    assert picture.startswith(b"\x89PNG")
    if "SAVE_SCREENSHOT" in os.environ:
        Path(os.environ["SAVE_SCREENSHOT"]).write_bytes(picture)
