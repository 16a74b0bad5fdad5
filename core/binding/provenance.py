"""Naming the op, its provider and the place that an exception came from, by its traceback alone.

A call that works pays nothing: nothing is written down until somebody asks about an exception.
"""

from __future__ import annotations

import inspect
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any

from opgraft.base.text import described, printable
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.form_choice import FormChoice, choice_of
from opgraft.binding.functional import Functional
from opgraft.binding.specialisation import Binding
from opgraft.config import NATIVE_CHOICE
from opgraft.config.environment import PLUGINS_DISABLE
from opgraft.errors import OpgraftError, PluginError
from opgraft.plugins.discovery import discover
from opgraft.registry.choice import choosing
from opgraft.registry.decision import Provider
from opgraft.registry.state import host_state
from opgraft.registry.watching import RunningCall, calls_told_when_late, interrupts_counted

Place = tuple[FrameType, int]


@dataclass(frozen=True)
class Provenance:
    """The code that raised an exception.

    Attributes:
        op: the name that settings know the op by, or its class; empty where a plugin's code raised outside of ops.
        kernel: the method of an op's class that ran, or the function of the plugin.
        provider: who provides it.
        location: ``file:line`` of the innermost code that is not torch's.
        setting: which setting goes without it; empty where none does, as for a native definition.
    """

    op: str
    kernel: str
    provider: Provider
    location: str
    setting: str

    @property
    def of_plugin(self) -> bool:
        """Tell whether a plugin provides the code."""
        return discover().has_plugin(self.provider)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, with the names that all JSON of opgraft has for it."""
        return {
            "op": self.op,
            "kernel": self.kernel,
            "provider": self.provider.to_dict(),
            "location": self.location,
            "setting": self.setting,
        }

    def __str__(self) -> str:
        where = f"in op {self.op}, " if self.op else ""
        change = f"; to go without it: {self.setting}" if self.setting else ""
        return printable(
            f"raised {where}by {self.kernel} of {self.provider} at {self.location}{change}"
        )


def explain_exception(error: BaseException) -> Provenance | None:
    """Name the op that raised, its provider with the version, the line, and the setting without the kernel.

    The traceback of the exception is read, or the traceback of its cause. Of nested ops the innermost is named.
    Outside of ops the plugin with the last code is named. The result is ``None`` if neither ran, as in compiled code.
    """
    if isinstance(error, PluginError) and error.location:  # the message says all
        return None
    raised = [list(traceback.walk_tb(each.__traceback__)) for each in reversed(list(_chain(error)))]
    for tell in (_of_op, _of_plugin):
        for places in raised:
            for depth in reversed(range(len(places))):
                told = tell(places[depth:])
                if told is not None:
                    return told
    return None


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Turn ``SystemExit`` and ``KeyboardInterrupt`` of a plugin's code in this scope into errors.

    Raises:
        PluginError: the code raised one itself. What a signal has caused passes through.
    """
    with interrupts_counted() as interrupted:
        try:
            yield
        except (SystemExit, KeyboardInterrupt) as error:
            own = None if interrupted() else exit_of_plugin(error)
            if own is None:
                raise
            raise own from error


def exit_of_plugin(error: SystemExit | KeyboardInterrupt) -> PluginError | None:
    """Return an error about a plugin that raised an exit; None for other code and for signals."""
    if _by_signal(error):
        return None
    told = explain_exception(error)
    if told is None or not told.of_plugin:
        return None
    return PluginError(f"{described(error)}, {told}", told.location)


def own_words(error: Exception) -> str:
    """Describe the exception of a kernel; of an exit turned into an error, the exit."""
    return described(exit_behind(error) or error)


def exit_behind(error: BaseException) -> SystemExit | KeyboardInterrupt | None:
    """Return the exit that ``exits_as_errors`` turned into this error, or None."""
    cause = error.__cause__
    if isinstance(error, PluginError) and isinstance(cause, SystemExit | KeyboardInterrupt):
        return cause
    return None


def kernels_told_when_late() -> AbstractContextManager[None]:
    """Log a warning if a kernel or other code of a plugin does not return in this scope, with a setting without it."""
    return calls_told_when_late(_running_call)


def _running_call(frame: FrameType) -> RunningCall | None:
    """Return the call of a plugin's code on a stack, from its innermost frame.

    Code of opgraft that was called by a plugin outside of ops is not the plugin's.
    """
    inner_first = list(traceback.walk_stack(frame))
    places = inner_first[::-1]
    within: RunningCall | None = None
    is_inner = True
    for depth in reversed(range(len(places))):
        op = _of_op(places[depth:])
        # A native definition that takes long is no fault of a plugin, unless it has called one.
        if op is not None:
            return _call_of(op, places[depth]) if op.of_plugin else within
        if within is None and is_inner:
            plugin = _of_plugin(places[depth:])
            within = None if plugin is None else _call_of(plugin, places[depth])
        is_inner = is_inner and not _is_of_host(places[depth][0])
    return within


def _call_of(told: Provenance, place: Place) -> RunningCall:
    frame, _ = place
    # Layers share the code of a kernel. The op, or the first argument, tells their calls apart.
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    own = frame.f_locals.get(names[0]) if names else None
    where = f" in op {told.op}" if told.op else ""
    what = f"{told.kernel} of {told.provider}{where} at {told.location}"
    return RunningCall((frame.f_code, id(own)), what, told.provider, told.setting)


def _is_of_host(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "opgraft"


def _by_signal(error: BaseException) -> bool:
    """Return True if a handler of a signal raised an exception."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = set()
    for each in handlers:
        function = inspect.unwrap(each) if callable(each) else None
        codes.add(getattr(function, "__code__", None))
    ran = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return not codes.isdisjoint(ran)


def install_excepthook() -> Callable[[], None]:
    """Have an exception that ends the program be followed by a line of ``explain_exception``; returns the undo."""
    former = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        former(kind, error, trace)
        told = explain_exception(error)
        if told is not None:
            print(told, file=sys.stderr)  # noqa: T201 - as the hook before it does

    def undo() -> None:
        if sys.excepthook is hook:
            sys.excepthook = former

    sys.excepthook = hook
    return undo


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and those that it was raised from."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        following = following.__cause__ or (
            None if following.__suppress_context__ else following.__context__
        )


def _of_op(places: list[Place]) -> Provenance | None:
    """Tell about the op that the outermost of some frames belongs to, if it does."""
    frame, _ = places[0]
    ran = _ran(frame)
    if ran is None:
        return None
    binding = ran.binding if isinstance(ran, FormChoice) else ran
    choice = binding.replacement
    replaced = choice.winner is not None
    constructing = frame.f_code.co_name == "__init__"
    kernel, provider = ran.kernel_name, ran.provider
    if constructing:
        kernel = f"{choice.cls.__qualname__}.__init__"
        provider = choice.provider
    if isinstance(ran, FormChoice):
        native = ran.is_native
    else:
        method = binding.kernel.winner.method
        own = method in ("forward_native", "forward")
        native = not replaced and (constructing or own)
    plugin = ""
    if choice.winner:
        plugin = choice.winner.plugin or ""
    setting = ""
    if not native:
        setting = choosing(choice.settings, choice.op_name, [NATIVE_CHOICE], plugin)
    location = _location(places) or binding.kernel.winner.location
    name = choice.op_name or choice.target.__qualname__
    return Provenance(name, kernel, provider, location, setting)


def _ran(frame: FrameType) -> Binding | FormChoice | None:
    """Return the choice of the op or the functional form with this frame as a method."""
    code = frame.f_code
    if not code.co_argcount:
        return None
    first = code.co_varnames[0]
    own: Any = frame.f_locals.get(first)
    cls = type(own)  # isinstance() would ask the object
    if issubclass(cls, CustomOp) and code in _codes_of_class(cls, CustomOp):
        binding: Binding | None = vars(own).get("_binding")
        return binding
    if not issubclass(cls, Functional) or code not in _codes_of_class(cls, Functional):
        return None
    try:
        return choice_of(own)
    except OpgraftError:  # it is the choice itself that failed, and its message says all
        return None


def _codes_of_class(cls: type, base: type) -> Iterator[CodeType]:
    """Yield the code of what a class and its bases down from ``base`` define. Others that take an op have none of it.

    The bound kernel is among it, as ``forward`` of the specialisation, whoever defines it.
    """
    for each in cls.__mro__:
        if issubclass(each, base):
            for value in vars(each).values():
                function = (
                    value.__func__ if isinstance(value, classmethod | staticmethod) else value
                )
                if isinstance(function, FunctionType):
                    yield function.__code__
                    yield inspect.unwrap(function).__code__


def _of_plugin(places: list[Place]) -> Provenance | None:
    """Tell about the plugin that the outermost of some frames belongs to, if it does."""
    frame, line = places[0]
    module = str(frame.f_globals.get("__name__"))
    provider = discover().provider_of(module)
    offers = [each for each in discover().offers if not each.built_in and each.provider == provider]
    offer = max(
        offers,
        key=lambda each: (f"{module}.".startswith(f"{each.module}."), each.module),
        default=None,
    )
    if offer is None:
        return None
    ways = f"{PLUGINS_DISABLE}={offer.name}"
    setting = host_state().settings().to_change("plugins_disable", ways)
    return Provenance(
        "", frame.f_code.co_name, offer.provider, f"{frame.f_code.co_filename}:{line}", setting
    )


def _location(places: list[Place]) -> str:
    """Give ``file:line`` of the innermost code that is not torch's."""
    own = [
        (f, n) for f, n in places if str(f.f_globals.get("__name__")).partition(".")[0] != "torch"
    ]
    return f"{own[-1][0].f_code.co_filename}:{own[-1][1]}" if own else ""
