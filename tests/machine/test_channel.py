"""Messages between two processes over a socket."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from opgraft import SamplingParams
from opgraft.engine.step import NewSequence, ScheduledPart, Step, step_of
from opgraft.engine.workers.remote_executor import encoded_step
from opgraft.engine.workers.worker_link import EXECUTE_PARTS
from opgraft.machine.channel import Channel, PipeSender, ReadAhead, encoded, encoded_plain

NEW = NewSequence("b", (5, 6), 2, 64, SamplingParams(), ((4,), ()), 0)


@pytest.mark.parametrize("added", [(), (NEW,)], ids=["plain", "with a new sequence"])
def test_a_step_comes_as_it_was_sent(added: tuple[NewSequence, ...]) -> None:
    """Its batch, which is sent as plain tuples, is one of ``ScheduledPart`` again, and has the form of the step."""
    step = Step(
        ("a",), added, ((1, 2),), (ScheduledPart("b", 3, 1, ((4,), ()), True),), ((None, 1),)
    )
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


def test_messages_of_any_size_come_by_a_pipe() -> None:
    """All come in the order in which they were sent, also messages that wait, until the other process has ended."""
    ours, theirs = socket.socketpair()
    reading_file, writing_file = os.pipe()
    sender, receiver = PipeSender(ours, writing_file), Channel(theirs, pipe=reading_file)
    sizes = [100, 5, 40_000, 0, 3_000_000, 7]
    sending = threading.Thread(target=lambda: [sender.send(b"x" * size) for size in sizes])
    sending.start()
    assert [len(receiver.receive()) for _ in sizes] == sizes
    sending.join()
    os.close(writing_file)
    with pytest.raises(EOFError):
        receiver.receive()
    for end in (sender, receiver):
        end.close()
    os.close(reading_file)


def test_a_long_message_and_a_long_answer_do_not_wait_for_each_other() -> None:
    """The sender takes the answer in while the pipe is full, as the other process reads nothing before."""
    ours, theirs = socket.socketpair()
    reading_file, writing_file = os.pipe()
    sender, receiver = PipeSender(ours, writing_file), Channel(theirs, pipe=reading_file)
    long = b"x" * 3_000_000
    received = []

    def answer() -> None:
        received.append(receiver.receive())
        receiver.send(long)
        received.append(receiver.receive())

    answering = threading.Thread(target=answer)
    answering.start()
    sender.limit(30)
    sender.send("first")
    sender.send(long)
    assert sender.receive() == long
    answering.join()
    assert received == ["first", long]
    for end in (sender, receiver):
        end.close()
    for file in (reading_file, writing_file):
        os.close(file)


def test_a_full_pipe_is_waited_for_within_the_limit() -> None:
    """A send to a process that reads nothing fails in time, or as soon as the channel is hung up."""
    ours, theirs = socket.socketpair()
    reading_file, writing_file = os.pipe()
    sender = PipeSender(ours, writing_file)
    sender.limit(0.05)
    with pytest.raises(TimeoutError):
        sender.send(b"x" * 200_000)
    sender.limit(30)
    threading.Timer(0.1, sender.hang_up).start()
    started = time.monotonic()
    with pytest.raises(BrokenPipeError):
        sender.send(b"x" * 200_000)
    assert time.monotonic() - started < 15
    sender.close()
    theirs.close()
    for file in (reading_file, writing_file):
        os.close(file)


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
