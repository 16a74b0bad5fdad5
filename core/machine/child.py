"""Run Python code in a child process, so that the code cannot hold this process up.

The child gets an environment of its own, without secrets. Pipes alone reach the child, so no folder
is written to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from opgraft.errors import ChildError, LostChildError
from opgraft.machine.guardian import GUARDIAN

if TYPE_CHECKING:
    import subprocess

NEEDED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "LD_LIBRARY_PATH")
"""Variables that an interpreter needs to start."""

_TAKE_PATH = "import json, sys\nsys.path[:] = json.loads(sys.argv[1])\n"

_LARGEST_REPLY = 1 << 24
"""Bytes of a reply that are kept."""

_KEPT_OUTPUT = 1 << 14
"""Bytes at the end of the output that are kept. The last line is quoted."""

_LOOK_AGAIN = 0.05
"""Seconds between two looks. A child may end while its own children hold the pipes open."""

_PIECE = 1 << 16
"""Bytes of one read or write."""

_PARTING = 0.5
"""Seconds for a child to end everything that it has started. Then the group is ended by force."""

_CHILDREN = "/proc/{0}/task/{0}/children"
"""The file with the children of a process. Kernels without ``CONFIG_PROC_CHILDREN`` lack it."""


@dataclass(frozen=True)
class ChildRemains:
    """The remains of a child.

    Attributes:
        status: exit status, ``None`` if the child was stopped.
        reply: the answer.
        output: the end of the output.
        memory: bytes of a child that was stopped for taking too much memory, else 0.
        starved: the child was stopped, and had waited for a processor most of the time.
    """

    status: int | None
    reply: str
    output: str
    memory: int = 0
    starved: bool = False

    @property
    def died(self) -> bool:
        """Return True if the code of the child took the child down or held it up.

        Python ends with status 1 after any exception, so status 1 is no such sign. Neither are
        signals from outside, nor a machine without a free processor.
        """
        import signal

        from_outside = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
        return not self.starved and self.status not in (1, *from_outside)

    def complaint(self) -> str:
        """Return a sentence about the end of the child, with the last line of the output."""
        if self.status is None:
            return "it was stopped"
        lines = self.output.strip().splitlines()
        last_line = f": {lines[-1]}" if lines else ""
        return f"its process ended with status {self.status}{last_line}"


def ask_child(
    code: str, arguments: Sequence[str] = (), data: Any = None, time_limit: float = 10.0
) -> Any:
    """Run ``code`` in a new interpreter, and return the JSON that the code writes to ``reply_to``.

    See ``run_child``.

    Raises:
        ChildError: the child could not be started, failed, or wrote no JSON. The message quotes
            the last line of the output.
        LostChildError: the child ran past ``time_limit`` seconds, or was taken down.
    """
    ended = run_child(code, arguments, data, time_limit)
    # A caller may put the code of a lost child into quarantine.
    fault = LostChildError if ended.died else ChildError
    if ended.status is None:
        why = ""
        if ended.starved:
            why = "; this machine is too busy: it waited for a processor for most of that"
        raise fault(f"it gave no answer within {time_limit:g} s and was stopped{why}")
    if ended.status != 0 or not ended.reply:
        raise fault(ended.complaint())
    try:
        return json.loads(ended.reply)
    except (ValueError, RecursionError) as error:
        raise ChildError(f"its answer cannot be read: {error}") from error


def run_child(
    code: str,
    arguments: Sequence[str] = (),
    data: Any = None,
    time_limit: float = 10.0,
    environ: Mapping[str, str] | None = None,
    memory_limit: int | None = None,
    heard: Callable[[bytes], None] | None = None,
) -> ChildRemains:
    """Run ``code`` in a new interpreter with this ``sys.path``, until the code ends or is stopped.

    The code finds a file descriptor to write to in ``reply_to``, the arguments in ``sys.argv[3:]``
    and the data in ``data``.

    Args:
        code: Python.
        arguments: texts for the code.
        data: an object for the code, as ``json.dumps`` takes it.
        time_limit: seconds. With ``heard``, the seconds from one piece of the reply to the next.
        environ: variables of this process. The default is ``minimal_environment()``. Hand over
            the content of a file as data instead.
        memory_limit: bytes. The memory of the child is read 20 times a second.
        heard: called with each piece of the reply as the piece comes. The last line alone is kept.

    Raises:
        ChildError: the child could not be started.
    """
    question = json.dumps(data).encode()
    (read_end, write_end), (life, ours) = _pipes(2)
    try:
        child = _start(code, arguments, environ, (write_end, life))
    except (OSError, ValueError, TypeError) as error:
        os.close(read_end)
        os.close(ours)
        raise ChildError(f"no child process could be started: {error}") from error
    finally:
        # The reply ends when no process has this end open.
        os.close(write_end)
        os.close(life)
    talk = _Conversation(child, question, time_limit, memory_limit, heard)
    try:
        return talk.run(read_end)
    # For example, this process may not open any more files.
    except OSError as error:
        raise ChildError(f"the child process cannot be heard: {error}") from error
    finally:
        # An interrupt from the keyboard does not reach a child in a session of its own.
        os.close(ours)
        _kill(child)


def _pipes(count: int) -> list[tuple[int, int]]:
    """Open pipes.

    Raises:
        ChildError: this process may not open so many files.
    """
    pipes: list[tuple[int, int]] = []
    try:
        for _ in range(count):
            pipes.append(os.pipe())
    except OSError as error:
        for read_end, write_end in pipes:
            os.close(read_end)
            os.close(write_end)
        raise ChildError(f"no child process could be started: {error}") from error
    return pipes


def _start(
    code: str, arguments: Sequence[str], environ: Mapping[str, str] | None, ends: tuple[int, int]
) -> subprocess.Popen[bytes]:
    # The import costs 10 ms. Detection without a child does not pay them.
    import subprocess

    files = " ".join(map(str, ends))
    return subprocess.Popen(  # noqa: S603  # our own interpreter
        child_command(GUARDIAN + code, files, *arguments),
        env=minimal_environment() if environ is None else dict(environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=ends,
        # A group of its own can be killed with everything in it.
        start_new_session=True,
    )


def child_command(code: str, *arguments: str) -> list[str]:
    """Return the command line of a new interpreter that runs code with this ``sys.path``.

    The code finds the arguments in ``sys.argv[2:]``.
    """
    # Imports pass over entries of other types.
    path = [entry for entry in sys.path if isinstance(entry, str)]
    # An isolated interpreter reads no variable, such as this one.
    kept = ("-X", f"pycache_prefix={sys.pycache_prefix}") if sys.pycache_prefix else ()
    # Isolated: no variable and no working folder decides what is imported before the path is set.
    return [sys.executable, "-I", *kept, "-c", _TAKE_PATH + code, json.dumps(path), *arguments]


def minimal_environment(*more: str) -> dict[str, str]:
    """Return the variables of this process that an interpreter needs, and the variables ``more``.

    If the child imports torch, torch loads no device backend.
    """
    kept = {name: os.environ[name] for name in (*NEEDED, *more) if name in os.environ}
    return {**kept, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


class _Conversation:
    """An exchange with a child: the question goes in, the reply and the output come out.

    Args:
        child: started with pipes.
        question: bytes for the standard input.
        time_limit: see ``run_child``.
        memory_limit: see ``run_child``.
        heard: see ``run_child``.
    """

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        question: bytes,
        time_limit: float,
        memory_limit: int | None,
        heard: Callable[[bytes], None] | None,
    ) -> None:
        self._child = child
        self._unsent = memoryview(question)
        self._deadline = _Deadline(time_limit)
        self._watch = _MemoryWatch(child.pid, memory_limit)
        self._heard = heard
        self._reply = bytearray()
        self._output = bytearray()

    def run(self, read_end: int) -> ChildRemains:
        """Exchange until the child ends or has to be stopped, and return the remains.

        Args:
            read_end: descriptor of the reply. It is closed.

        Raises:
            OSError: a pipe cannot be read or written.
            ChildError: the child has no pipes.
        """
        child = self._child
        watch = self._watch
        deadline = self._deadline
        with (
            open(read_end, "rb", buffering=0) as reply,
            _stream(child.stdout) as output,
            _stream(child.stdin) as question,
        ):
            self._exchange(reply, output, question)
            # A child may end when its pipes close: ask for the status before that.
            status = _wait(child, 0.0 if watch.exceeded else deadline.left())
            was_stopped = status is None and not watch.exceeded
            starved = was_stopped and deadline.starved(child.pid)
        answer = self._reply.decode(errors="replace")
        printed = self._output.decode(errors="replace")
        return ChildRemains(status, answer, printed, watch.exceeded, starved)

    def _exchange(self, reply: IO[bytes], output: IO[bytes], question: IO[bytes]) -> None:
        import selectors

        with selectors.DefaultSelector() as selector:
            # The child may read nothing while it fills its own pipes.
            os.set_blocking(question.fileno(), False)
            selector.register(question, selectors.EVENT_WRITE)
            open_streams = {reply, output}
            for stream in open_streams:
                selector.register(stream, selectors.EVENT_READ)
            while open_streams:
                seconds = self._deadline.left()
                if seconds <= 0 or self._watch.look():
                    return
                # Before the look at the pipes: the last words of the child may still be there.
                has_ended = self._child.poll() is not None
                events = selector.select(0 if has_ended else min(_LOOK_AGAIN, seconds))
                if has_ended and not events:
                    return
                ready = [key.fileobj for key, _ in events]
                if question in ready and self._has_asked(question):
                    selector.unregister(question)
                    question.close()
                for stream in open_streams.intersection(ready):
                    piece = self._hear_reply(stream) if stream is reply else self._hear(stream)
                    if not piece:
                        selector.unregister(stream)
                        open_streams.discard(stream)

    def _has_asked(self, question: IO[bytes]) -> bool:
        """Write as much of the question as the pipe takes now. Return True at the end.

        If nobody reads the question any more, the rest counts as written.
        """
        try:
            written = os.write(question.fileno(), self._unsent[:_PIECE])
        except BrokenPipeError:
            return True
        self._unsent = self._unsent[written:]
        return not self._unsent

    def _hear_reply(self, stream: IO[bytes]) -> bytes:
        """Read a piece of the reply; empty at the end. Keep the start of a long reply."""
        piece = os.read(stream.fileno(), _PIECE)
        self._reply += piece
        del self._reply[_LARGEST_REPLY:]
        if self._heard is not None:
            self._heard(piece)
            self._deadline.begin(_waited(self._child.pid))
            start_of_last_line = self._reply.rfind(b"\n", 0, -1) + 1
            del self._reply[:start_of_last_line]
        return piece

    def _hear(self, stream: IO[bytes]) -> bytes:
        """Read a piece of the output; empty at the end. Keep the end of a long output."""
        piece = os.read(stream.fileno(), _PIECE)
        self._output += piece
        del self._output[:-_KEPT_OUTPUT]
        return piece


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise ChildError("its pipes could not be opened")
    return stream


class _Deadline:
    """The end of a time limit, which may begin anew.

    Attributes:
        seconds: the time limit.
        end: the end, by the monotonic clock.
        waited: seconds that the process had waited for a processor when the time began.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begin(0.0)

    def begin(self, waited: float) -> None:
        self.end = time.monotonic() + self.seconds
        self.waited = waited

    def left(self) -> float:
        """Return the seconds that are left, below 0 after the end."""
        return self.end - time.monotonic()

    def starved(self, pid: int) -> bool:
        """Return True if a child still wants to run, and had no processor most of the time."""
        try:
            state = _of_worker(pid, "stat")[2]
        except (OSError, ValueError, IndexError):
            return False
        # A child asleep waits for something else than a processor.
        is_asleep = state == "S"
        return not is_asleep and _waited(pid) - self.waited > self.seconds / 2


class _MemoryWatch:
    """A look at the memory of a process. ``exceeded`` holds the bytes above a limit, else 0."""

    def __init__(self, pid: int, limit: int | None) -> None:
        self.pid = pid
        self.limit = limit
        self.exceeded = 0

    def look(self) -> int:
        if self.limit is None:
            return self.exceeded
        try:
            pages = int(_of_worker(self.pid, "statm")[1])
        # The process has ended, or this system has no such file.
        except (OSError, ValueError, IndexError):
            return 0
        resident = pages * os.sysconf("SC_PAGE_SIZE")
        self.exceeded = resident if resident > self.limit else 0
        return self.exceeded


def _wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit status of the child, or ``None`` if the child runs after so many seconds."""
    import subprocess

    try:
        return child.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None


def _of_worker(pid: int, name: str) -> list[str]:
    """Return the words of a file of the process that runs the code. A child has started it.

    Raises:
        OSError, IndexError: the process has ended, or this system has no such file.
    """
    with open(f"/proc/{_first_child(pid)}/{name}", encoding="ascii") as file:
        return file.read().split()


def _first_child(pid: int) -> int:
    """Return the first child of a process. Without a file of children, look at all processes.

    Raises:
        ProcessLookupError: the process has no child.
    """
    with suppress(FileNotFoundError), open(_CHILDREN.format(pid), encoding="ascii") as children:
        return int(children.read().split()[0])
    others = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    # The child is mostly the next process after its parent.
    others.sort(key=lambda other: (other < pid, other))
    for each in others:
        with suppress(OSError, IndexError):
            if _parent_of(each) == pid:
                return each
    raise ProcessLookupError(f"{pid} has no child")


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        # The name of the program stands in brackets, and may have brackets itself.
        _, _, behind_name = file.read().rpartition(")")
    return int(behind_name.split()[1])


def _waited(pid: int) -> float:
    """Return the seconds that a child's code waited for a processor; 0 if unknown."""
    try:
        nanoseconds = int(_of_worker(pid, "schedstat")[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return nanoseconds / 1e9


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a child, and everything that the child has started and left behind."""
    import signal
    import subprocess

    # In this time the child ends its processes in sessions of their own.
    _wait(child, _PARTING)
    # The child and its processes may all have ended.
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    # No signal reaches a process that is stuck in the kernel.
    with suppress(subprocess.TimeoutExpired):
        child.wait(1.0)
    if child.returncode is None:
        # Popen warns about an object that is collected without a status.
        child.returncode = -signal.SIGKILL
