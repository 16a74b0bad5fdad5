"""Name the op, the provider and the line of an exception, by the traceback alone.

A call without an exception costs nothing: no record is kept until somebody asks.
"""

from __future__ import annotations

import inspect
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MappingProxyType, TracebackType
from typing import Any

import torch
from opgraft.base.text import described, printable
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import FunctionalKernels
from opgraft.binding.form_choice import FormChoice, choice_of
from opgraft.binding.functional import Functional
from opgraft.binding.names import op_name_of
from opgraft.binding.specialisation import Binding
from opgraft.config import NATIVE_CHOICE
from opgraft.config.environment import PLUGINS_DISABLE
from opgraft.errors import OpgraftError, PluginError
from opgraft.plugins.discovery import Offer, discover
from opgraft.registry.choice import choosing
from opgraft.registry.decision import Provider
from opgraft.registry.declarations import Replacement
from opgraft.registry.op_classes import own_classes
from opgraft.registry.state import host_state
from opgraft.registry.watching import RunningCall, calls_told_when_late, interrupts_counted

Place = tuple[FrameType, int]

_MODULES_OF_OPS = "opgraft.ops."
"""The beginning of the names of modules with native definitions."""


@dataclass(frozen=True)
class Provenance:
    """The code that raised an exception.

    Attributes:
        op: the name of the op in settings, or the class; empty for a plugin's code outside of ops.
        kernel: the method of an op's class, or the function of the plugin.
        provider: the provider of the code.
        location: ``file:line`` of the plugin's innermost code, or else outside of torch.
        setting: the setting to go without the code; empty for a native definition, which has none.
    """

    op: str
    kernel: str
    provider: Provider
    location: str
    setting: str

    @property
    def of_plugin(self) -> bool:
        """True if a plugin provides the code."""
        return discover().has_plugin(self.provider)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain data, with the names of all JSON of opgraft."""
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
    """Name the op that raised an exception: provider, version, line, and the setting to disable it.

    The tracebacks of the exception and of its causes tell. If ops were nested, the innermost op is
    named. If no op ran, or an op of opgraft has called a plugin, the plugin is named.

    Returns:
        The record; ``None`` if neither an op nor a plugin ran, as in compiled code.
    """
    # The message of such an error has the record already.
    if isinstance(error, PluginError) and error.location:
        return None
    # The first exception of the chain comes first: it has the innermost code.
    errors = reversed(list(_chain(error)))
    raised = [list(traceback.walk_tb(each.__traceback__)) for each in errors]
    for tell in (_of_op_or_within, _of_plugin):
        for places in raised:
            told = _innermost(places, tell)
            if told is not None:
                return told
    return None


def _innermost(
    places: list[Place], tell: Callable[[list[Place]], Provenance | None]
) -> Provenance | None:
    """Return the first answer of ``tell`` for some frames, without more and more outer ones."""
    for depth in reversed(range(len(places))):
        told = tell(places[depth:])
        if told is not None:
            return told
    return None


def _of_op_or_within(places: list[Place]) -> Provenance | None:
    """Describe the op of the outermost frame, or a plugin that opgraft's own op has called."""
    told = _of_op(places)
    if told is None or told.of_plugin:
        return told
    # Such as the weight method of a layer.
    return _innermost(places[1:], _of_plugin) or told


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Turn ``SystemExit`` and all that is no ``Exception``, of a plugin's code, into errors.

    Raises:
        PluginError: the code raised such an exception. An exception of a signal's handler passes
            through.
    """
    with interrupts_counted() as interrupted:
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            own = None if interrupted() else exit_of_plugin(error)
            if own is None:
                raise
            raise own from error


@contextmanager
def plugins_named() -> Iterator[None]:
    """Name the plugin in whose code an exception is raised, and the setting to go without it.

    Raises:
        PluginError: code of a plugin raised an exception other than opgraft's own, and other than
            one about memory.
    """
    try:
        yield
    except OpgraftError:
        raise
    except Exception as error:
        told = None if is_out_of_memory(error) else explain_exception(error)
        if told is None or not told.of_plugin:
            raise
        raise PluginError(f"{described(error)}, {told}", told.location, told) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory was too small. The code that asked last is seldom the reason."""
    # For memory of the CPU torch has no class of its own.
    of_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return of_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def exit_of_plugin(error: BaseException) -> PluginError | None:
    """Return an error about a plugin that raised an exit; None for other code and for signals."""
    if _by_signal(error):
        return None
    told = explain_exception(error)
    if told is None or not told.of_plugin:
        return None
    return PluginError(f"{described(error)}, {told}", told.location, told)


def own_words(error: BaseException) -> str:
    """Describe the exception of a kernel; of an exit turned into an error, the exit."""
    return described(exit_behind(error) or error)


def exit_behind(error: BaseException) -> BaseException | None:
    """Return the exit that ``exits_as_errors`` turned into this error, or None."""
    cause = error.__cause__
    if isinstance(error, PluginError) and not isinstance(cause, Exception):
        return cause
    return None


def kernels_told_when_late() -> AbstractContextManager[None]:
    """Log a warning if code of a plugin does not return in this scope.

    The warning names a setting to go without the code.
    """
    return calls_told_when_late(_running_call)


def _running_call(innermost: FrameType) -> RunningCall | None:
    """Return the call of a plugin's code on a stack, from its innermost frame.

    Code of opgraft that was called by a plugin is not the plugin's.

    The stack is of another thread, which may go on at any moment: only the code of frames is read.
    Before Python 3.13, Python crashes if a call ends while its variables are read.
    """
    kernels = _kernels_of_plugins()
    inner_first = list(traceback.walk_stack(innermost))
    places = inner_first[::-1]
    within: RunningCall | None = None
    is_inner = True
    for depth in reversed(range(len(places))):
        frame, _ = places[depth]
        module = str(frame.f_globals.get("__name__"))
        # A native definition that takes long is no fault of a plugin, unless it has called one.
        if module.startswith(_MODULES_OF_OPS):
            return within
        kernel = kernels.get(frame.f_code)
        if kernel is not None:
            return _call_of(_of_kernel(*kernel, places[depth:]), places[depth])
        if within is None and is_inner:
            plugin = _of_plugin(places[depth:], _qualified_name)
            within = None if plugin is None else _call_of(plugin, places[depth])
        is_inner = is_inner and module.partition(".")[0] != "opgraft"
    return within


def _kernels_of_plugins() -> dict[CodeType, tuple[Replacement, str] | None]:
    """Return the code of the plugins' replacements of ops, with replacement and kernel name.

    Code of several replacements has ``None``: nobody can tell for which op it runs. No code of
    plugins runs here.
    """
    found: dict[CodeType, tuple[Replacement, str] | None] = {}
    discovery = discover()
    # A copy, as another thread may load a plugin.
    for replacement in list(host_state().registry.replacements):
        target = replacement.target
        if target is None or not issubclass(target, CustomOp):
            continue
        if not discovery.has_plugin(replacement.provider):
            continue
        for base in own_classes(replacement.cls):
            if base in target.__mro__:
                break
            for method, function in _functions_of(base):
                name = f"{base.__qualname__}.{method}"
                for code in set(_codes_of(function)):
                    found[code] = None if code in found else (replacement, name)
    return found


def _functions_of(cls: type) -> Iterator[tuple[str, object]]:
    """Yield the methods of a class, and the functions of its kernels with the name of the method.

    Functions in modules that nobody has imported yet do not run, and are left out.
    """
    for name, value in vars(cls).copy().items():
        key = name.removeprefix("functional_")
        # Not isinstance(): the object may answer for its class by code of its own.
        is_lazy = issubclass(type(value), FunctionalKernels)
        table = value.imported if is_lazy else value
        if key != name and type(table) in (dict, MappingProxyType):
            for function in table.values():
                yield f"forward_{key}", function
        is_wrapped = type(value) in (classmethod, staticmethod)
        yield name, value.__func__ if is_wrapped else value


def _of_kernel(replacement: Replacement, kernel: str, places: list[Place]) -> Provenance:
    """Describe a kernel of a replacement; the outermost of some frames runs its code."""
    state = host_state()
    target = replacement.target
    op_name = None if target is None else op_name_of(target, state)
    setting = choosing(state.settings(), op_name, [NATIVE_CHOICE], replacement.plugin or "")
    location = _location(places, replacement.provider)
    name = op_name or replacement.asked_for
    return Provenance(name, kernel, replacement.provider, location, setting)


def _call_of(told: Provenance, place: Place) -> RunningCall:
    frame, _ = place
    where = f" in op {told.op}" if told.op else ""
    what = f"{told.kernel} of {told.provider}{where} at {told.location}"
    return RunningCall(frame, what, told.provider, told.setting)


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
    """Print a line of ``explain_exception`` after the traceback of an uncaught exception.

    Returns:
        The undo.
    """
    former = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        former(kind, error, trace)
        told = explain_exception(error)
        if told is not None:
            print(told, file=sys.stderr)  # noqa: T201 - as Python prints the traceback

    def undo() -> None:
        if sys.excepthook is hook:
            sys.excepthook = former

    sys.excepthook = hook
    return undo


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, then the exceptions behind it: causes and contexts."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        cause = following.__cause__
        context = None if following.__suppress_context__ else following.__context__
        following = cause or context


def _of_op(places: list[Place]) -> Provenance | None:
    """Describe the op of the outermost of some frames; ``None`` if the frame belongs to no op."""
    frame, _ = places[0]
    ran = _ran(frame)
    if ran is None:
        return None
    binding = ran.binding if isinstance(ran, FormChoice) else ran
    choice = binding.replacement
    kernel = ran.kernel_name
    provider = ran.provider
    constructing = frame.f_code.co_name == "__init__"
    if constructing:
        kernel = f"{choice.cls.__qualname__}.__init__"
        provider = choice.provider
    setting = ""
    if not _is_native(ran, constructing):
        plugin = choice.winner.plugin if choice.winner else None
        setting = choosing(choice.settings, choice.op_name, [NATIVE_CHOICE], plugin or "")
    location = _location(places, provider) or binding.kernel.winner.location
    name = choice.op_name or choice.target.__qualname__
    return Provenance(name, kernel, provider, location, setting)


def _is_native(ran: Binding | FormChoice, constructing: bool) -> bool:
    """Return True if the code of an op or a form is the op's own, and no setting goes without."""
    if isinstance(ran, FormChoice):
        return ran.is_native
    if ran.replacement.winner is not None:
        return False
    return constructing or ran.kernel.winner.method in ("forward_native", "forward")


def _ran(frame: FrameType) -> Binding | FormChoice | None:
    """Return the choice for the op or the functional form of a frame; ``None`` for other code."""
    code = frame.f_code
    if not code.co_argcount:
        return None
    own = _first_argument(frame)
    # Not isinstance(): the object may answer for its class by code of its own.
    cls = type(own)
    if issubclass(cls, CustomOp) and code in _codes_of_class(cls, CustomOp):
        binding: Binding | None = vars(own).get("_binding")
        return binding
    if not issubclass(cls, Functional) or code not in _codes_of_class(cls, Functional):
        return None
    try:
        return choice_of(own)
    # The choice itself has failed, and the message of that error says all.
    except OpgraftError:
        return None


def _first_argument(frame: FrameType) -> Any:
    """Return the first argument of a call of this thread."""
    return frame.f_locals.get(frame.f_code.co_varnames[0])


def _codes_of_class(cls: type, base: type) -> Iterator[CodeType]:
    """Yield the code of all methods of a class and of the bases below ``base``, and of ``base``.

    The bound kernel is among the methods, as ``forward`` of the specialisation. Other functions
    with an op as an argument are not.
    """
    for each in cls.__mro__:
        if not issubclass(each, base):
            continue
        for value in vars(each).values():
            is_wrapped = isinstance(value, classmethod | staticmethod)
            yield from _codes_of(value.__func__ if is_wrapped else value)


def _codes_of(value: object) -> Iterator[CodeType]:
    """Yield the code of a function, and of the function that it wraps; nothing of other values."""
    if isinstance(value, FunctionType):
        yield value.__code__
        # Code of others may wrap functions in a circle.
        with suppress(ValueError):
            yield inspect.unwrap(value).__code__


def _of_plugin(
    places: list[Place], name_of: Callable[[FrameType], str] | None = None
) -> Provenance | None:
    """Describe the plugin of the outermost of some frames; ``None`` if it belongs to no plugin.

    ``name_of`` names the function of a frame, by default with the class of its first argument.
    """
    frame, line = places[0]
    module = str(frame.f_globals.get("__name__"))
    discovery = discover()
    provider = discovery.provider_of(module)
    offers = [each for each in discovery.offers if not each.built_in and each.provider == provider]
    if not offers:
        return None

    def nearness(offer: Offer) -> tuple[bool, str]:
        return f"{module}.".startswith(f"{offer.module}."), offer.module

    offer = max(offers, key=nearness)
    ways = f"{PLUGINS_DISABLE}={offer.name}"
    setting = host_state().settings().to_change("plugins_disable", ways)
    location = f"{frame.f_code.co_filename}:{line}"
    name = (name_of or _name_of)(frame)
    return Provenance("", name, offer.provider, location, setting)


def _name_of(frame: FrameType) -> str:
    """Return the name of a function; of a method, with the class that defines the method."""
    code = frame.f_code
    if code.co_argcount:
        own = _first_argument(frame)
        for base in type(own).__mro__:
            function = vars(base).get(code.co_name)
            if isinstance(function, FunctionType) and function.__code__ is code:
                return f"{base.__qualname__}.{code.co_name}"
    return code.co_name


def _qualified_name(frame: FrameType) -> str:
    """Return the name of a function, with its class from Python 3.11 on."""
    code = frame.f_code
    return getattr(code, "co_qualname", code.co_name)


def _location(places: list[Place], provider: Provider) -> str:
    """Return ``file:line`` of the innermost code of a plugin, or else outside of torch.

    The text is empty if there is none.
    """
    found = ""
    discovery = discover()
    of_plugin = discovery.has_plugin(provider)
    for frame, line in places:
        module = str(frame.f_globals.get("__name__"))
        is_own = discovery.provider_of(module) == provider if of_plugin else True
        if is_own and module.partition(".")[0] != "torch":
            found = f"{frame.f_code.co_filename}:{line}"
    return found
