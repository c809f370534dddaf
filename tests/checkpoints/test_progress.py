"""Loading tells how far it is, also where there is no terminal."""

import logging

from checkpoints import placing


def test_loading(monkeypatch, caplog):
    monkeypatch.setattr(placing, "LINE_EVERY", -1.0)
    caplog.set_level(logging.INFO, logger="checkpoints")
    with placing.progress_bar("Loading it", 3_000_000_000, True) as advance:
        advance(1_500_000_000)
    assert caplog.messages == ["Loading it: 1.5 of 3.0 GB"]
