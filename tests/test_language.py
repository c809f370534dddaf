"""The style guide of CONTRIBUTING.md: banned words and class names, in source, messages, documents and tests.

`python -m tests.test_language` prints the current counts. A count in ALLOWED may only be lowered.
"""

import re
from collections import Counter
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
ALLOWED = {
    "benchmarks": 3,
    "docs": 3,
    "kernels_pallas": 2,
    "mamba_jax": 6,
    "serving/api": 2,
    "serving/cli": 2,
    "serving/core": 3,
    "serving/engine": 1,
    "serving/hosts": 1,
    "serving/split": 12,
    "serving/tiers": 2,
    "tests": 106,
}
"""What is not rewritten yet."""


def group_of(path: str) -> str:
    """The key of a file in ALLOWED: its package within `serving`, its folder at the top elsewhere."""
    parts = path.split("/")
    if len(parts) == 1:
        return "."
    return "/".join(parts[:2]) if parts[0] == "serving" and len(parts) > 2 else parts[0]


def banned_in(text: str) -> list[str]:
    joined = re.sub(r"\s+#?\s*", " ", text)  # phrases may continue on the next line
    return [match[0].strip() for match in _PHRASE.finditer(joined)] + [m[0].strip() for m in _CLASS.finditer(text)]


def counts() -> tuple[Counter[str], dict[str, list[str]]]:
    """Banned words per group, and the places."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    number, places = Counter(), {}
    for path in sorted(files):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in SUFFIXES and name not in EXEMPT:
            words = banned_in(path.read_text(encoding="utf-8"))
            number[group_of(name)] += len(words)
            if words:
                places.setdefault(group_of(name), []).append(f"{name}: {', '.join(words)}")
    return number, places


NUMBER, PLACES = counts()


@pytest.mark.parametrize("group", sorted(NUMBER))
def test_no_more_banned_words_than_allowed(group):
    found = "\n".join(PLACES.get(group, []))
    assert NUMBER[group] <= ALLOWED.get(group, 0), f"see the style guide in CONTRIBUTING.md:\n{found}"


def test_allowances_are_for_existing_groups():
    assert set(ALLOWED) <= set(NUMBER)


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
    for key, value in sorted(NUMBER.items()):
        if value:
            print(f'    "{key}": {value},')
    print("\n".join(line for lines in PLACES.values() for line in lines))
