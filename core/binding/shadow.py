"""Shadow mode: some calls of a kernel run the op's native definition, too, and the two are compared."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from opgraft.base.text import described, printable, table
from opgraft.binding import comparison
from opgraft.binding.comparison import leaves
from opgraft.compat.packed_linear import version_of
from opgraft.compat.tracing import constant_while_tracing, followed_or_transformed
from opgraft.config import ShadowConfig
from opgraft.logger import logger
from opgraft.registry.decision import Provider
from opgraft.registry.state import StateValue, host_state
from torch import Tensor, nn
from torch.compiler import is_compiling

_CATALOGUE = "opgraft.testing.catalogue"
"""Has the tolerances of ops. It stands above this module, and is imported when two runs are first compared."""

_NESTED: ContextVar[bool] = ContextVar("opgraft_shadow_nested", default=False)
"""Is true while a native definition runs for comparison, whose own ops are not compared."""

_RANDOM = "random numbers were drawn meanwhile, by it or by another thread, and two runs may differ by them"


class Shadow:
    """The watch over one kernel: the calls that are compared, and the result.

    Attributes:
        target: the class of the op, by whose proof tolerances are chosen.
        op: the name of the op, or its class.
        kernel: the kernel that is watched, such as ``AcmeRMSNorm.forward_oot``.
        native: the native definition, as it stands in its class.
        provider: who provides it.
        excluded: the reason why no call is compared; empty if calls are.
        calls: how many there were outside of compiled code.
        compared: how many of these were compared.
        drifted: how many of these differed.
        skipped: by reason, how many could not be compared though it was their turn.
        traced: how often a compiler traced a call: compiled code runs without a shadow.
        demotion: why the op runs its native definition instead, which the setting ``shadow.demote`` asks for.
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
        self.target, self.op, self.kernel, self.provider = target, op, kernel, provider
        self.native = native
        self.settings = settings
        self.excluded = excluded
        self.calls = self.compared = self.drifted = self.traced = 0
        self.skipped: Counter[str] = Counter()
        self.demotion: str | None = None
        self.first_drift = ""
        self._lock = threading.Lock()
        self._seen: set[object] = set()
        self._forms: dict[str, Callable[..., Any]] = {}

    def around(self, run: Callable[..., Any], native: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function or method that runs ``run`` and, when it is its turn, ``native`` on copies."""

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
        """Return the same of a functional form, always the same function."""
        with self._lock:
            return self._forms.setdefault(name, self.around(run, native))

    def _is_due(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """Count a call, and decide whether it is compared: by its number, so that ranks of a model do so together."""
        share, kinds = self.settings.share, None
        if self.settings.first_call:
            kinds = (
                run,
                *(leaf.dtype for _, leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)),
            )
        with self._lock:
            number = self.calls
            self.calls += 1
            new = kinds is not None and kinds not in self._seen
            if new:
                self._seen.add(kinds)
        return new or math.floor(number * share) > math.floor((number - 1) * share)

    def _watched(
        self,
        run: Callable[..., Any],
        native: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        copies: Any = ()
        try:
            reason = _obstacle(args, kwargs)
            if not reason:
                known: dict[int, Tensor] = {}
                copies = comparison.copied(args, known), comparison.copied(kwargs, known)
                beyond = _Beyond(args, copies)
        except (
            Exception
        ) as error:  # the caller did not ask for copies, and shall not suffer by them
            reason = f"copying its arguments raised {described(error)}"
        result = run(*args, **kwargs)
        if not reason:
            try:
                with _nested(), torch.no_grad():
                    reason = beyond.change()
                    expected = None if reason else native(*copies[0], **copies[1])
                    reason = reason or beyond.change()
                    if not reason:
                        given = (
                            comparison.arguments_of(run, args, kwargs),
                            comparison.arguments_of(run, *copies),
                        )
                        self._compare(*given, result, expected)
            except Exception as error:  # nor by the comparison
                reason = (
                    f"its native definition, or the comparison with it, raised {described(error)}"
                )
        if reason:
            self._skip(reason)
        return result

    def _compare(
        self, given: dict[str, Any], copies: dict[str, Any], result: Any, expected: Any
    ) -> None:
        """Compare results, and what was left in the arguments; report the first difference."""
        tensors = comparison.tensors_within((copies, expected))
        dtypes = {x.dtype.to_real() for x in tensors if x.is_floating_point() or x.is_complex()}
        tolerance = import_module(_CATALOGUE).tolerance_of((self.target,), dtypes)
        ours = list(leaves(result, "the result"))
        theirs = list(leaves(expected, "the result"))
        if [place for place, _ in ours] != [place for place, _ in theirs]:
            found = [f"the result has {len(ours)} parts, expected {len(theirs)}"]
            if len(ours) == len(theirs):
                kinds = type(result).__name__, type(expected).__name__
                found = [f"the result is a {kinds[0]}, expected a {kinds[1]}"]
        else:
            # What a kernel has written to an argument counts as a result.
            rows = [
                (f"the argument {name}", value, copies[name])
                for name, value in given.items()
                if isinstance(value, Tensor)
            ]
            pairs = zip(ours, theirs, strict=True)
            rows = [(place, value, right) for (place, value), (_, right) in pairs] + rows
            texts = (comparison.difference(*row, tolerance)[1] for row in rows)
            found = [text for text in texts if text]
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
            first = bool(found) and not self.first_drift
            if first:
                self.first_drift = drift
        if first:
            self._report()

    def _report(self) -> None:
        """Log the first difference, and demote the kernel where the settings ask for it."""
        demoted = ""
        if self.settings.demote:
            self.demotion = f"shadow mode has found that {self.kernel} differs: {self.first_drift}"
            demoted = " From now on the native definition runs, as shadow.demote asks."
            state = host_state()
            with state.lock:
                state.invalidate()
        whose = printable(
            f"{self.kernel} of {self.provider} differs from the native definition of op {self.op}: "
        )
        extra = {
            "event.name": "opgraft.shadow.drift",
            "opgraft.op": printable(self.op),
            "opgraft.kernel": printable(self.kernel),
            "opgraft.shadow.drift": self.first_drift,
            "opgraft.shadow.demoted": bool(demoted),
            **self.provider.attributes(),
        }
        logger.warning("%s", f"{whose}{self.first_drift}.{demoted}", extra=extra)

    def _skip(self, reason: str) -> None:
        with self._lock:
            self.skipped[reason] += 1

    def __str__(self) -> str:
        if self.excluded:
            return f"no call is compared with the native definition: {self.excluded}"
        parts = [
            f"{self.compared} of {self.calls} calls compared with the native definition, {self.drifted} differ"
        ]
        parts += [f"{count} not compared: {reason}" for reason, count in self.skipped.items()]
        if self.traced:
            parts.append(f"compiled {self.traced} times, and what was compiled is not compared")
        return "; ".join(parts)


@dataclass(frozen=True)
class ShadowRow:
    """The counts of one kernel; attributes as those of ``Shadow``, ``remark`` its words about what is not compared."""

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
    """The kernels that shadow mode has watched in this process; printed, a table."""

    rows: tuple[ShadowRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data, ready for ``json.dumps``."""
        return {"kernels": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        if not self.rows:
            return "no kernel is watched: set shadow.share or shadow.first_call before ops are constructed"
        names = ("op", "kernel", "provider", "calls", "compared", "differ", "remark")
        cells = [
            (
                r.op,
                r.kernel,
                r.provider,
                r.calls,
                r.compared,
                r.drifted,
                "demoted" if r.demoted else r.remark,
            )
            for r in self.rows
        ]
        first = [
            printable(f"{row.kernel}: {row.first_drift}") for row in self.rows if row.first_drift
        ]
        return "\n".join([*table([names, *cells]), *(["", *first] if first else [])])


SHADOWS = StateValue[dict[object, Shadow]](dict)
"""By kernel and settings, the ``Shadow`` that counts its calls; all scopes that share settings share it."""


def shadow_report() -> ShadowReport:
    """List the kernels that shadow mode watches in this process, with calls, comparisons and differences."""
    shadows = sorted(SHADOWS.get().values(), key=lambda each: (each.op, each.kernel))
    return ShadowReport(tuple(map(_row, shadows)))


def _row(shadow: Shadow) -> ShadowRow:
    _, _, remark = str(shadow).partition("; ")
    return ShadowRow(
        shadow.op,
        shadow.kernel,
        shadow.provider,
        shadow.calls,
        shadow.compared,
        shadow.drifted,
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


def _obstacle(args: Any, kwargs: Any) -> str:
    """Say why a call cannot be run twice, or return ""."""
    if followed_or_transformed():
        return "something follows its operators, such as torch.func, a dispatch mode or a trace"
    for module, _ in _accelerators((args, kwargs)):
        captures = getattr(module, "is_current_stream_capturing", bool)
        if captures():
            return "its device captures a graph"
    own = bool(args) and isinstance(args[0], nn.Module)  # the op itself, which is watched instead
    return comparison.obstacle_to_copies((args[own:], kwargs))


def _accelerators(values: Any) -> list[tuple[Any, torch.device]]:
    """Return the module of torch and the device for each accelerator that holds one of the values."""
    tensors = [leaf for _, leaf in leaves(values) if isinstance(leaf, Tensor)]
    devices = {tensor.device for tensor in tensors}
    return [
        (torch.get_device_module(device), device)
        for device in devices
        if device.type not in ("cpu", "meta")
    ]


class _Beyond:
    """Notes the tensors of an op and the generators as they are now, which two runs share beyond their arguments.

    No generator is ever set back: other threads draw from the same, and would draw the same numbers again.
    """

    def __init__(self, args: tuple[Any, ...], copies: Any) -> None:
        op = args[0] if args and isinstance(args[0], nn.Module) else None
        own = itertools.chain(op.named_parameters(), op.named_buffers()) if op is not None else ()
        self._own = []
        for name, tensor in own:
            # Tensors of inference mode have no version.
            if not tensor.is_inference():
                self._own.append((name, tensor, version_of(tensor)))
        self._devices = _accelerators(copies)
        self._states = self._generators()

    def _generators(self) -> list[Tensor]:
        return [
            torch.get_rng_state(),
            *(module.get_rng_state(device) for module, device in self._devices),
        ]

    def change(self) -> str:
        """Say what has changed since, by which two runs may differ, or return ""."""
        if not all(map(torch.equal, self._states, self._generators())):
            return _RANDOM
        written = [name for name, tensor, version in self._own if version_of(tensor) != version]
        return (
            f"it writes to {', '.join(written)} of its own, which a second run would find changed"
            if written
            else ""
        )
