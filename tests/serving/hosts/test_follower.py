"""A follower does what it is told in order, and ends where it cannot."""

from types import SimpleNamespace

import pytest

from serving.config import ConfigError, EngineConfig
from serving.core.errors import RequestError
from serving.engine.control import Control
from serving.hosts.host import Leader, facts_of, follow, to_bytes
from serving.hosts.settings import HostSettings
from tests.serving.hosts.test_wire import VOCAB, builder


class Told:
    """A group of one whose other side is a list."""

    host = 1

    def __init__(self, messages=()):
        self.messages = messages

    def calls(self):
        return iter(self.messages)

    def tell(self, kind, *pieces):
        """Discards the message."""

    def end(self, line, code=1):
        raise SystemExit(line)

    def step_failed(self, error):
        raise SystemExit(f"failed: {error}")


class Loop:
    def __init__(self):
        self.batches, self.ran = builder(), []

    def run(self, batch):
        if len(self.ran) == 5:
            raise RuntimeError("the device is on fire")
        self.ran.append(batch)


def follower_of(messages):
    built = SimpleNamespace(digest="weights", engine=SimpleNamespace(loop=Loop(), vocab_size=VOCAB))
    return built, Told(messages)


def calls(count, start=0, **changes):
    batches = list(builder(**changes).warm_up_batches(VOCAB))[:count]
    return [b"".join(to_bytes(start + i, batch)) for i, batch in enumerate(batches)]


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        (calls(2, start=1), "host 1 received call 1 of host 0, expected 0"),
        ([*calls(2), *calls(1)], "host 1 received call 0 of host 0, expected 2"),
        ([b"{}"], "host 1 cannot follow call 0 of host 0: no header"),
        (calls(6), "failed: the device is on fire"),
        (calls(9, max_num_seqs=3), "host 1 cannot follow call 2 of host 0: there is no program for it"),
    ],
)
def test_it_ends_where_it_cannot_follow(messages, line):
    with pytest.raises(SystemExit, match=line):
        follow(*follower_of(messages))


@pytest.mark.parametrize("what", ["sleep", "update_weights"])
def test_what_is_no_step_is_refused_by_a_leader(what):
    loop = SimpleNamespace(followers=object(), sources=[])
    control = Control(loop, SimpleNamespace(whole=True), drain=list, abort_all=list)
    with pytest.raises(RequestError, match="on several hosts"):
        control.sleep() if what == "sleep" else control.update_weights({})


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"num_hosts": 2}, "must be given together"),
        ({"coordinator": "a:1", "num_hosts": 2, "host_id": 2}, "the 2 hosts are 0 to 1"),
        ({"coordinator": "a:b", "num_hosts": 2, "host_id": 1}, "coordinator: "),
        ({"host_timeout": 0.5}, "host_timeout: "),
        ({"plan_port": 70_000}, "plan_port: "),
    ],
)
def test_bad_settings_are_one_line(given, line):
    with pytest.raises(ConfigError, match=line):
        HostSettings.create(**given)


def test_one_host_alone_is_none_of_several():
    assert not HostSettings.create().several
    assert not HostSettings.create(coordinator="a:1", num_hosts=1, host_id=0).several
    assert HostSettings.create(coordinator="a:1", num_hosts=2, host_id=0).several
    assert HostSettings.create(distributed=True).several


@pytest.mark.parametrize(
    ("given", "place"), [("a", "a:8476"), ("a.b:1", "a.b:1"), ("[::1]", "[::1]:8476"), ("[::1]:1", "[::1]:1")]
)
def test_the_coordinators_port_need_not_be_given(given, place):
    assert HostSettings.create(coordinator=given, num_hosts=2, host_id=0).meeting_place == place


SLURM = {"SLURM_JOB_ID": "5000", "SLURM_NTASKS": "3", "SLURM_PROCID": "2", "SLURM_STEP_NODELIST": "node[007-009],a"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
GKE = {"TPU_WORKER_HOSTNAMES": "t-0.x,t-1.x", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (SLURM, ("node007:62344", 3, 2)),
        (SLURM | {"SLURM_STEP_NODELIST": "n1,n2", "JAX_COORDINATOR_PORT": "77"}, ("n1:77", 3, 2)),
        (MPI | {"OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.9.0.1,10.1.0.1:34911"}, ("10.9.0.1:61442", 2, 1)),
        (MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::b,26::3]:43370"}, ("[fe80::b]:61441", 2, 1)),
        (SLURM | MPI | {"OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.9.0.1:34911"}, ("10.9.0.1:61442", 2, 1)),
        (GKE, ("t-0.x:61440", 2, 1)),
        (GKE | {"TPU_PROCESS_ADDRESSES": "t-0.x:8471,t-0.x:8472,t-1.x:8471"}, ("t-0.x:61440", 3, 1)),
        (GKE | {"MEGASCALE_NUM_SLICES": "2"}, (None, None, None)),
        ({"SLURM_STEP_NODELIST": "n1", "SLURM_JOB_ID": "5"}, (None, None, None)),
        ({}, (None, None, None)),
    ],
)
def test_the_environment_names_the_coordinator(variables, expected):
    given = HostSettings.create(distributed=True, host_timeout=9.0).in_environment(variables)
    assert (given.coordinator, given.num_hosts, given.host_id) == expected
    assert (given.distributed, given.host_timeout) == (True, 9.0)
    own = HostSettings.create(coordinator="a", num_hosts=2, host_id=0)
    assert own.in_environment(variables) == own


def test_hosts_with_other_weights_end_before_the_first_step():
    """Their configurations may be equal: every answer would be wrong."""
    group, loaded = Told(), {1: "weights", 2: "weights"}
    group.wait_until_ready = lambda: loaded
    leader = Leader(SimpleNamespace(), group, "weights")
    leader.wait_until_ready()
    loaded[2] = "others"
    with pytest.raises(SystemExit, match=r"host 2 has loaded other weights than host 0 .*--revision"):
        leader.wait_until_ready()


def test_a_revision_is_compared():
    one, other = (facts_of(EngineConfig.create(model="demo", revision=revision)) for revision in (None, "v2"))
    assert {name for name in one if one[name] != other[name]} == {"--revision"}
