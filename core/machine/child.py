"""Run Python code in a child process, which cannot hold this process up.

The child gets an environment of its own, without secrets. Pipes alone reach the child, so no folder is written to.
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

_LARGEST_REPLY = 1 << 24  # bytes
_KEPT_OUTPUT = 1 << 14  # bytes, of which the last line is quoted
_LOOK_AGAIN = 0.05  # seconds; a child may have ended although its own children hold its pipes open
_PIECE = 1 << 16
_PARTING = (
    0.5  # seconds in which a child ends all that it has started, before its group is ended by force
)
_CHILDREN = "/proc/{0}/task/{0}/children"
"""The file that names the children of a process, which kernels without ``CONFIG_PROC_CHILDREN`` lack."""


@dataclass(frozen=True)
class Ended:
    """The remains of a child: its exit status, ``None`` where it was stopped, its answer, and the end of its output.

    ``memory`` is what it had in bytes when it was stopped for that, else 0. ``starved`` tells of one that was stopped
    and had waited for a processor for most of its time.
    """

    status: int | None
    reply: str
    output: str
    memory: int = 0
    starved: bool = False

    @property
    def died(self) -> bool:
        """Tell of a child without an answer whether its code held it up or took it down.

        Status 1 is what Python ends with after an exception, the host's own too; some signals come from outside. On a
        machine that has no processor for it, it is held up by others.
        """
        import signal

        return not self.starved and self.status not in (
            1,
            -signal.SIGTERM,
            -signal.SIGINT,
            -signal.SIGHUP,
        )

    def complaint(self) -> str:
        """Say how it ended, with the last line that it printed."""
        if self.status is None:
            return "it was stopped"
        lines = self.output.strip().splitlines()
        return f"its process ended with status {self.status}{f': {lines[-1]}' if lines else ''}"


def ask_child(
    code: str, arguments: Sequence[str] = (), data: Any = None, time_limit: float = 10.0
) -> Any:
    """Run ``code`` in a new interpreter; returns what it writes to ``reply_to`` as JSON. See ``run_child``.

    Raises:
        ChildError: the child could not be started, failed, or wrote no JSON; the message says which, with the last line
            that it printed.
        LostChildError: it ran past ``time_limit`` seconds, or was taken down.
    """
    ended = run_child(code, arguments, data, time_limit)
    fault = LostChildError if ended.died else ChildError
    if ended.status is None:
        why = (
            "; this machine is too busy: it waited for a processor for most of that"
            if ended.starved
            else ""
        )
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
) -> Ended:
    """Run ``code`` in a new interpreter with this ``sys.path`` until the code ends or its time is over.

    The interpreter is stopped, too, above ``memory_limit`` bytes. Its memory is read 20 times a second.

    The code finds a file descriptor to write to in ``reply_to``, its arguments in ``sys.argv[3:]``, and in ``data``
    what was handed over, which must be ready for ``json.dumps``. It runs in a minimal environment, or in ``environ``,
    which must be this process's own: what a file says is handed over as data. ``heard`` is called with each piece of
    the reply as it comes, of which the last line alone is kept; the time limit holds from one piece to the next.

    Raises:
        ChildError: it could not be started.
    """
    handed_over = json.dumps(data).encode()
    (read_end, write_end), (life, ours) = _pipes(2)
    try:
        child = _start(code, arguments, environ, (write_end, life))
    except (OSError, ValueError, TypeError) as error:
        os.close(read_end)
        os.close(ours)
        raise ChildError(f"no child process could be started: {error}") from error
    finally:
        os.close(write_end)  # the reply ends when no process has this end open
        os.close(life)
    deadline = _Deadline(time_limit)
    try:
        with (
            open(read_end, "rb", buffering=0) as reply,
            _stream(child.stdout) as output,
            _stream(child.stdin) as question,
        ):
            watch = _MemoryWatch(child.pid, memory_limit)
            answer, printed = _exchange(
                child, reply, output, question, handed_over, deadline, watch, heard
            )
            # Before its pipes close, which would end it otherwise.
            status = _wait(child, 0.0 if watch.exceeded else deadline.left())
            starved = status is None and not watch.exceeded and deadline.starved(child.pid)
    except OSError as error:  # such as of a process that may not open any more files
        raise ChildError(f"the child process cannot be heard: {error}") from error
    finally:  # after an interrupt from the keyboard too, which does not reach a child in a session of its own
        os.close(ours)
        _kill(child)
    texts = (answer.decode(errors="replace"), printed.decode(errors="replace"))
    return Ended(status, *texts, watch.exceeded, starved)


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
        for end in (end for pipe in pipes for end in pipe):
            os.close(end)
        raise ChildError(f"no child process could be started: {error}") from error
    return pipes


def _start(
    code: str, arguments: Sequence[str], environ: Mapping[str, str] | None, ends: tuple[int, int]
) -> subprocess.Popen[bytes]:
    import subprocess  # costs 10 ms, which detection should not pay where no child is asked

    files = " ".join(map(str, ends))
    return subprocess.Popen(  # noqa: S603  # our own interpreter
        child_command(GUARDIAN + code, files, *arguments),
        env=minimal_environment() if environ is None else dict(environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=ends,
        start_new_session=True,  # a group of its own, which can be killed with all that it starts
    )


def child_command(code: str, *arguments: str) -> list[str]:
    """Return the command line of a new interpreter: for code with this ``sys.path``, and arguments at ``argv[2:]``."""
    # Imports pass over entries of other types.
    path = [entry for entry in sys.path if isinstance(entry, str)]
    # An isolated interpreter reads no variable, such as this one.
    kept = ("-X", f"pycache_prefix={sys.pycache_prefix}") if sys.pycache_prefix else ()
    # Isolated: no variable and no working folder decides what is imported before the path is set.
    return [sys.executable, "-I", *kept, "-c", _TAKE_PATH + code, json.dumps(path), *arguments]


def minimal_environment(*more: str) -> dict[str, str]:
    """Return the variables of this process that an interpreter needs, and ``more`` of its variables.

    If the child imports torch, torch loads no device backend.
    """
    kept = {name: os.environ[name] for name in (*NEEDED, *more) if name in os.environ}
    return {**kept, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise ChildError("its pipes could not be opened")
    return stream


def _exchange(
    child: subprocess.Popen[bytes],
    reply: IO[bytes],
    output: IO[bytes],
    question: IO[bytes],
    data: bytes,
    deadline: _Deadline,
    watch: _MemoryWatch,
    heard: Callable[[bytes], None] | None,
) -> tuple[bytes, bytes]:
    """Hand over ``data`` and collect the reply and the end of the output, until the child has ended or is to be."""
    import selectors

    received = {reply: bytearray(), output: bytearray()}
    left = memoryview(data)
    with selectors.DefaultSelector() as selector:
        for stream in received:
            selector.register(stream, selectors.EVENT_READ)
        # The child may read nothing while it fills its own pipes.
        os.set_blocking(question.fileno(), False)
        selector.register(question, selectors.EVENT_WRITE)
        open_streams = set(received)
        while open_streams and (left_over := deadline.left()) > 0 and not watch.look():
            # Before the pipes are looked at: what it wrote last is still in them.
            ended = child.poll() is not None
            ready = [
                key.fileobj
                for key, _ in selector.select(0 if ended else min(_LOOK_AGAIN, left_over))
            ]
            if question in ready:
                left = left[_written(question, left) :]
                if not left:
                    selector.unregister(question)
                    question.close()
            for stream in open_streams.intersection(ready):
                piece = _read_into(received[stream], stream, stream is reply)
                if heard is not None and stream is reply:
                    heard(piece)
                    deadline.begin(_waited(child.pid))
                    del received[reply][: received[reply].rfind(b"\n", 0, -1) + 1]
                if not piece:
                    selector.unregister(stream)
                    open_streams.discard(stream)
            if ended and not ready:
                break
    return bytes(received[reply]), bytes(received[output])


class _Deadline:
    """The end of a time that may begin anew, for a process that had waited so long for a processor by then."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begin(0.0)

    def begin(self, waited: float) -> None:
        self.end = time.monotonic() + self.seconds
        self.waited = waited

    def left(self) -> float:
        """Return the seconds that are left, below 0 where it is over."""
        return self.end - time.monotonic()

    def starved(self, pid: int) -> bool:
        """Tell of a child whose code still wants to run whether it had no processor for most of the time."""
        try:
            asleep = _of_worker(pid, "stat")[2] == "S"  # and so not held up by others
        except (OSError, ValueError, IndexError):
            return False
        return not asleep and _waited(pid) - self.waited > self.seconds / 2


class _MemoryWatch:
    """A look at the memory of a process, and what it had when that was more than its limit."""

    def __init__(self, pid: int, limit: int | None) -> None:
        self.pid = pid
        self.limit = limit
        self.exceeded = 0

    def look(self) -> int:
        if self.limit is not None:
            try:
                resident = int(_of_worker(self.pid, "statm")[1]) * os.sysconf("SC_PAGE_SIZE")
            # It has ended, or this system has no such file.
            except (
                OSError,
                ValueError,
                IndexError,
            ):
                return 0
            self.exceeded = resident if resident > self.limit else 0
        return self.exceeded


def _written(stream: IO[bytes], data: memoryview) -> int:
    """Write what the pipe takes now; where nobody reads it any more, the rest counts as written."""
    try:
        return os.write(stream.fileno(), data[:_PIECE])
    except BrokenPipeError:
        return len(data)


def _read_into(buffer: bytearray, stream: IO[bytes], from_start: bool) -> bytes:
    """Read a piece, empty where no more will come, and add it; of what is too long the start is kept, or the end."""
    piece = os.read(stream.fileno(), _PIECE)
    buffer += piece
    if from_start:
        del buffer[_LARGEST_REPLY:]
    else:
        del buffer[:-_KEPT_OUTPUT]
    return piece


def _wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Wait for the exit status of the child for so many seconds; ``None`` where there is none by then."""
    import subprocess

    try:
        return child.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None


def _of_worker(pid: int, name: str) -> list[str]:
    """Return the words of a file of the process that runs the code, which a child has started.

    Raises:
        OSError, IndexError: it has ended, or this system has no such file.
    """
    with open(f"/proc/{_first_child(pid)}/{name}", encoding="ascii") as file:
        return file.read().split()


def _first_child(pid: int) -> int:
    """Return the first child of a process, looked for among all processes where no file names it."""
    with suppress(FileNotFoundError), open(_CHILDREN.format(pid), encoding="ascii") as children:
        return int(children.read().split()[0])
    others = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    for each in sorted(others, key=lambda other: (other < pid, other)):  # mostly the next
        with (
            suppress(OSError, IndexError),
            open(f"/proc/{each}/stat", encoding="ascii", errors="replace") as file,
        ):
            if int(file.read().rpartition(")")[2].split()[1]) == pid:
                return each
    raise ProcessLookupError(f"{pid} has no child")


def _waited(pid: int) -> float:
    """Return for how many seconds a child's code had no processor; 0 where nothing tells."""
    try:
        return int(_of_worker(pid, "schedstat")[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a child, where it has not ended by itself, and what it has started and left behind."""
    import signal
    import subprocess

    _wait(child, _PARTING)  # in which it ends what is in sessions of its own
    with suppress(ProcessLookupError):  # it has ended, and so has what it started
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # stuck in the kernel, where no signal reaches it
        child.wait(1.0)
    if child.returncode is None:
        child.returncode = -signal.SIGKILL  # Popen warns when it is collected without one
