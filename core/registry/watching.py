"""Watch the running code of plugins, in case it takes long, raises an interrupt or kills."""

from __future__ import annotations

import contextvars
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from opgraft.base.log import logger as warnings
from opgraft.base.text import printable
from opgraft.base.watchdog import WATCHDOG
from opgraft.config.environment import PLUGINS_DISABLE
from opgraft.errors import PluginError, raised_at
from opgraft.registry.decision import Provider

logger = logging.getLogger("opgraft.watching")

PATIENCE = 5.0
"""Seconds of waiting until a line names the code that this process waits for."""

STUCK = 10.0
"""Seconds without a turn for the thread that looks, until Python's watchdog prints the stacks."""

_TICK = 0.25
"""Seconds between two looks at the running code."""


class Listener(Protocol):
    """Hear of the code of others: when it begins and when it ends."""

    def begins(self, what: str, provider: Provider | None) -> None: ...

    def ends(self) -> None: ...


LISTENERS: list[Listener] = []
"""Called directly, since a plugin can switch the log off with one call, often by mistake."""

KEEPERS: list[Callable[[str, Provider, object], AbstractContextManager[list[str]]]] = []
"""Functions that undo, at the end of a scope, replaced attributes of opgraft and torch.

The arguments are the code and the occasion in words, the distribution of the code, and the code
itself. At the end of the scope, the list names the restored attributes.
"""


@contextmanager
def watching_code(what: str, provider: Provider | None) -> Iterator[None]:
    """Tell listeners and the log at level DEBUG when code of a plugin begins and ends.

    Without listeners, a warning tells if the code takes long.

    Args:
        what: the code and the occasion, in words.
        provider: the provider of the code.

    Raises:
        PluginError: the code raised ``KeyboardInterrupt`` without an interrupt from outside.
    """
    logger.debug("%s: begins", printable(what), extra=provider.attributes() if provider else None)
    for listener in LISTENERS:
        listener.begins(printable(what), provider)
    try:
        # A listener reports to a parent process, which warns and ends slow code itself.
        patience = nullcontext() if LISTENERS else told_when_late(what, provider)
        with patience, own_interrupts_as_errors():
            yield
    finally:
        for listener in LISTENERS:
            listener.ends()
        logger.debug("%s: ends", printable(what))


@contextmanager
def kept(what: str, provider: Provider, code: object) -> Iterator[list[list[str]]]:
    """Undo attributes of opgraft and torch that the code in the block replaces.

    The finding names ``what``.

    Yields:
        Lists with the names of restored attributes, filled at the end of the scope.
    """
    with ExitStack() as stack:
        yield [stack.enter_context(keeper(what, provider, code)) for keeper in KEEPERS]


@dataclass
class Keeping:
    """Undoes attributes that a step of others replaces, until a step has replaced nothing.

    To compare all definitions takes milliseconds, and the step runs for each op of a model.
    """

    what: str
    provider: Provider
    code: object
    is_clean: bool = False

    def step(self) -> AbstractContextManager[None]:
        return _NOTHING if self.is_clean else self._undone()

    @contextmanager
    def _undone(self) -> Iterator[None]:
        with kept(self.what, self.provider, self.code) as found:
            yield
        self.is_clean = not any(found)


_NOTHING = nullcontext()


def told_when_late(
    what: str,
    provider: Provider | None,
    time_limit: float | None = None,
    advice: str | None = None,
) -> AbstractContextManager[None]:
    """Log a warning if the code in this scope takes longer than ``PATIENCE``.

    Args:
        what: the code and the occasion, in words.
        provider: the distribution that a setting can leave out.
        time_limit: the seconds after which the code is stopped, if there is such a limit.
        advice: a sentence on how to go without the code; the setting that leaves out a
            distribution otherwise.
    """
    return _Step(what, provider, time_limit, advice)


@dataclass(frozen=True)
class RunningCall:
    """A running call of a plugin's code.

    Attributes:
        frame: the frame of the call, the same one at each look.
        what: the code and its place, in words.
        provider: the distribution of the code.
        setting: the setting to go without the code.
    """

    frame: FrameType
    what: str
    provider: Provider
    setting: str


def calls_told_when_late(
    running: Callable[[FrameType], RunningCall | None],
) -> AbstractContextManager[None]:
    """Log a warning if one call of a plugin's code in this scope takes longer than ``PATIENCE``.

    The calls themselves cost nothing: another thread looks at the stack of this thread.

    Args:
        running: returns the call on a stack from its innermost frame, if there is one.
    """
    return _Calls(running)


class _WatchedScope(AbstractContextManager[None]):
    """A scope in a thread, from its construction on."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.began = time.monotonic()

    def __enter__(self) -> None:
        _LATE.begin(self)

    def __exit__(self, *raised: object) -> None:
        _LATE.finish(self)

    def look(self, now: float, is_innermost: bool) -> None:
        """Tell if code is late. An inner scope in the same thread may know more."""
        raise NotImplementedError

    def end(self) -> None:
        """Give back what looks have kept, at the end of the scope."""


class _Step(_WatchedScope):
    """A step that is late after ``PATIENCE`` seconds."""

    def __init__(
        self,
        what: str,
        provider: Provider | None,
        time_limit: float | None,
        advice: str | None,
    ) -> None:
        super().__init__()
        self.what = what
        self.provider = provider
        self.time_limit = time_limit
        self.advice = advice
        self.late_from = self.began + PATIENCE

    def look(self, now: float, is_innermost: bool) -> None:
        if now >= self.late_from:
            # Once is enough: the next looks come every quarter of a second.
            self.late_from = float("inf")
            self._tell()

    def _tell(self) -> None:
        limit = "" if self.time_limit is None else f", and stops it after {self.time_limit:g} s"
        words = f"still waiting for {self.what}: opgraft has waited for {PATIENCE:g} s{limit}."
        extra = self.provider.attributes() if self.provider else None
        name = self.provider.name if self.provider else "<name>"
        advice = self.advice or f"{PLUGINS_DISABLE}={name} goes without it."
        warnings.warning("%s %s", printable(words), printable(advice), extra=extra)


class _Calls(_WatchedScope):
    """Steps with calls of plugins' code. A call is late after ``PATIENCE`` seconds."""

    def __init__(self, running: Callable[[FrameType], RunningCall | None]) -> None:
        super().__init__()
        self.running = running
        # The choices of a thread depend on the scope of settings.
        self.context = contextvars.copy_context()
        self.looked = self.began
        self.since = self.began
        # The frame of the latest call. While a frame is held, no other call gets the same one. It
        # keeps the variables of a call that has ended until the next look, or the end of the scope.
        self.frame: FrameType | None = None
        self.is_over = False

    def look(self, now: float, is_innermost: bool) -> None:
        # No look at the stack of a step of usual length.
        if now < self.began + _TICK:
            return
        before, self.looked = self.looked, now
        call = self._call() if is_innermost else None
        if call is None:
            self.frame = None
        elif call.frame is not self.frame:
            self.frame = call.frame
            # The call began after the look before, at the earliest.
            self.since = before
        elif now >= self.since + PATIENCE:
            self.since = float("inf")
            self._tell(call)
        # The scope may have ended meanwhile.
        if self.is_over:
            self.frame = None

    def end(self) -> None:
        self.is_over = True
        self.frame = None

    def _call(self) -> RunningCall | None:
        frame = sys._current_frames().get(self.thread)
        try:
            return None if frame is None else self.context.run(self.running, frame)
        # An object of a plugin on the stack may raise anything.
        except Exception as error:
            logger.debug("the stack of a thread cannot be read: %s", error)
            return None

    def _tell(self, call: RunningCall) -> None:
        words = f"still waiting for {call.what}: opgraft has waited for {PATIENCE:g} s."
        advice = f"To go without it: {call.setting}"
        warnings.warning_once("%s %s", printable(words), printable(advice))


class _Late:
    """Tells of each late step once, from a thread that lives as long as there are steps."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.steps: list[_WatchedScope] = []
        self.thread: threading.Thread | None = None

    def begin(self, step: _WatchedScope) -> None:
        with self.lock:
            self.steps.append(step)
            if self.thread is None:
                # A daemon, as no process waits for it.
                thread = threading.Thread(target=self._look, name="opgraft-watching", daemon=True)
                # A process that cannot start threads gets no warnings.
                with suppress(RuntimeError):
                    thread.start()
                    self.thread = thread
                    # Code in C that keeps Python's lock stops this thread, and not the watchdog.
                    WATCHDOG.restart(STUCK)

    def finish(self, step: _WatchedScope) -> None:
        with self.lock:
            # A fork within the scope has emptied the list of the child.
            if step in self.steps:
                self.steps.remove(step)
        step.end()

    def _look(self) -> None:
        while True:
            time.sleep(_TICK)
            now = time.monotonic()
            with self.lock:
                if not self.steps:
                    self.thread = None
                    WATCHDOG.stop()
                    return
                steps = list(self.steps)
            # The last step of a thread is the innermost.
            innermost = {step.thread: step for step in steps}
            # Without the lock: a look may log, and a handler of the log may run any code.
            for step in steps:
                step.look(now, innermost[step.thread] is step)
            with self.lock:
                WATCHDOG.restart(STUCK)

    def leave_watchdog(self) -> None:
        """Leave Python's watchdog to others, such as the end of the process."""
        with self.lock:
            WATCHDOG.leave()


_LATE = _Late()
leave_watchdog = _LATE.leave_watchdog
# A fork has no thread that looks, so the child begins anew.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LATE.__init__)  # type: ignore[misc]


class _Interrupts:
    """The handler of interrupts such as Ctrl-C while code of others runs.

    Interrupts are counted and handed on to the former handler.
    """

    def __init__(self) -> None:
        self.count = 0
        self.before: Any = None

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        self.count += 1
        return self.before(number, frame)

    def begin(self) -> bool:
        """Take the place of the handler; return True if ``end`` must undo that."""
        before = signal.getsignal(signal.SIGINT)
        # Python lets only the main thread set handlers. SIG_IGN and SIG_DFL cannot be called.
        if before is self or not callable(before) or not _in_main_thread():
            return False
        self.before = before
        signal.signal(signal.SIGINT, self)
        return True

    def end(self) -> None:
        """Restore the former handler, unless other code has set another one."""
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, self.before)


_INTERRUPTS = _Interrupts()


def _in_main_thread() -> bool:
    """Return True in the thread of signal handlers."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def own_interrupts_as_errors() -> Iterator[None]:
    """Turn a ``KeyboardInterrupt`` of the code itself into an error.

    Raises:
        PluginError: the code raised the exception, and no interrupt has come from outside.
    """
    with interrupts_counted() as interrupted:
        try:
            yield
        except KeyboardInterrupt as error:
            if interrupted():
                raise
            place = raised_at(error)
            raise PluginError(
                f"its code raised KeyboardInterrupt, which nobody has sent, at {place}", place
            ) from error


@contextmanager
def interrupts_counted() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True if this process was interrupted from outside since."""
    count = _INTERRUPTS.count
    began = _INTERRUPTS.begin()
    try:
        yield lambda: _INTERRUPTS.count > count
    finally:
        if began:
            _INTERRUPTS.end()
