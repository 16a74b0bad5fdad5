"""Lines of a kernel that calls run and do not run, as far as the kernel is written in Python.

``LineWatch`` wraps the calls of a check. It traces the code of the bound kernel, and functions in
the kernel's own modules that the kernel calls. No public interface tells which branches of C++ or
Triton code run.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from opgraft.base.reached import Places, ReachedLines, split
from opgraft.base.text import printable
from opgraft.binding.derivation import is_derived
from opgraft.binding.kernels import Kernel
from opgraft.binding.specialisation import bind
from opgraft.plugins.discovery import HOST_DISTRIBUTION
from opgraft.testing import checks
from opgraft.testing.kernel_checks import is_operator_of_plugin
from opgraft.testing.subjects import Trial

MOST_EVENTS = 500_000
"""Traced lines of a check, a tenth of a second. Then a sample of the calls is traced."""

SAMPLED = 16
"""One call of so many is traced in a sample."""

COMPILED = "the kernel runs compiled code"
IN_A_SAMPLE = "only some of many calls were traced"
OTHER_TRACER = "a debugger or another tool traces this process"
OTHER_THREADS = "the kernel keeps threads, or hands work to a pool of threads"

_POOLS = ("concurrent.futures.thread", "multiprocessing.pool", "queue")
"""Modules whose functions hand work to threads that may be older than a call."""

_OPERATORS = type(torch.ops).__module__
"""The module whose ``__call__`` runs an operator."""

_NATIVE = ("ctypes", "_ctypes", "_cffi_backend", "cffi", "cupy", "jaxlib", "numba", "triton")
"""Packages with the types of objects that call compiled code."""


@dataclass(frozen=True)
class _Function:
    """A function of the kernel, with its lines, and those that no call has run."""

    code: CodeType
    lines: frozenset[int]
    left: set[int]

    @classmethod
    def of(cls, code: CodeType) -> _Function:
        lines = {line for _, _, line in code.co_lines() if line is not None}
        # A lambda has no other line than this one.
        rest = frozenset(lines - {code.co_firstlineno} or lines)
        return cls(code, rest, set(rest))


class LineWatch:
    """Notes which lines of the bound kernel of a trial run in the calls that ``over`` wraps."""

    def __init__(self, trial: Trial) -> None:
        trial.noted.append(self)
        winner = bind(trial.subject.target).kernel.winner
        functions = list(_functions_of(trial, winner))
        codes = [code for function in functions if (code := _code_of(function)) is not None]
        # By identity, as Python hashes the whole of a code anew each time.
        self._roots = {id(code): code for code in codes if _is_judged(trial, code)}
        modules = [str(getattr(each, "__module__", "")) for each in (winner.owner, *functions)]
        self._own = _OwnFiles(modules, self._roots.values())
        # A function of the plugin without code is no Python.
        self._is_compiled = len(codes) < len(functions)
        self._functions: dict[int, _Function] = {}
        self._is_active = False
        # Of the thread that calls the kernel.
        self._depth = 0
        self._entered = 0
        self._calls = 0
        self._events = 0
        self._is_sample = False
        self._has_rival = False
        self._has_threads = False
        self._started: list[threading.Thread] = []

    def over(self, call: checks.Implementation) -> checks.Implementation:
        """Return a call that notes lines. A slow kernel is traced in a sample of calls."""
        if not self._roots:
            return call

        def watched(**arguments: Any) -> Any:
            self._calls += 1
            if self._events > MOST_EVENTS and self._calls % SAMPLED:
                self._is_sample = True
                return call(**arguments)
            # Only one function can trace a thread.
            if sys.gettrace() is not None:
                self._has_rival = True
                return call(**arguments)
            return self._traced(call, arguments)

        return watched

    def _traced(self, call: checks.Implementation, arguments: Mapping[str, Any]) -> Any:
        before = threading.gettrace()
        self._depth = 0
        self._started.clear()
        self._is_active = True
        # A kernel may start threads.
        threading.settrace(self._enter_in_thread)
        sys.settrace(self._enter)
        try:
            return call(**arguments)
        finally:
            sys.settrace(None)
            threading.settrace(before)
            self._is_active = False
            self._has_threads |= any(each.is_alive() for each in self._started)

    @property
    def lines(self) -> ReachedLines | None:
        """The lines so far; ``None`` if nothing of a kernel was called."""
        reasons = {
            COMPILED: self._is_compiled,
            IN_A_SAMPLE: self._is_sample,
            OTHER_TRACER: self._has_rival,
            OTHER_THREADS: self._has_threads,
        }
        unknown = "; ".join(reason for reason, holds in reasons.items() if holds)
        # An object of torch may call compiled code at once.
        is_entered = self._calls > 0 and not self._has_rival
        if is_entered and not self._functions:
            unknown = COMPILED
        if not self._functions:
            return ReachedLines(unknown=unknown) if unknown else None
        run: Places = {}
        known: Places = {}
        for each in self._functions.values():
            file = self._own.name_of(each.code)
            known.setdefault(file, set()).update(each.lines)
            run.setdefault(file, set()).update(each.lines - each.left)
        return ReachedLines(*split(known, run), unknown)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        """Trace a call of a function, if the function belongs to the kernel."""
        code = frame.f_code
        if id(code) in self._roots:
            self._depth += 1
            if self._own.has(code):
                self._begin(frame)
            else:
                frame.f_trace_lines = False
            return self._in_root
        return self._enter_below(frame) if self._depth else None

    def _enter_in_thread(self, frame: FrameType, event: str, _: Any) -> Any:
        """Trace a call in a thread that the kernel has started, while the kernel runs."""
        ident = threading.get_ident()
        # Other parts of the process start threads, too.
        is_of_kernel = any(each.ident == ident for each in self._started)
        return self._enter_below(frame) if is_of_kernel and self._is_active else _untraced()

    def _enter_below(self, frame: FrameType) -> Any:
        self._events += 1
        if self._own.has(frame.f_code):
            return self._in_helper if self._begin(frame) else None
        if frame.f_code is threading.Thread.start.__code__:
            self._started.append(frame.f_locals["self"])
        return self._around_operator(frame)

    def _begin(self, frame: FrameType) -> bool:
        """Take note of a call; return True if lines of the function are left."""
        self._entered += 1
        if id(frame.f_code) not in self._functions:
            self._note(frame.f_code)
            self._is_compiled |= any(map(_is_native, _globals_of(frame)))
        left = self._functions[id(frame.f_code)].left
        # The line of ``def``.
        left.discard(frame.f_lineno)
        frame.f_trace_lines = bool(left)
        return bool(left)

    def _note(self, code: CodeType) -> None:
        """Take note of a function, and of functions in it."""
        self._functions.setdefault(id(code), _Function.of(code))
        for value in code.co_consts:
            if isinstance(value, CodeType):
                self._note(value)

    def _in_root(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "return":
            self._depth -= 1
        self._in_helper(frame, event, _)
        return self._in_root

    def _in_helper(self, frame: FrameType, event: str, _: Any) -> Any:
        # In a thread that runs on.
        if not self._is_active:
            return _untraced()
        if event == "line":
            self._events += 1
            left = self._functions[id(frame.f_code)].left
            left.discard(frame.f_lineno)
            frame.f_trace_lines = bool(left)
        return self._in_helper

    def _around_operator(self, frame: FrameType) -> Any:
        """Note an operator of the plugin that enters no Python code of the plugin."""
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] == "triton":
            self._is_compiled = True
        self._has_threads |= module in _POOLS
        # To read the variables of a frame takes time.
        if module != _OPERATORS or frame.f_code.co_name != "__call__":
            return None
        if not is_operator_of_plugin(frame.f_locals.get("self")):
            return None
        frame.f_trace_lines = False
        before = self._entered

        def leave(_: FrameType, event: str, __: Any) -> Any:
            if event == "return" and self._entered == before:
                self._is_compiled = True
            return leave

        return leave


def _untraced() -> None:
    """Trace this thread no more. A pool's thread would keep the tracer for all later calls."""
    sys.settrace(None)


class _OwnFiles:
    """The files with the code of a kernel: of its packages, and of opgraft the modules only."""

    def __init__(self, modules: Iterable[str], roots: Iterable[CodeType]) -> None:
        self._names: dict[str, str] = {}
        self._folders: list[Path] = []
        # An operator begins with code of torch.
        self._files = {each.co_filename for each in roots if not _is_below(each, _OF_TORCH)}
        for top in {module.partition(".")[0] for module in modules} - {"opgraft", "torch"}:
            self._folders += map(Path, getattr(sys.modules.get(top), "__path__", ()))

    def has(self, code: CodeType) -> bool:
        """Return True for code of these files."""
        return bool(self.name_of(code))

    def name_of(self, code: CodeType) -> str:
        """Return the file relative to the folder of the package; empty for another file."""
        file = code.co_filename
        if file not in self._names:
            self._names[file] = printable(self._found(file))
        return self._names[file]

    def _found(self, file: str) -> str:
        path = Path(file)
        for folder in self._folders:
            if path.is_relative_to(folder):
                return path.relative_to(folder.parent).as_posix()
        if file not in self._files:
            return ""
        is_ours = path.is_relative_to(_OURS)
        return path.relative_to(_OURS.parent).as_posix() if is_ours else path.name


_OURS = Path(__file__).parents[1]
_OF_TORCH = Path(torch.__file__).parent


def _is_below(code: CodeType, folder: Path) -> bool:
    return Path(code.co_filename).is_relative_to(folder)


def _is_judged(trial: Trial, code: CodeType) -> bool:
    """Return False for code of opgraft, unless a built-in platform is judged."""
    is_of_host = trial.subject.replacement.provider.name == HOST_DISTRIBUTION
    return is_of_host or not _is_below(code, _OURS)


def _functions_of(trial: Trial, winner: Kernel) -> Iterator[Any]:
    """Yield the method of the bound kernel, and the function of the form."""
    if not is_derived(winner.definition):
        yield winner.definition
    if trial.subject.function is not None:
        yield trial.subject.function


def _code_of(function: Any) -> CodeType | None:
    """Return the code behind wrappers; ``None`` if there is none in Python."""
    outer = None
    while function is not outer:
        outer = function
        if isinstance(function, functools.partial):
            function = function.func
        if isinstance(function, (staticmethod, classmethod, MethodType)):
            function = function.__func__
        function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        function = type(function).__call__
    return function.__code__ if isinstance(function, FunctionType) else None


def _globals_of(frame: FrameType) -> Iterator[Any]:
    """Yield the globals that the code of a frame names."""
    for name in frame.f_code.co_names:
        if name in frame.f_globals:
            yield frame.f_globals[name]


def _is_native(value: Any) -> bool:
    """Return True for a function or a library of compiled code that is none of Python's own."""
    kind = type(value)
    if kind.__module__.partition(".")[0] in _NATIVE:
        return True
    if isinstance(value, BuiltinFunctionType):
        module = sys.modules.get(value.__module__ or "")
        return module is not None and _is_extension(module)
    return False


def _is_extension(module: Any) -> bool:
    file = getattr(module, "__file__", None) or ""
    return file.endswith((".so", ".pyd")) and module.__name__.partition(".")[0] not in _KNOWN


_KNOWN = frozenset((*sys.stdlib_module_names, "numpy", "opgraft", "torch"))
