"""Which tests of kernels a recorded pass allows to skip."""

import json
from types import SimpleNamespace

import pytest

from tests.support import recorded_passes
from tests.support.recorded_passes import PASSED, ROOT, digest

FILES = {
    "pyproject.toml": "",
    "kernels_pallas/scan.py": "# see mamba_jax.other",
    "kernels_pallas/native/__init__.py": "",
    "kernels_pallas/native/scan.cc": "",
    "mamba_jax/layer.py": "from mamba_jax import deep\n",
    "mamba_jax/deep.py": "",
    "mamba_jax/other.py": "",
    "tests/conftest.py": "import pytest\n\ndef fixture():\n    from mamba_jax import other\n",
    "tests/kernels_pallas/helper.py": "LAYER = 'mamba_jax.layer'",
    "tests/kernels_pallas/test_scan.py": "from helper import LAYER",
    "tests/kernels_pallas/test_other.py": "import mamba_jax.other",
}
TEST = "tests/kernels_pallas/test_scan.py"


def digest_of(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return digest(root, TEST)


@pytest.mark.parametrize("changed", FILES)
def test_a_change_of_what_a_test_follows_from_changes_its_digest(changed, tmp_path):
    before = digest_of(tmp_path / "before", FILES)
    after = digest_of(tmp_path / "after", FILES | {changed: f"{FILES[changed]}\n# changed"})
    assert (before == after) == (changed in ("mamba_jax/other.py", "tests/kernels_pallas/test_other.py"))


def item(*markers, file=TEST):
    found = dict.fromkeys(markers, pytest.mark.skip)
    return SimpleNamespace(
        path=ROOT / file, get_closest_marker=found.get, add_marker=lambda mark: found.update(skip=mark)
    )


@pytest.mark.parametrize(
    ("markers", "file", "recorded", "skipped"),
    [
        ((), "tests/kernels_pallas/test_dispatch.py", "same", True),
        ((), "tests/kernels_pallas/test_dispatch.py", "other versions", False),
        ((), "tests/kernels_pallas/test_dispatch.py", "other", False),
        ((), "tests/kernels_pallas/test_slots.py", None, False),
        (("tier_1",), "tests/kernels_pallas/test_dispatch.py", "same", False),
        (("slow",), "tests/kernels_pallas/test_dispatch.py", "same", False),
        (("tpu_compile",), "tests/serving/capacity/test_plan.py", "same", True),
        ((), "tests/serving/capacity/test_plan.py", "same", False),
    ],
)
def test_only_tests_of_kernels_outside_the_default_tier_are_skipped(
    markers, file, recorded, skipped, tmp_path, monkeypatch
):
    versions = {"jaxlib": "0" if recorded == "other versions" else recorded_passes._version("jaxlib")}
    passed = {file: "0" if recorded == "other" else digest(ROOT, file)} if recorded else {}
    monkeypatch.setattr(recorded_passes, "PASSED", tmp_path / "passed.json")
    (tmp_path / "passed.json").write_text(json.dumps({"versions": versions, "files": passed}))
    chosen = item(*markers, file=file)
    recorded_passes.skip_recorded([chosen])
    assert bool(chosen.get_closest_marker("skip")) == skipped
    assert ("(recorded: 0)" in recorded_passes.other_versions()) == (recorded == "other versions")


def test_passes_are_recorded_of_files_that_are_there():
    assert all((ROOT / file).is_file() for file in json.loads(PASSED.read_text())["files"])


@pytest.mark.parametrize("option", [{"keyword": "scan"}, {"markexpr": "full"}, {"full": False}, {"args": ["a.py::b"]}])
def test_a_run_of_some_tests_records_nothing(option):
    whole = {"keyword": "", "markexpr": "", "full": True, "args": ["tests/kernels_pallas"]} | option
    config = SimpleNamespace(option=SimpleNamespace(**whole), args=whole["args"])
    with pytest.raises(pytest.UsageError, match="whole files"):
        recorded_passes.PassRecorder(config)


def test_a_run_with_a_failure_records_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded_passes, "PASSED", tmp_path / "passed.json")
    option = SimpleNamespace(keyword="", markexpr="", full=True)
    recorder = recorded_passes.PassRecorder(SimpleNamespace(option=option, args=["tests/kernels_pallas"]))
    recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=f"{TEST.replace('scan', 'dispatch')}::test_a"))
    recorder.pytest_sessionfinish(exitstatus=pytest.ExitCode.TESTS_FAILED)
    assert not recorded_passes.PASSED.exists()
    recorder.pytest_sessionfinish(exitstatus=pytest.ExitCode.OK)
    assert list(json.loads(recorded_passes.PASSED.read_text())["files"]) == ["tests/kernels_pallas/test_dispatch.py"]
