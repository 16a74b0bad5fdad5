"""Network interfaces of this host."""

from __future__ import annotations

import socket
import struct

_SIOCGIFADDR = 0x8915
"""Linux' request for the IPv4 address of an interface."""


def interface_of(address: str) -> str | None:
    """Return the name of the interface with an IPv4 address, or ``None``.

    Example: ``interface_of("127.0.0.1")`` is ``"lo"`` on Linux.
    """
    try:
        import fcntl
    # Windows has no such module.
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            # The interface has no IPv4 address.
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
