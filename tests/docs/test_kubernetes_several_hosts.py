"""The Kustomize base of several hosts: the schemas of Kubernetes and LeaderWorkerSet, and the program's flags."""

from pathlib import Path

import pytest
import yaml

from serving.cli.main import command

BASE = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "several-hosts"
SET, SERVICE, POLICY = (
    yaml.safe_load((BASE / name).read_text())
    for name in yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
)
GROUP = SET["spec"]["leaderWorkerTemplate"]
TEMPLATES = [GROUP["leaderTemplate"], GROUP["workerTemplate"]]
PORT = {"coordinator": 8476, "plan": 8477, "http": 8000}


def pod(template):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "one", **template["metadata"]},
        "spec": template["spec"],
    }


@pytest.mark.parametrize(
    "thing", [SERVICE, POLICY, *map(pod, TEMPLATES)], ids=["service", "policy", "leader", "follower"]
)
def test_objects_match_kubernetes_schemas(thing):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, of the extra test")
    kubernetes.validate(thing, kubernetes.latest_version(), strict=True)


def test_the_set_uses_known_fields_and_values():
    """The fields of leaderworkerset.x-k8s.io/v1 that are used, and their values."""
    assert (SET["apiVersion"], SET["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    assert SET["spec"].keys() <= {
        "replicas",
        "leaderWorkerTemplate",
        "rolloutStrategy",
        "startupPolicy",
        "networkConfig",
    }
    assert GROUP.keys() == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    # All pods of a group restart together, and the leader is ready only when all of them are.
    assert GROUP["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert SET["spec"]["startupPolicy"] == "LeaderCreated"
    assert list(SET["metadata"]["annotations"]) == ["leaderworkerset.sigs.k8s.io/exclusive-topology"]


def test_all_hosts_run_the_same_command_of_the_program():
    leader, follower = (template["spec"]["containers"][0]["command"] for template in TEMPLATES)
    assert leader == follower
    assert leader[:2] == ["mamba-jax", "serve"]
    known = {option for each in command("serve").params for option in each.opts}
    assert {word for word in leader if word.startswith("--")} <= known
    flags = dict(zip(leader[2::2], leader[3::2], strict=True))
    assert flags["--coordinator"] == f"$(LWS_LEADER_ADDRESS):{PORT['coordinator']}"
    assert (flags["--num-hosts"], flags["--host-id"]) == ("$(LWS_GROUP_SIZE)", "$(LWS_WORKER_INDEX)")
    assert (flags["--plan-port"], flags["--port"]) == (str(PORT["plan"]), str(PORT["http"]))


def test_the_hosts_are_those_of_the_slice():
    chips = 1
    for side in TEMPLATES[0]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"):
        chips *= int(side)
    for template in TEMPLATES:
        assert template["spec"]["nodeSelector"] == TEMPLATES[0]["spec"]["nodeSelector"]
        limits = template["spec"]["containers"][0]["resources"]["limits"]
        assert limits["google.com/tpu"] * GROUP["size"] == chips


def test_clients_reach_leaders_only_and_only_by_http():
    leader, follower = (template["metadata"]["labels"] for template in TEMPLATES)
    chosen = SERVICE["spec"]["selector"].items()
    assert chosen <= leader.items()
    assert not chosen <= follower.items()
    hosts, clients = POLICY["spec"]["ingress"]
    assert hosts["from"][0]["podSelector"] == POLICY["spec"]["podSelector"]
    assert clients == {"ports": [{"port": PORT["http"]}]}
    assert POLICY["spec"]["podSelector"]["matchLabels"].items() <= leader.items() & follower.items()
