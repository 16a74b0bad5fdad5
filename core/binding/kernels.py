"""Choose the method of an op class that becomes ``forward``.

``choose_kernel`` decides by the class, the dispatch chain of the platform and the settings alone.
With the chain ``("oot", "cuda", "native")`` and the classes::

    class RMSNorm(CustomOp):       # forward_native, forward_cuda
    class AcmeRMSNorm(RMSNorm):    # forward_oot

``AcmeRMSNorm`` runs ``forward_oot``, and ``RMSNorm`` runs ``forward_cuda``. ``continuations_of``
says where ``super().forward_oot(...)`` of the first goes: to ``forward_cuda``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from opgraft.binding.derivation import NATIVE, FunctionalKernels, is_derived
from opgraft.binding.marks import fallback_of, is_inference_only, unmet_need
from opgraft.binding.shadow import Shadow
from opgraft.errors import MissingKernelError
from opgraft.platform import DISPATCH_KEYS
from opgraft.registry.decision import Candidate, Decision
from opgraft.registry.op_classes import (
    definer,
    kernel_methods,
    location_of,
    own_classes,
    told_apart,
)

SWITCH = "OPGRAFT_CUSTOM_OPS or compilation_config.custom_ops (+op, -op)"
"""The ways to enable or disable an op, unless a scope or the class decides."""

NO_REPLACEMENT = "forward_oot of a class that is no replacement runs on out-of-tree platforms only"
"""The reason why a built-in platform passes over the kernel."""


@dataclass(frozen=True)
class Kernel:
    """A method of an op class that may become ``forward``.

    Attributes:
        owner: the class, in the op's MRO, that defines the method.
        method: the name of the method, such as ``forward_cuda``.
        shadow: counts and compares calls, if the settings ask for shadow mode.
    """

    owner: type
    method: str
    shadow: Shadow | None = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> str:
        """The dispatch key, or ``forward`` for the method of that name."""
        return self.method.removeprefix("forward_")

    @property
    def definition(self) -> Any:
        """The method as the class holds it: a static method stays a ``staticmethod``."""
        return vars(self.owner)[self.method]

    @property
    def location(self) -> str:
        """``file:line`` of the method; of the class, if the method is derived from forms."""
        definition = self.definition
        return location_of(self.owner if is_derived(definition) else definition)

    @property
    def inference_only(self) -> bool:
        """The kernel has no backward: for a gradient, the native definition runs."""
        return is_inference_only(self.definition)

    @property
    def fallback(self) -> str | None:
        """The remark of ``falls_back`` on other code that the kernel may run; ``None`` without."""
        return fallback_of(self.definition)

    def missing(self) -> str | None:
        """Name the requirement that this machine or installation lacks, or ``None``."""
        return unmet_need(self.definition, f"{self.owner.__qualname__}.{self.method}")

    def functional(self, form: str) -> Callable[..., Any] | None:
        """Return this kernel as a function with the signature of the named form.

        ``None`` if the class brings no function for the form.
        """
        function = (self.functions or {}).get(form)
        # Shadow mode compares calls of forms, too.
        if function is None or self.shadow is None or self.shadow.excluded:
            return function
        return self.shadow.of_form(form, function, getattr(NATIVE, form))

    def traced(self, form: str) -> Callable[..., Any] | None:
        """Return the function that compilers trace in place of ``functional(form)``.

        ``None`` if the class names none, or if shadow mode compares the calls of the form.
        """
        table = self.functions
        if not isinstance(table, FunctionalKernels):
            return None
        is_shadowed = self.functional(form) is not table.get(form)
        return None if is_shadowed else table.compiled.get(form)

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]] | None:
        """The functions of this kernel by form; ``None`` if the class brings none."""
        # vars(), as the table of a base class belongs to another kernel.
        return vars(self.owner).get(f"functional_{self.key}")

    def __str__(self) -> str:
        return f"{self.owner.__qualname__}.{self.method}"


@dataclass(frozen=True)
class KernelChoice:
    """The choice of the method of ``cls`` that becomes ``forward``.

    Attributes:
        cls: the op class, a replacement perhaps.
        chain: the dispatch keys of the platform, the preferred one first.
        found: every definition that can run, the winner first.
        missing: definitions that cannot run here, each with the reason.
        enabled: if ``False``, the native definition goes first.
        enabled_because: the reason why the op is enabled or disabled.
        switch: how to enable or disable the op, in words.
        left_to_compiler: the op is disabled only so that a compiler may fuse it.
        idle_oot: classes that are no replacement, with a ``forward_oot`` that does not run on this
            platform.
    """

    cls: type
    chain: tuple[str, ...]
    found: tuple[Kernel, ...]
    missing: tuple[tuple[Kernel, str], ...]
    enabled: bool
    enabled_because: str
    switch: str = SWITCH
    left_to_compiler: bool = False
    idle_oot: frozenset[type] = frozenset()

    @property
    def winner(self) -> Kernel:
        """The kernel that becomes ``forward``."""
        return self.found[0]

    @cached_property
    def eager(self) -> Kernel:
        """The kernel of eager calls: the winner, unless the op is left to a compiler."""
        if not self.left_to_compiler:
            return self.winner
        # The order of declaration is the order for an enabled op.
        declared = declared_kernels(self.cls, self.chain)
        return min(self.found, key=declared.index)

    @property
    def passed_over(self) -> list[tuple[Kernel, str]]:
        """The kernels that cannot run and would go before the winner, each with the reason."""
        if not self.enabled:
            return []
        order = declared_kernels(self.cls, self.chain)
        first = order.index(self.winner)
        return [(kernel, why) for kernel, why in self.missing if order.index(kernel) < first]

    @property
    def decision(self) -> Decision:
        """The record of the choice, for tables and messages."""
        candidates = []
        for kernel in self.found:
            wins = kernel is self.winner
            why = self._verdict(kernel)
            candidates.append(Candidate(self._shown(kernel), wins, why, location=kernel.location))
        for kernel, why in self.missing:
            candidates.append(Candidate(self._shown(kernel), False, why, location=kernel.location))

        state = "enabled" if self.enabled else "disabled"
        reason = f"{state}: {self.enabled_because}; dispatch chain {' > '.join(self.chain)}"
        # With one kernel alone, no setting changes the choice.
        is_switchable = getattr(self.cls, "switchable", True) and len(self.found) > 1
        setting = self.switch if is_switchable else ""
        subject = f"kernel of {self.cls.__qualname__}"
        return Decision(subject, self._shown(self.winner), reason, tuple(candidates), setting)

    def _verdict(self, kernel: Kernel) -> str:
        """Return the reason why a kernel that can run is the winner, or is not."""
        wins = kernel is self.winner
        if not self.enabled:
            if wins:
                return "the op is disabled, so its native definition runs"
            if self.left_to_compiler and kernel is self.eager:
                return "the op is disabled, and a DecoderPlan takes this where it computes"
            return "the op is disabled"
        if wins:
            return "; ".join(self._remarks(kernel))
        if kernel.owner is self.winner.owner:
            return f"later in the chain than {self.winner.method}"
        return f"{self._shown_class(self.winner.owner)} is more derived"

    def _remarks(self, winner: Kernel) -> Iterator[str]:
        yield "the most derived definition for this chain"
        if winner.inference_only:
            yield "without a backward, so forward_native runs where a gradient is required"
        if winner.fallback:
            yield winner.fallback
        if winner.shadow:
            yield str(winner.shadow)
        if winner.key == "native" or winner.functions is not None:
            return
        if definer(self.cls, "forward_native"):
            yield (
                f"its class brings no functional_{winner.key}, so functional forms, if the op has "
                "any, run their native definition"
            )

    def _shown(self, kernel: Kernel) -> str:
        return f"{self._shown_class(kernel.owner)}.{kernel.method}"

    def _shown_class(self, cls: type) -> str:
        kernels = (*self.found, *dict(self.missing))
        return told_apart(cls, (kernel.owner for kernel in kernels))


def choose_kernel(
    cls: type,
    chain: tuple[str, ...],
    enabled: bool,
    enabled_because: str,
    target: type | None = None,
    switch: str = SWITCH,
    idle_oot: frozenset[type] = frozenset(),
) -> KernelChoice:
    """Choose the method of ``cls`` that becomes ``forward``: the most derived definition wins.

    The search walks the MRO from ``cls`` up to the base of all ops. The first class that defines
    ``forward``, or ``forward_<key>`` for a key of ``chain``, decides; within a class, ``forward``
    goes first, then the keys in the order of the chain. A kernel with an unmet need is left out.

    If the op is disabled, ``forward_native`` goes first, and so does the ``forward`` of ``target``:
    a layer's own ``forward`` stays, and the ``forward`` of a replacement is switched off.

    Args:
        cls: the class to construct, a replacement perhaps.
        chain: the dispatch keys of the platform.
        enabled: if ``False``, the op is disabled.
        enabled_because: the reason, for the record.
        target: the op class that ``cls`` replaces; by default ``cls`` itself.
        switch: how to enable or disable the op, for the record.
        idle_oot: classes that are no replacement; their ``forward_oot`` does not count.

    Raises:
        MissingKernelError: no class defines a kernel that can run here.
    """
    defined = declared_kernels(cls, chain)
    missing: dict[Kernel, str] = {}
    for kernel in defined:
        reason = objection_to_kernel(kernel, idle_oot)
        if reason:
            missing[kernel] = reason
    found = [kernel for kernel in defined if kernel not in missing]
    # The others follow, since the record shows the kernels of a disabled op too.
    if not enabled:
        of_disabled_op = [kernel for kernel in found if _runs_disabled(kernel, target or cls)]
        others = [kernel for kernel in found if kernel not in of_disabled_op]
        found = [*of_disabled_op, *others]
    if not found:
        lacking = "".join(f" {kernel} cannot run here: {why}." for kernel, why in missing.items())
        raise MissingKernelError(
            f"{cls.__qualname__} at {location_of(cls)} defines neither forward nor a kernel for "
            f"any key of the dispatch chain {chain} that can run here.{lacking} Define "
            "forward_native, which every platform can run"
        )
    return KernelChoice(
        cls,
        chain,
        tuple(found),
        tuple(missing.items()),
        enabled,
        enabled_because,
        switch,
        idle_oot=idle_oot,
    )


def objection_to_kernel(kernel: Kernel, idle_oot: frozenset[type]) -> str | None:
    """Return the reason why a kernel of the chain cannot run here, or ``None``."""
    if kernel.key == "oot" and kernel.owner in idle_oot:
        return NO_REPLACEMENT
    return kernel.missing()


def declared_kernels(cls: type, chain: tuple[str, ...]) -> list[Kernel]:
    """Return every definition that counts for a chain, the most derived first.

    Kernels with an unmet need are among them.
    """
    wanted = ["forward", *(f"forward_{key}" for key in chain)]
    return [kernel for base in own_classes(cls) for kernel in _kernels(base, wanted)]


def _kernels(base: type, methods: Iterable[str]) -> list[Kernel]:
    return [Kernel(base, method) for method in methods if method in vars(base)]


def _runs_disabled(kernel: Kernel, target: type) -> bool:
    """Return True if a disabled op may run a kernel."""
    if kernel.method == "forward_native":
        return True
    if kernel.method != "forward" or kernel.owner not in target.__mro__:
        return False
    # A class with both methods runs forward_native.
    has_native = "forward_native" in vars(kernel.owner)
    return not has_native


HIDDEN_FORWARD = "_hidden_forward"
"""The attribute of a specialisation for the op class's ``forward``, which the kernel hides."""


def continuations_of(choice: KernelChoice) -> dict[str, str | None]:
    """Return the methods that ``CustomOp`` calls in place of its own, by name.

    ``forward_<key>`` calls the next defined method in the chain after ``key``. A key outside of the
    chain belongs to another device, and calls ``forward_native``. Without a native definition, the
    last one is the op class's ``forward``, which the specialisation hides. ``forward`` calls the
    most derived kernel; of a disabled op, the native definition.

    Example: a class with ``forward_cuda`` and ``forward_native``, and the chain
    ``("oot", "cuda", "native")``, give ``{"forward_oot": "forward_cuda", "forward_cuda":
    "forward_native", "forward_native": None, ...}``.

    Returns:
        The table; ``None`` stands for a method without a next one.
    """
    chain = choice.chain
    defined = [_usable_methods(base, choice) for base in own_classes(choice.cls)]
    anywhere = set().union(*defined)
    methods = [f"forward_{key}" for key in chain]
    hidden_forward = HIDDEN_FORWARD if "forward" in anywhere else None

    preferred = methods if choice.enabled else ["forward_native"]
    continuations = {"forward": _first(preferred, defined)}
    for key in DISPATCH_KEYS:
        # The caller has left the most derived class already, so any class may serve.
        rest = methods[chain.index(key) + 1 :] if key in chain else ["forward_native"]
        continuations[f"forward_{key}"] = _first(rest, [anywhere]) or hidden_forward
    return continuations


def _usable_methods(base: type, choice: KernelChoice) -> set[str]:
    kernels = _kernels(base, kernel_methods())
    return {each.method for each in kernels if not objection_to_kernel(each, choice.idle_oot)}


def _first(names: Sequence[str], scopes: Sequence[set[str]]) -> str | None:
    """Return the first of the names in the first scope that has one."""
    for scope in scopes:
        for name in names:
            if name in scope:
                return name
    return None


def method_of(definition: Any) -> Callable[..., Any]:
    """Return a method as a function with ``self``, if a class holds it as a static method too."""
    if not isinstance(definition, staticmethod):
        method: Callable[..., Any] = definition
        return method
    function = definition.__func__
    return functools.wraps(function)(lambda self, *args, **kwargs: function(*args, **kwargs))
