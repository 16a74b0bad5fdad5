"""Messages between two processes over a socket."""

from __future__ import annotations

import socket
import threading

import pytest
from opgraft.machine.channel import Channel


def test_a_channel_takes_messages_of_any_size_and_tells_its_end() -> None:
    """Messages come as they were sent, however they are cut; the end of the other side is no message."""
    ours, theirs = map(Channel, socket.socketpair())
    sent = [b"x" * 3_000_000, {"a": (1, None)}, ""]
    sender = threading.Thread(target=lambda: [ours.send(message) for message in sent])
    sender.start()
    assert [theirs.receive() for _ in sent] == sent
    sender.join()
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()
