"""What a release consists of: package metadata, the container file, the changelog, and the workflows."""

import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
DOCKERFILE = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
STAGES = DOCKERFILE.split("\nFROM ")[1:]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def instructions(stage: str, name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", stage, flags=re.MULTILINE)


def test_the_citation_has_the_projects_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]


def test_the_changelog_has_an_unreleased_section_and_links_for_all_versions():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\]", text, flags=re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert all(f"\n[{version}]: https://" in text for version in versions)
    kinds = set(re.findall(r"^### (.+)$", text, flags=re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("package", ["checkpoints", "kernels_pallas", "mamba_jax", "serving"])
def test_packages_ship_their_type_annotations(package):
    assert (ROOT / package / "py.typed").is_file()
    assert "py.typed" in SETUPTOOLS["package-data"][package]


def test_hadolint_accepts_the_container_file():
    if shutil.which("hadolint") is None:
        pytest.skip("needs hadolint")
    done = subprocess.run(["hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_container_does_not_run_as_root():
    (user,) = instructions(STAGES[-1], "USER")
    assert int(user.split(":")[0]) > 0
    assert "HEALTHCHECK" in STAGES[-1]
    assert ":8000/ready" in STAGES[-1]  # /health is 200 while programs compile


def test_the_containers_caches_are_in_a_volume():
    assert instructions(STAGES[-1], "VOLUME") == ['["/cache"]']
    assert "XDG_CACHE_HOME=/cache" in instructions(STAGES[-1], "ENV")[0]


def test_the_container_file_copies_only_files_that_exist_and_are_not_ignored():
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[lines.index("*") :][0] == "*"
    allowed = [line[1:] for line in lines if line.startswith("!")]
    copied = [path for line in instructions(STAGES[0], "COPY") for path in line.split()[:-1]]
    assert copied
    for path in copied:
        assert (ROOT / path).exists()
        assert any(fnmatch(path, pattern) for pattern in allowed), f"{path} is in .dockerignore"


def test_build_arguments_of_the_container_name_extras():
    offered = set(re.findall(r"--build-arg ACCELERATOR=(\w+)", DOCKERFILE))
    assert offered == {"cuda", "tpu"}
    assert offered | {"traces"} <= set(PROJECT["optional-dependencies"])


def test_the_containers_python_is_supported():
    (version,) = re.findall(r"^ARG PYTHON_VERSION=(.*)$", DOCKERFILE, flags=re.MULTILINE)
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_few_permissions_time_limits_and_references_that_exist(path):
    """References to files, jobs and extras."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow[True]  # `on`, which YAML 1.1 reads as true
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job, f"{name} has no time limit"
        needs = job.get("needs", [])
        assert {needs} <= set(workflow["jobs"]) if isinstance(needs, str) else set(needs) <= set(workflow["jobs"])
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert "@" in step.get("uses", "@"), f"{name} uses an action without a version"
            command = step.get("run", "")
            for file in re.findall(r"bootstrap\.py|\.ci/run|\b\w+\.(?:toml|cff|md)\b", command):
                assert (ROOT / file).is_file(), f"{path.name} refers to {file}"
            for extra in re.findall(r'"\.\[(.+?)\]"', command):
                assert set(extra.split(",")) <= set(PROJECT["optional-dependencies"])


def test_workflows_test_all_supported_pythons():
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    supported = {line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", line)}
    assert set(matrix["python"]) == supported
    assert {name.split("-")[0] for name in matrix["os"]} == {"ubuntu", "macos"}


def test_a_release_contains_the_pure_wheel_and_the_source_distribution():
    jobs = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())["jobs"]
    assert set(jobs["release"]["needs"]) == {"wheels", "pure", "sdist"}
    pure = jobs["pure"]
    assert pure["env"]["MAMBA_JAX_NO_NATIVE"] == "1"
    assert any("*-py3-none-any.whl && cd / && mamba-jax generate" in step.get("run", "") for step in pure["steps"])
