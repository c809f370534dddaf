"""Compiling tells how far it is, also where there is no terminal."""

import logging
from types import SimpleNamespace

from serving.engine.programs import warmup


def test_lines_of_the_log(monkeypatch, caplog):
    monkeypatch.setattr(warmup, "LINE_EVERY", -1.0)
    loop = SimpleNamespace(
        batches=SimpleNamespace(warm_up_batches=lambda vocab_size: [1, 2]),
        programs=SimpleNamespace(compilations=2),
        warm_up=lambda batches, advance: [advance() for _ in batches],
    )
    with caplog.at_level(logging.INFO, logger="serving"):
        warmup.warm_up(loop, 10, progress=False)
    assert "compiling: 1 of 2 programs" in caplog.messages[0]
