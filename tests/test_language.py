"""The style guide of CONTRIBUTING.md: banned words and class names, in source, messages, documents and tests.

`python -m tests.test_language` prints the files that contain one.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PHRASES = (
    "nobody", "whoever", "somebody", "whom", "beside", "stranger", "strangers", "what is there of", "is to be had",
    "makes no sense", "none of it", "said of",
)  # fmt: skip
CLASSES = ("Given", "Found", "Held", "Kept", "Asked", "Share", "Want", "Served", "Nonsense")
# Underscores separate words here, so that names of tests and functions are searched, too.
_PHRASE = re.compile(rf"(?<![a-z])(?:{'|'.join(PHRASES).replace(' ', '[ _]')})(?![a-z])", flags=re.IGNORECASE)
_CLASS = re.compile(rf"^\s*class (?:{'|'.join(CLASSES)})\b", flags=re.MULTILINE)
SUFFIXES = {".py", ".md", ".cc", ".h", ".html", ".js", ".yml", ".yaml", ".toml"}
EXEMPT = {"CONTRIBUTING.md", "tests/test_language.py"}
"""They quote the words."""
FOLDERS = ("benchmarks", "checkpoints", "deploy", "docs", "kernels_pallas", "mamba_jax", "serving", "tests", ".github")


def banned_in(text: str) -> list[str]:
    joined = re.sub(r"\s+#?\s*", " ", text)  # phrases may continue on the next line
    return [match[0].strip() for match in _PHRASE.finditer(joined)] + [m[0].strip() for m in _CLASS.finditer(text)]


def places() -> list[str]:
    """The files that contain banned words, with the words."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    found = []
    for path in sorted(files):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in SUFFIXES and name not in EXEMPT and (words := banned_in(path.read_text(encoding="utf-8"))):
            found.append(f"{name}: {', '.join(words)}")
    return found


def test_no_file_contains_banned_words():
    assert not (found := places()), "see the style guide in CONTRIBUTING.md:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# Nobody waits\n", ["Nobody"]),
        ("def test_a_stranger_is_refused(): ...", ["stranger"]),
        ("class Found(Exception): ...", ["class Found"]),
        ("# it makes no\n    # sense", ["makes no sense"]),
        ("besides, the strangest class Finder is said officially", []),
    ],
)
def test_banned_words_are_recognized(text, words):
    assert banned_in(text) == words


if __name__ == "__main__":
    print("\n".join(places()))
