"""Messages between two processes over a socket."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from opgraft import SamplingParams
from opgraft.engine.step import NewSequence, Scheduled, Step, step_of
from opgraft.engine.workers.remote_executor import encoded_step
from opgraft.engine.workers.worker_link import EXECUTE_PARTS
from opgraft.machine.broadcast import BY_CHANNEL, SLOT_BYTES, SLOTS, SharedChannel, SharedSlots
from opgraft.machine.channel import Channel, ReadAhead, encoded, encoded_plain

NEW = NewSequence("b", (5, 6), 2, 64, SamplingParams(), ((4,), ()), 0)


@pytest.mark.parametrize("added", [(), (NEW,)], ids=["plain", "with a new sequence"])
def test_a_step_comes_as_it_was_sent(added: tuple[NewSequence, ...]) -> None:
    """Its batch, which is sent as plain tuples, is one of ``Scheduled`` again; the call tells the form of the step."""
    step = Step(("a",), added, ((1, 2),), (Scheduled("b", 3, 1, ((4,), ()), True),), ((None, 1),))
    ours, theirs = map(Channel, socket.socketpair())
    ours.send_encoded(encoded_step(step))
    method, arguments, everyone = theirs.receive()
    assert (method, everyone) == ("execute" if added else EXECUTE_PARTS, False)
    came = arguments[0] if added else step_of(*arguments)
    assert came == step
    assert came.sequences[0].new_blocks == ((4,), ())
    ours.close()
    theirs.close()


def test_what_is_not_plain_is_not_sent_as_if_it_were() -> None:
    """An object, or a text of a class of its own, would come as something else."""

    class Text(str):
        pass

    for other in (NEW, Text("a"), object()):
        with pytest.raises(ValueError, match="unmarshallable"):
            encoded_plain(("execute", (other,)))


def test_shared_memory_has_what_fits_and_is_free() -> None:
    """Every reader has each message in its turn; those that are long, or come before a slot is free, go by channels."""
    finished = 0
    slots = SharedSlots(lambda: finished)
    ours, theirs = socket.socketpair()
    (mine, tokens), sending = os.pipe()[::-1], Channel(ours)
    reading = SharedChannel(theirs, lambda name: name, slots.file, tokens)
    ways = []
    for number in range(3 * SLOTS):
        message = (number, b"x" * (SLOT_BYTES if number == 5 else 100))
        data = encoded(message)
        token = slots.write(number, data)
        os.write(mine, token)
        ways.append(token == BY_CHANNEL)
        if ways[-1]:
            sending.send_encoded(data)
        assert reading.receive() == message
        finished = number if number < 2 * SLOTS else finished
    assert [number for number, by_channel in enumerate(ways) if by_channel] == [5, 3 * SLOTS - 1]
    os.close(mine)
    with pytest.raises(EOFError):
        reading.receive()
    for end in (sending, reading):
        end.close()
    os.close(tokens)
    slots.close()


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


def test_a_limit_of_what_is_sent_is_none_of_reading_ahead() -> None:
    """Nothing, or half a message, comes for longer than that, and the rest is read; only a send fails in time."""
    ours, theirs = socket.socketpair()
    reading = ReadAhead(theirs)
    reading.limit(0.02)
    ours.sendall(encoded("first"))
    assert reading.receive() == "first"  # from here on it reads under the limit
    half = bytes(encoded("second"))
    for part in (half[:10], half[10:]):
        time.sleep(0.1)
        ours.sendall(part)
    assert reading.receive() == "second"
    with pytest.raises(TimeoutError):
        reading.send(b"x" * 10_000_000)
    ours.close()
    with pytest.raises(EOFError):
        reading.receive()
    reading.close()
