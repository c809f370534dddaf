"""`mamba-jax serve` as two processes: a client sees one server, and its end is the end of both."""

import contextlib
import signal

import httpx
import pytest

from tests.support.fleets.processes import Process, client, free_port, running, streamed, worker

pytestmark = pytest.mark.slow
PROMPT = "Tom has 5 apples."


class Pair(contextlib.ExitStack):
    """Host 0 and host 1; both are killed in the end."""

    def __init__(self, folder, *more, **engine):
        super().__init__()
        at = ("--coordinator", f"127.0.0.1:{free_port()}", "--num-hosts", "2", "--admin-key", "operator")
        self.hosts: list[Process] = []
        for host in range(2):
            self.hosts.append(worker("", folder, *at, "--host-id", str(host), *more, **engine))
            self.callback(self.hosts[host].kill)


def test_two_hosts_are_one_server_and_end_in_order(tmp_path):
    with Pair(tmp_path, num_speculative_tokens=2, speculative_method="ngram") as pair:
        leader, follower = pair.hosts
        leader.wait_until_ready()
        with running(worker("", tmp_path)) as (single,):
            expected = streamed(single, PROMPT)
        assert streamed(leader, PROMPT) == expected
        assert streamed(leader, PROMPT) == expected
        form = {"structured_outputs": {"regex": "[0-9]{4}"}}
        digits = client(leader).completions.create(model="demo", prompt="One, two,", max_tokens=8, extra_body=form)
        assert digits.choices[0].text.isdigit()
        refused = httpx.post(f"{leader.url}/sleep", headers={"Authorization": "Bearer operator"}, timeout=30)
        assert refused.status_code == 400
        assert "on several hosts" in refused.text
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{follower.url}/health")

        def leave():
            follower.process.send_signal(signal.SIGTERM)

        assert streamed(leader, PROMPT, on_first=leave) == expected, "what runs is finished"
        assert [host.process.wait(60) for host in pair.hosts] == [0, 0], leader.log() + follower.log()
    assert "host 1 requests shutdown: all hosts exit" in leader.log()


def test_a_number_of_devices_that_the_hosts_do_not_have_is_refused_at_start(tmp_path):
    line = "context_parallel_size 2 with tensor_parallel_size 4: 2 hosts use all of their 2 devices"
    with Pair(tmp_path, "--tensor-parallel-size", "4", "--context-parallel-size", "2") as pair:
        assert pair.hosts[0].process.wait(120) == 2, pair.hosts[0].log()
        assert line in pair.hosts[0].log()
        assert pair.hosts[1].process.wait(60) in (1, 2)
