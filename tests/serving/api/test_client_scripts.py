"""Client scripts of benchmarks/clients that need nothing but the test extra."""

from benchmarks.clients.openai_sdk import main


def test_the_openai_sdk(server, capsys):
    assert main(["--url", server.url]) == 0
    said = capsys.readouterr().out
    assert "came from the cache" in said
    assert "refused" in said
