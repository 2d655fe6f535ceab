"""Ports at which ranks of a test meet."""

from __future__ import annotations

import itertools
import os
import socket

# Below the range from which a kernel takes the ports of connections: such a port may be lost to any connection of another test before
# the rank that listens at it has begun.
_PORTS = range(10_000, 30_000)
# Processes that run at the same time begin far from each other. Two ports lie between calls, as some worlds meet at the next one.
_offsets = itertools.count(os.getpid() * 7_919, 2)


def free_port() -> int:
    """A port at which nothing listens, nor at the one behind it."""
    for _ in _PORTS:
        port = _PORTS[next(_offsets) % len(_PORTS)]
        try:
            for each in (port, port + 1):
                with socket.socket() as probe:
                    probe.bind(("0.0.0.0", each))
            return port
        except OSError:
            continue
    raise RuntimeError("no port is free")
