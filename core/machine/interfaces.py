"""Network interfaces of this host."""

from __future__ import annotations

import socket
import struct

_SIOCGIFADDR = 0x8915
"""Linux' request for the IPv4 address of an interface."""


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an IPv4 address; ``None`` where none is found, as on other systems."""
    try:
        import fcntl
    except ImportError:  # on Windows
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(
                    asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
                )
            except OSError:  # it has no such address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
