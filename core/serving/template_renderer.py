"""The parent's side of the helper process that renders chat templates."""

from __future__ import annotations

import pickle
import socket
import subprocess
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from opgraft.errors import ChildError
from opgraft.machine.child import child_command, minimal_environment
from opgraft.serving.template_answer import LENGTH_BYTES, READY, AnswerKind

MOST_SECONDS = 10.0
"""Longest time of one rendering."""

START_SECONDS = 60.0
"""Longest time until a helper is ready, on a busy machine."""

_MOST_BYTES = 1 << 26
"""Longest answer, enough for a text of the most characters."""

_END_SECONDS = 5.0

_CRASHED = "it has crashed the process that renders templates"

_MAIN = """
from opgraft.serving.template_process import main
main()
"""


class TemplateRenderer:
    """Renders templates in a helper process, one at a time, for any thread.

    The helper starts when it is first needed. A helper that exceeds a limit ends, and the next call
    starts another one. The helper ends with this object, and with this process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._helper: _Helper | None = None

    def render(self, source: str, values: Mapping[str, Any]) -> tuple[AnswerKind, str]:
        """Render a template in the helper.

        Args:
            source: the template.
            values: plain data for the template, by name.

        Raises:
            ChildError: no helper could be started.
            RecursionError: the values are nested too deeply.
        """
        # The last number ends a helper whose parent has been killed, and so cannot end it.
        request = pickle.dumps((source, values, 2 * MOST_SECONDS))
        with self._lock:
            helper = self._running_helper()
            # A helper answers one request at a time, and answers have no names.
            try:
                kind, text = helper.ask(request)
            # Also after an interrupt, because nobody would read the answer.
            except BaseException:
                helper.close()
                raise
            if kind is not AnswerKind.EXHAUSTED:
                return kind, text
            helper.close()
            return AnswerKind.REFUSED, text

    def _running_helper(self) -> _Helper:
        if self._helper is None or not self._helper.runs:
            self._helper = _Helper()
        return self._helper


class _Helper:
    """A process that renders templates, with a socket as its stdin and stdout."""

    def __init__(self) -> None:
        self._socket, there = socket.socketpair()
        with there:
            self._process = _start(there)
        self._answers = self._socket.makefile("rb")
        self.close = weakref.finalize(self, _end_helper, self._process, self._socket, self._answers)
        self._socket.settimeout(START_SECONDS)
        try:
            ready = self._answers.read(1) == READY
        except OSError:
            ready = False
        if not ready:
            self.close()
            raise ChildError(
                "the process that renders chat templates could not be started: it ended with the "
                f"status {self._process.returncode}. Its error is on stderr."
            )

    @property
    def runs(self) -> bool:
        """True until the process has ended, such as by the system for want of memory."""
        return self.close.alive and self._process.poll() is None

    def ask(self, request: bytes) -> tuple[AnswerKind, str]:
        """Return the answer to a request, or the limit that the process has exceeded."""
        self._socket.settimeout(MOST_SECONDS)
        try:
            self._socket.sendall(request)
            kind = AnswerKind(self._answers.read(1))
            length = int.from_bytes(self._answers.read(LENGTH_BYTES), "big")
            encoded = self._answers.read(min(length, _MOST_BYTES))
        except TimeoutError:
            return AnswerKind.EXHAUSTED, f"it takes longer than {MOST_SECONDS:g} seconds"
        # ValueError: at the end of the stream there is no byte, and so no kind.
        except (OSError, ValueError):
            return AnswerKind.EXHAUSTED, _CRASHED
        if len(encoded) != length:
            return AnswerKind.EXHAUSTED, _CRASHED
        return kind, encoded.decode("utf-8", "surrogatepass")


def _start(there: socket.socket) -> subprocess.Popen[bytes]:
    """Start a helper that reads from a socket and writes to the socket."""
    # In a session of its own, because an interrupt from the terminal is for the parent. The helper
    # ends with the parent.
    try:
        return subprocess.Popen(  # noqa: S603 - our own interpreter
            child_command(_MAIN),
            stdin=there.fileno(),
            stdout=there.fileno(),
            env=minimal_environment("TZ"),  # templates ask for the time, and find no secret
            start_new_session=True,
        )
    except OSError as error:
        raise ChildError(
            f"the process that renders chat templates could not be started: {error}"
        ) from error


def _end_helper(process: subprocess.Popen[bytes], ours: socket.socket, answers: BinaryIO) -> None:
    """End a helper at once, and collect its status."""
    answers.close()
    ours.close()
    process.kill()
    # No signal reaches a process that is stuck in the kernel.
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
