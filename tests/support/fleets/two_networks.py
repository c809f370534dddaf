"""Two network namespaces with a cable between them that can lose packets and be cut. Needs to be root, on Linux."""

import contextlib
import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("mamba-jax-a", "mamba-jax-b")
DEVICES = ("mj-a", "mj-b")
ADDRESSES = ("10.250.7.1", "10.250.7.2")
SET_INTERFACE, TUN, WITHOUT_HEADER = 0x400454CA, 0x0001, 0x1000


class TwoNetworks:
    """A context; an OSError or CalledProcessError on entering says that this machine does not allow it."""

    def __init__(self, *, loss: float = 0.0) -> None:
        """`loss`: share of packets that the cable loses."""
        self.loss, self._cable = loss, []

    def __enter__(self) -> "TwoNetworks":
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove)
            for name in NAMES:
                _run(f"ip netns add {name}")
            if self.loss:
                self._lay_lossy_cable()
            else:
                (a, b), (at, bt) = DEVICES, NAMES
                _run(f"ip link add {a} netns {at} type veth peer {b} netns {bt}")
            for name, device, address in zip(NAMES, DEVICES, ADDRESSES, strict=True):
                _run(f"ip -n {name} addr add {address}/24 dev {device}")
                _run(f"ip -n {name} link set {device} up")
                _run(f"ip -n {name} link set lo up")
            undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def inside(self) -> list[list[str]]:
        """Words that start a command in each, under a host name that the other can use, as XLA's collectives do."""
        return [
            ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {address} && exec "$@"', "sh"]
            for name, address in zip(NAMES, ADDRESSES, strict=True)
        ]

    def cut(self) -> None:
        """Drop all traffic without telling either side."""
        _run(f"ip -n {NAMES[0]} link set {DEVICES[0]} down")

    def _lay_lossy_cable(self) -> None:
        for name, device in zip(NAMES, DEVICES, strict=True):
            _run(f"ip -n {name} tuntap add dev {device} mode tun")
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for name, device, end in zip(NAMES, DEVICES, ends, strict=True):
            words = [
                sys.executable,
                "-m",
                "tests.support.fleets.two_networks",
                device,
                str(end.fileno()),
                str(self.loss),
            ]
            command = ["ip", "netns", "exec", name, *words]
            self._cable.append(subprocess.Popen(command, pass_fds=[end.fileno()], cwd=ROOT))
            end.close()

    def _remove(self) -> None:
        for process in self._cable:
            process.kill()
            process.wait()
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(command: str) -> None:
    subprocess.run(command.split(), capture_output=True, text=True, check=True)


def lose_packets(device, descriptor, share):
    """One end of the cable, in a process inside of its namespace: the descriptor is an end of a pair of datagram
    sockets. (A kernel's own means to lose packets are not everywhere.)"""
    tunnel = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tunnel, SET_INTERFACE, struct.pack("16sH22x", device.encode(), TUN | WITHOUT_HEADER))
    other, draw = socket.socket(fileno=int(descriptor)), random.Random(0)
    while True:
        ready, _, _ = select.select([tunnel, other], [], [])
        if tunnel in ready:
            packet = os.read(tunnel, 1 << 16)
            if draw.random() >= float(share):
                other.send(packet)
        if other in ready:
            os.write(tunnel, other.recv(1 << 16))


if __name__ == "__main__":
    lose_packets(*sys.argv[1:])
