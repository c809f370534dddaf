"""One end of a cable between two network namespaces that loses packets.

`python -m tests.support.fleets.lossy_cable DEVICE FD SHARE` runs inside of its namespace, and FD is its end of a pair
of datagram sockets. (A kernel's own means to lose packets are not everywhere.)
"""

import fcntl
import os
import random
import select
import socket
import struct
import sys

SET_INTERFACE, TUN, WITHOUT_HEADER = 0x400454CA, 0x0001, 0x1000


def main(device, descriptor, share):
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
    main(*sys.argv[1:])
