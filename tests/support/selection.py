"""Which tests run: the default tier, all but the slow ones (`--full`), or all (`--slow`).

A test belongs to the default tier unless a marker says otherwise:

* `full`: runs with `--full`. On a module: all its tests but those marked `smoke`.
* `smoke`: of the test's cases, the first runs by default. `smoke("a", "b")`: the first for each combination of values
  of the parameters `a` and `b`. A test that classes inherit runs once for each class.
* `slow`: runs with `--slow`.

Each test of the default tier is given the marker `tier_1`, so that CI does not run it twice.

A file or test that the command line names runs as with `--full`. Tests that are not selected are deselected.
"""

import functools
import re
from collections.abc import Collection, Hashable, Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
WORD = re.compile(r"\w+")
DEFINITION = re.compile(r"^\s*(?:async )?(?:def|class) (\w+)", re.MULTILINE)
ALL_FULL = re.compile(r"^pytestmark = .*\bmark\.(full|slow)\b", re.MULTILINE)
CHOICE = re.compile(r"\(?(full|smoke|fuzz)\b(?: or (full|smoke|fuzz)\b)?\)?(?: and not \w+)*")
"""Of `-m`: what is chosen by one or two of these markers, apart from what other markers leave out."""
IMPORT = re.compile(r"^from (?:tests\.\w[\w.]*\.)?(test_\w+) import", re.MULTILINE)


def slow(*values: object) -> object:
    """A case of parameters that runs with `--slow` only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def some_slow(values: Iterable[object], *chosen: object) -> list[object]:
    """The values of a parameter; those that are chosen run with `--slow` only."""
    return [slow(value) if value in chosen else value for value in values]


def full_tier(config: pytest.Config) -> bool:
    """Whether the full tier is selected as a whole."""
    return config.getoption("--full") or config.getoption("--slow")


def named_files(config: pytest.Config) -> set[Path]:
    """Returns the files that the command line names."""
    paths = (config.invocation_params.dir / argument.split("::")[0] for argument in config.args)
    return {path for path in paths if path.is_file()}


class Selector:
    """Decides for each test, in the order of collection."""

    def __init__(self, *, full: bool = False, slow: bool = False, named: Collection[Path] = ()) -> None:
        self.full, self.slow, self._named = full, slow, named
        self._met: set[Hashable] = set()

    def __call__(self, item: pytest.Item) -> bool:
        if item.get_closest_marker("slow"):
            return self.slow
        if self.full or item.path in self._named:
            return True
        smoke = item.get_closest_marker("smoke")
        if smoke:
            return self._is_first_case(item, smoke.args)
        return not item.get_closest_marker("full")

    def _is_first_case(self, item: pytest.Item, parameters: tuple[str, ...]) -> bool:
        case = getattr(item, "callspec", None)
        key = (item.nodeid.split("[")[0], *(repr(case.params[name]) for name in parameters if case))
        first = key not in self._met
        self._met.add(key)
        return first


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the selected tests in `items` and report the others as deselected."""
    default, selected, deselected = Selector(), [], []
    selector = Selector(full=full_tier(config), slow=config.getoption("--slow"), named=named_files(config))
    for item in items:
        if default(item):
            item.add_marker("tier_1")
        (selected if selector(item) else deselected).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
    # Files with random traffic first: the longest must not be what one worker runs alone in the end.
    long = {item.path for item in selected if item.get_closest_marker("fuzz")}
    items[:] = sorted(selected, key=lambda item: item.path not in long)


def ignored(path: Path, config: pytest.Config) -> bool | None:
    """True for a file of which no test is selected, so that it need not be imported.

    In the default tier, these are files whose module is marked `full` or `slow` and whose text has no `smoke`. With
    `-m "full or smoke"` and the like, these are files that name none of these markers. With
    `-k NAME`, these are files without a test that NAME could select, if NAME is one word that occurs in the name of a
    test, class or file: such a word is not looked for in the values of parameters. None (no opinion) otherwise.
    """
    if not path.match("test_*.py"):
        return None
    if _is_left_out(path, config):
        return True
    word = config.getoption("keyword") or ""
    if not WORD.fullmatch(word) or word in ("and", "or", "not"):
        return None
    found = _files_with(word.lower())
    return True if found and path not in found else None


def _is_left_out(path: Path, config: pytest.Config) -> bool:
    """Whether the tier, or what `-m` chooses of it, has none of a file's tests."""
    if path in named_files(config):
        return False
    text, choice = path.read_text(), CHOICE.fullmatch(config.getoption("markexpr") or "")
    if choice:
        near = path.with_name("conftest.py")  # its parameters may have marks
        marked = text + (near.read_text() if near.exists() else "")
        if not any(f"mark.{name}" in marked for name in choice.groups() if name):
            return True
    return not full_tier(config) and ALL_FULL.search(text) is not None and "smoke" not in text


@functools.cache
def _files_with(word: str) -> frozenset[Path]:
    """The test files in which `word` is part of the name of a test, a class, the file or one of its folders.

    A file that imports from another test file may inherit its tests.
    """
    texts = {path: path.read_text() for path in TESTS.rglob("test_*.py")}
    found = {
        path
        for path, text in texts.items()
        if word in str(path.relative_to(TESTS)).lower()
        or any(word in name.lower() for name in DEFINITION.findall(text) if name.lower().startswith("test"))
    }
    names = {path.stem for path in found}
    return frozenset(found | {path for path, text in texts.items() if names & set(IMPORT.findall(text))})
