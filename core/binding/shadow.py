"""Shadow mode: compare some calls of a kernel with the op's native definition."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from opgraft.base.log import logger
from opgraft.base.text import described, printable, table
from opgraft.binding import comparison
from opgraft.binding.comparison import leaves
from opgraft.compat.packed_linear import version_of
from opgraft.compat.tracing import constant_while_tracing, followed_or_transformed
from opgraft.config import ShadowConfig
from opgraft.registry.decision import Provider
from opgraft.registry.state import StateValue, host_state
from torch import Tensor, nn
from torch.compiler import is_compiling

_CATALOGUE = "opgraft.testing.catalogue"
"""The module with the tolerances of ops, imported late, as the module stands above this one."""

_NESTED: ContextVar[bool] = ContextVar("opgraft_shadow_nested", default=False)
"""True while a native definition runs for a comparison: ops within are not compared."""

_RANDOM = (
    "random numbers were drawn meanwhile, by it or by another thread, and two runs may differ by "
    "them"
)


class Shadow:
    """The watch over one kernel: compared calls, and the result of comparing.

    Attributes:
        target: the class of the op, for the tolerances.
        op: the name of the op, or of the class.
        kernel: the watched kernel, such as ``AcmeRMSNorm.forward_oot``.
        native: the native definition, as an attribute of the class.
        provider: the provider of the kernel.
        excluded: the reason why no call is compared; empty if calls are compared.
        calls: the number of calls outside of compiled code.
        compared: the number of compared calls.
        drifted: the number of compared calls with a difference.
        skipped: by reason, the number of due calls that could not be compared.
        traced: the number of calls in a compiler's trace: compiled code runs without a shadow.
        demotion: why the op runs the native definition instead. The setting ``shadow.demote``
            allows that.
        first_drift: the first difference, in words.
    """

    def __init__(
        self,
        target: type,
        op: str,
        kernel: str,
        provider: Provider,
        native: Any,
        settings: ShadowConfig,
        excluded: str = "",
    ) -> None:
        self.target = target
        self.op = op
        self.kernel = kernel
        self.provider = provider
        self.native = native
        self.settings = settings
        self.excluded = excluded
        self.calls = 0
        self.compared = 0
        self.drifted = 0
        self.traced = 0
        self.skipped: Counter[str] = Counter()
        self.demotion: str | None = None
        self.first_drift = ""
        self._lock = threading.Lock()
        self._seen: set[object] = set()
        self._forms: dict[str, Callable[..., Any]] = {}

    def around(self, run: Callable[..., Any], native: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``run``, and compares the due calls with ``native``."""

        @constant_while_tracing
        def trace() -> None:
            with self._lock:
                self.traced += 1

        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Compilers guard the attribute: compiled code of a demoted kernel is not used any more.
            if self.demotion is not None:
                return native(*args, **kwargs)
            if is_compiling():
                trace()
                return run(*args, **kwargs)
            if _NESTED.get() or not self._is_due(run, args, kwargs):
                return run(*args, **kwargs)
            return self._watched(run, native, args, kwargs)

        return call

    def of_form(
        self, name: str, run: Callable[..., Any], native: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return the same for a functional form, always the same function."""
        with self._lock:
            return self._forms.setdefault(name, self.around(run, native))

    def _is_due(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """Count a call, and decide by the number: all ranks of a model compare the same calls."""
        kinds = None
        # A kernel may have a code path per dtype, and the first call of each is compared.
        if self.settings.first_call:
            dtypes = [tensor.dtype for tensor in comparison.tensors_within((args, kwargs))]
            kinds = (run, *dtypes)
        with self._lock:
            number = self.calls
            self.calls += 1
            is_new = kinds is not None and kinds not in self._seen
            if is_new:
                self._seen.add(kinds)
        share = self.settings.share
        # Evenly spread: with a share of 0.25, every fourth call is due.
        return is_new or math.floor(number * share) > math.floor((number - 1) * share)

    def _watched(
        self,
        run: Callable[..., Any],
        native: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the kernel, and the native definition on copies; return the kernel's result.

        The caller asked for neither copies nor a comparison. An exception of these is a reason to
        skip the comparison, and never reaches the caller.
        """
        copies: Any = ()
        try:
            reason = _why_not_twice(args, kwargs)
            if not reason:
                known: dict[int, Tensor] = {}
                copies = comparison.copied(args, known), comparison.copied(kwargs, known)
                beyond = _Beyond(args, copies)
        except Exception as error:
            reason = f"copying its arguments raised {described(error)}"
        # Outside of any try: an exception of the kernel is the caller's.
        result = run(*args, **kwargs)
        if reason:
            self._skip(reason)
            return result
        try:
            with _nested(), torch.no_grad():
                # The kernel may have drawn random numbers, and so may the native definition.
                reason = beyond.change()
                expected = None if reason else native(*copies[0], **copies[1])
                reason = reason or beyond.change()
                if not reason:
                    given = comparison.arguments_of(run, args, kwargs)
                    taken = comparison.arguments_of(run, *copies)
                    self._compare(given, taken, result, expected)
        except Exception as error:
            reason = f"its native definition, or the comparison with it, raised {described(error)}"
        if reason:
            self._skip(reason)
        return result

    def _compare(
        self, given: dict[str, Any], copies: dict[str, Any], result: Any, expected: Any
    ) -> None:
        """Compare results and arguments after both calls, and report the first difference."""
        found = self._differences(given, copies, result, expected)
        # Describing arguments takes time, so that only the first difference is described.
        drift = ""
        if found and not self.first_drift:
            arguments = [
                f"{name}: {comparison.description_of(leaf)}" for name, leaf in copies.items()
            ]
            words = "; ".join(arguments)
            drift = printable(f"{'; '.join(found)}, where it was called with {words}")
        with self._lock:
            self.compared += 1
            self.drifted += bool(found)
            # Two threads may find a difference at once, and one of them reports.
            is_first = bool(found) and not self.first_drift
            if is_first:
                self.first_drift = drift
        if is_first:
            self._report()

    def _differences(
        self, given: dict[str, Any], copies: dict[str, Any], result: Any, expected: Any
    ) -> Sequence[str]:
        """Return the differences in words; empty within the tolerance."""
        ours = list(leaves(result, "the result"))
        theirs = list(leaves(expected, "the result"))
        if len(ours) != len(theirs):
            return [f"the result has {len(ours)} parts, expected {len(theirs)}"]
        if [place for place, _ in ours] != [place for place, _ in theirs]:
            kinds = type(result).__name__, type(expected).__name__
            return [f"the result is a {kinds[0]}, expected a {kinds[1]}"]
        right = [value for _, value in theirs]
        # A kernel may write results to arguments.
        for name, value in given.items():
            if isinstance(value, Tensor):
                ours.append((f"the argument {name}", value))
                right.append(copies[name])
        tolerance = self._tolerance((copies, expected))
        return comparison.compare(ours, right, itertools.repeat(tolerance, len(ours))).reasons

    def _tolerance(self, values: Any) -> comparison.Tolerance:
        """Return the widest tolerance of the op for the dtypes in some values."""
        tensors = comparison.tensors_within(values)
        dtypes = {x.dtype.to_real() for x in tensors if x.is_floating_point() or x.is_complex()}
        tolerance: comparison.Tolerance = import_module(_CATALOGUE).tolerance_of(
            (self.target,), dtypes
        )
        return tolerance

    def _report(self) -> None:
        """Log the first difference, and demote the kernel if the settings ask for that."""
        demoted = ""
        if self.settings.demote:
            self.demotion = f"shadow mode has found that {self.kernel} differs: {self.first_drift}"
            demoted = " From now on the native definition runs, as shadow.demote asks."
            # Bound ops ask again for a kernel.
            state = host_state()
            with state.lock:
                state.invalidate()
        told = (
            f"{self.kernel} of {self.provider} differs from the native definition of op {self.op}"
        )
        extra = {
            "event.name": "opgraft.shadow.drift",
            "opgraft.op": printable(self.op),
            "opgraft.kernel": printable(self.kernel),
            "opgraft.shadow.drift": self.first_drift,
            "opgraft.shadow.demoted": bool(demoted),
            **self.provider.attributes(),
        }
        message = f"{printable(told)}: {self.first_drift}.{demoted}"
        logger.warning("%s", message, extra=extra)

    def _skip(self, reason: str) -> None:
        with self._lock:
            self.skipped[reason] += 1

    def __str__(self) -> str:
        if self.excluded:
            return f"no call is compared with the native definition: {self.excluded}"
        parts = [
            f"{self.compared} of {self.calls} calls compared with the native definition, "
            f"{self.drifted} differ"
        ]
        parts += [f"{count} not compared: {reason}" for reason, count in self.skipped.items()]
        if self.traced:
            parts.append(f"compiled {self.traced} times, and what was compiled is not compared")
        return "; ".join(parts)


@dataclass(frozen=True)
class ShadowRow:
    """The counts of one kernel.

    Attributes are those of ``Shadow``; ``remark`` is about calls that are not compared.
    """

    op: str
    kernel: str
    provider: Provider
    calls: int
    compared: int
    drifted: int
    demoted: bool
    remark: str
    first_drift: str

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {**vars(self), "provider": self.provider.to_dict()}


@dataclass(frozen=True)
class ShadowReport:
    """The kernels under shadow mode in this process; printed as a table."""

    rows: tuple[ShadowRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data, ready for ``json.dumps``."""
        return {"kernels": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        if not self.rows:
            return (
                "no kernel is watched: set shadow.share or shadow.first_call before ops are "
                "constructed"
            )
        cells: list[tuple[Any, ...]] = [
            ("op", "kernel", "provider", "calls", "compared", "differ", "remark")
        ]
        first = []
        for row in self.rows:
            remark = "demoted" if row.demoted else row.remark
            counts = row.calls, row.compared, row.drifted
            cells.append((row.op, row.kernel, row.provider, *counts, remark))
            if row.first_drift:
                first.append(printable(f"{row.kernel}: {row.first_drift}"))
        lines = table(cells)
        return "\n".join([*lines, "", *first] if first else lines)


SHADOWS = StateValue[dict[object, Shadow]](dict)
"""The watch over each kernel, by kernel and settings; scopes with equal settings share a watch."""


def shadow_report() -> ShadowReport:
    """List the kernels under shadow mode in this process, with their counts and differences."""
    shadows = sorted(SHADOWS.get().values(), key=lambda each: (each.op, each.kernel))
    return ShadowReport(tuple(map(_shadow_row, shadows)))


def _shadow_row(shadow: Shadow) -> ShadowRow:
    _, _, remark = str(shadow).partition("; ")
    counts = shadow.calls, shadow.compared, shadow.drifted
    return ShadowRow(
        shadow.op,
        shadow.kernel,
        shadow.provider,
        *counts,
        shadow.demotion is not None,
        shadow.excluded or remark,
        shadow.first_drift,
    )


@contextmanager
def _nested() -> Iterator[None]:
    token = _NESTED.set(True)
    try:
        yield
    finally:
        _NESTED.reset(token)


def _why_not_twice(args: Any, kwargs: Any) -> str:
    """Return the reason why a call cannot run twice; empty if the call can."""
    if followed_or_transformed():
        return "something follows its operators, such as torch.func, a dispatch mode or a trace"
    for module, _ in _accelerators((args, kwargs)):
        captures = getattr(module, "is_current_stream_capturing", bool)
        if captures():
            return "its device captures a graph"
    # The first argument may be the op itself, which has a watch of its own.
    own = bool(args) and isinstance(args[0], nn.Module)
    return comparison.obstacle_to_copies((args[own:], kwargs))


def _accelerators(values: Any) -> list[tuple[Any, torch.device]]:
    """Return the module of torch and the device for each accelerator with one of the values."""
    devices = {tensor.device for tensor in comparison.tensors_within(values)}
    found = []
    for device in devices:
        if device.type not in ("cpu", "meta"):
            found.append((torch.get_device_module(device), device))
    return found


class _Beyond:
    """Notes the state that two calls share beyond arguments: tensors of the op, and generators.

    No generator is ever set back: other threads draw from the same generator, and would draw the
    same numbers again.
    """

    def __init__(self, args: tuple[Any, ...], copies: Any) -> None:
        self._own = []
        op = args[0] if args and isinstance(args[0], nn.Module) else None
        if op is not None:
            for name, tensor in itertools.chain(op.named_parameters(), op.named_buffers()):
                # Tensors of inference mode have no version.
                if not tensor.is_inference():
                    self._own.append((name, tensor, version_of(tensor)))
        self._devices = _accelerators(copies)
        self._states = self._generators()

    def _generators(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        states += [module.get_rng_state(device) for module, device in self._devices]
        return states

    def change(self) -> str:
        """Return the change since then that makes two calls differ; empty if nothing changed."""
        if not all(map(torch.equal, self._states, self._generators())):
            return _RANDOM
        written = [name for name, tensor, version in self._own if version_of(tensor) != version]
        if not written:
            return ""
        names = ", ".join(written)
        return f"it writes to {names} of its own, which a second run would find changed"
