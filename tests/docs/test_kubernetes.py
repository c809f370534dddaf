"""The example for Kubernetes: by Kubernetes' own schemas, and by what the program and its parts are called."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from serving.cli.main import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kubernetes.yaml"
OBJECTS = list(yaml.safe_load_all(PAGE.read_text()))
PODS = {each["metadata"]["name"]: each["spec"]["template"] for each in OBJECTS if "template" in each["spec"]}
ROLES = {"mamba-jax-prefill": "prefill", "mamba-jax-decode": "decode", "mamba-jax-router": "router"}


def names(kind):
    return {each["metadata"]["name"]: each for each in OBJECTS if each["kind"] == kind}


def container(name):
    (only,) = PODS[name]["spec"]["containers"]
    return only


@pytest.mark.parametrize("number", range(len(OBJECTS)))
def test_each_object_is_what_kubernetes_takes(number):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, of the extra test")
    kubernetes.validate(OBJECTS[number], kubernetes.latest_version(), strict=True)


@pytest.mark.parametrize("name", ROLES)
def test_commands_are_those_of_the_program(name):
    program, command, *given = container(name)["command"]
    assert program == "mamba-jax"
    known = typer.main.get_command(app).commands[command].params
    options = {option for parameter in known for option in parameter.opts}
    used = {word.partition("=")[0] for word in given if word.startswith("--")}
    assert used
    assert used <= options
    assert PODS[name]["metadata"]["labels"]["role"] == ROLES[name]


@pytest.mark.parametrize("name", ["mamba-jax-prefill", "mamba-jax-decode"])
def test_a_worker_may_take_its_time_to_start(name):
    found = container(name)
    startup = found["startupProbe"]
    assert startup["httpGet"]["path"] == "/health"
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    assert found["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert found["livenessProbe"]["httpGet"]["path"] == "/health"


def test_all_have_the_fleets_secret_and_key():
    for name in ROLES:
        variables = {each["name"] for each in container(name)["env"]}
        assert {"MAMBA_JAX_SPLIT_SECRET", "MAMBA_JAX_API_KEY"} <= variables


def test_the_router_knows_every_worker():
    sets, services = names("StatefulSet"), names("Service")
    wanted = {
        f"--{ROLES[name]}=http://{name}-{i}.{name}:8000"
        for name, each in sets.items()
        for i in range(each["spec"]["replicas"])
    }
    used = {word for word in container("mamba-jax-router")["command"] if "http://" in word}
    assert used == wanted
    for url in used:
        assert urlsplit(url.partition("=")[2]).hostname.split(".")[1] in services


def test_strangers_reach_the_router_only():
    (policy,) = names("NetworkPolicy").values()
    chosen = policy["spec"]["podSelector"]
    assert chosen["matchExpressions"] == [{"key": "role", "operator": "In", "values": ["prefill", "decode"]}]
    (rule,) = policy["spec"]["ingress"]
    (source,) = rule["from"]
    assert source["podSelector"]["matchLabels"] == chosen["matchLabels"]
    for template in PODS.values():
        assert chosen["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert names("Service")["mamba-jax"]["spec"]["selector"]["role"] == "router"
