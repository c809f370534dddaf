"""The Kustomize bases of a server, a split and several hosts: Kubernetes' schemas, flags and pod security."""

import math
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from serving.cli import main

BASES = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"


def objects_of(base):
    files = yaml.safe_load((BASES / base / "kustomization.yaml").read_text())["resources"]
    return [each for name in files for each in yaml.safe_load_all((BASES / base / name).read_text())]


SERVER, OBJECTS = objects_of("server"), objects_of("split")
SET, HOSTS_SERVICE, HOSTS_POLICY = objects_of("several-hosts")
GROUP = SET["spec"]["leaderWorkerTemplate"]
HOSTS = [GROUP["leaderTemplate"], GROUP["workerTemplate"]]
HOSTS_OBJECTS = [
    HOSTS_SERVICE,
    HOSTS_POLICY,
    *({"apiVersion": "v1", "kind": "Pod", **each, "metadata": {"name": "one", **each["metadata"]}} for each in HOSTS),
]
PODS = {each["metadata"]["name"]: each["spec"]["template"] for each in OBJECTS if "template" in each["spec"]}
ROLES = {"mamba-jax-prefill": "prefill", "mamba-jax-decode": "decode", "mamba-jax-router": "router"}


def names(kind):
    return {each["metadata"]["name"]: each for each in OBJECTS if each["kind"] == kind}


def container(name):
    (only,) = PODS[name]["spec"]["containers"]
    return only


def validate(objects):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, of the extra test")
    for each in objects:
        kubernetes.validate(each, kubernetes.latest_version(), strict=True)


@pytest.mark.parametrize("objects", [SERVER, OBJECTS, HOSTS_OBJECTS], ids=["server", "split", "several-hosts"])
def test_objects_match_kubernetes_schemas(objects):
    validate(objects)


@pytest.mark.parametrize("base", ["server", "server-gpu", "llm-d", "split", "several-hosts"])
def test_kustomize_sets_image_and_namespace(base, tmp_path):
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which contains kustomize")
    shutil.copytree(BASES, tmp_path / "bases")
    image = {"name": "mamba-jax", "newName": "registry.example.com/mamba-jax", "newTag": "1"}
    overlay = {"resources": [f"bases/{base}"], "namespace": "models", "images": [image]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    objects = list(yaml.safe_load_all(done.stdout))
    validate([each for each in objects if each["kind"] != "LeaderWorkerSet"])
    assert all(each["metadata"]["namespace"] == "models" for each in objects)
    images = re.findall(r"image: (.*)", done.stdout)
    assert images
    assert set(images) == {"registry.example.com/mamba-jax:1"}
    assert ("nvidia.com/gpu: 1" in done.stdout) == (base == "server-gpu")


def test_pods_run_without_privileges():
    templates = [each["spec"]["template"] for each in SERVER + OBJECTS if "template" in each["spec"]]
    assert len(templates) == 4
    for template in templates:
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["automountServiceAccountToken"] is False
        (only,) = template["spec"]["containers"]
        assert only["securityContext"]["allowPrivilegeEscalation"] is False
        assert only["securityContext"]["readOnlyRootFilesystem"] is True
        assert "/tmp" in {mount["mountPath"] for mount in only["volumeMounts"]}


def check_command(words):
    program, command, *arguments = words
    assert program == "mamba-jax"
    known = main.command(command).params
    options = {option for parameter in known for option in parameter.opts}
    used = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    assert used
    assert used <= options


@pytest.mark.parametrize("name", ROLES)
def test_commands_use_existing_flags_and_have_the_secret_and_the_key(name):
    check_command(container(name)["command"])
    assert {"MAMBA_JAX_SPLIT_SECRET", "MAMBA_JAX_API_KEY"} <= {each["name"] for each in container(name)["env"]}
    assert PODS[name]["metadata"]["labels"]["role"] == ROLES[name]


def test_the_servers_command_uses_existing_flags():
    (deployment,) = [each for each in SERVER if each["kind"] == "Deployment"]
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    check_command(only["command"])
    (service,) = [each for each in SERVER if each["kind"] == "Service"]
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("name", ["mamba-jax-prefill", "mamba-jax-decode"])
def test_probes_allow_a_slow_start(name):
    worker = container(name)
    startup = worker["startupProbe"]
    assert startup["httpGet"]["path"] == "/health"
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    assert worker["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert worker["livenessProbe"]["httpGet"]["path"] == "/health"


def test_the_router_is_given_every_worker():
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


def test_clients_reach_the_router_only():
    (policy,) = names("NetworkPolicy").values()
    chosen = policy["spec"]["podSelector"]
    assert chosen["matchExpressions"] == [{"key": "role", "operator": "In", "values": ["prefill", "decode"]}]
    (rule,) = policy["spec"]["ingress"]
    (source,) = rule["from"]
    assert source["podSelector"]["matchLabels"] == chosen["matchLabels"]
    for template in PODS.values():
        assert chosen["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert names("Service")["mamba-jax"]["spec"]["selector"]["role"] == "router"


def test_the_set_uses_known_fields_and_values():
    """The fields of leaderworkerset.x-k8s.io/v1 that are used, and their values."""
    assert (SET["apiVersion"], SET["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    known = {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig"}
    assert SET["spec"].keys() <= known
    assert GROUP.keys() == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    # All pods of a group restart together, and the leader is ready only when all of them are.
    assert GROUP["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert SET["spec"]["startupPolicy"] == "LeaderCreated"
    assert list(SET["metadata"]["annotations"]) == ["leaderworkerset.sigs.k8s.io/exclusive-topology"]


def test_all_hosts_run_the_same_command_of_the_program():
    leader, follower = (template["spec"]["containers"][0]["command"] for template in HOSTS)
    assert leader == follower
    check_command(leader)
    flags = dict(zip(leader[2::2], leader[3::2], strict=True))
    assert flags["--coordinator"] == "$(LWS_LEADER_ADDRESS):8476"
    assert (flags["--num-hosts"], flags["--host-id"]) == ("$(LWS_GROUP_SIZE)", "$(LWS_WORKER_INDEX)")
    assert (flags["--plan-port"], flags["--port"]) == ("8477", "8000")


def test_the_hosts_are_those_of_the_slice():
    chips = math.prod(map(int, HOSTS[0]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    for template in HOSTS:
        assert template["spec"]["nodeSelector"] == HOSTS[0]["spec"]["nodeSelector"]
        limits = template["spec"]["containers"][0]["resources"]["limits"]
        assert limits["google.com/tpu"] * GROUP["size"] == chips


def test_clients_reach_leaders_only_and_only_by_http():
    leader, follower = (template["metadata"]["labels"] for template in HOSTS)
    chosen = HOSTS_SERVICE["spec"]["selector"].items()
    assert chosen <= leader.items()
    assert not chosen <= follower.items()
    hosts, clients = HOSTS_POLICY["spec"]["ingress"]
    assert hosts["from"][0]["podSelector"] == HOSTS_POLICY["spec"]["podSelector"]
    assert clients == {"ports": [{"port": 8000}]}
    assert HOSTS_POLICY["spec"]["podSelector"]["matchLabels"].items() <= leader.items() & follower.items()
