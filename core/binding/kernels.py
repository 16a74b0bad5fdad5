"""Choose which method of an op class becomes ``forward``: a function of the class, a dispatch chain and settings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""The ways to enable or disable an op, where no scope and no class says otherwise."""

IN_TREE = "forward_oot of a class in the tree runs on out-of-tree platforms only"
"""The reason why a built-in platform passes over the kernel."""


@dataclass(frozen=True)
class Kernel:
    """The method that an op is bound to: ``method`` as ``owner``, a class in the op's MRO, defines it.

    ``shadow`` counts and compares its calls, where the settings ask for that.
    """

    owner: type
    method: str
    shadow: Shadow | None = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> str:
        """The dispatch key, or ``forward`` where the class defines ``forward`` itself."""
        return self.method.removeprefix("forward_")

    @property
    def definition(self) -> Any:
        """The method as it stands in its class: getattr() would take what a static method is."""
        return vars(self.owner)[self.method]

    @property
    def location(self) -> str:
        return location_of(self.owner if is_derived(self.definition) else self.definition)

    @property
    def inference_only(self) -> bool:
        """Tell whether it has no backward, so that the native definition runs where a gradient is required."""
        return is_inference_only(self.definition)

    @property
    def fallback(self) -> str | None:
        """Say when it runs something else instead, and which, as far as it tells."""
        return fallback_of(self.definition)

    def missing(self) -> str | None:
        """Name the requirement that this machine or installation lacks, or ``None``."""
        return unmet_need(self.definition, f"{self.owner.__qualname__}.{self.method}")

    def functional(self, form: str) -> Callable[..., Any] | None:
        """Return the same kernel as a function with the signature of the named form, where its class brings one."""
        function = (self.functions or {}).get(form)
        if function is None or self.shadow is None or self.shadow.excluded:
            return function
        return self.shadow.of_form(form, function, getattr(NATIVE, form))

    def compiled(self, form: str) -> Callable[..., Any] | None:
        """Return what compilers trace in place of ``functional(form)``, where its class says so and nobody looks on."""
        table = self.functions
        if not isinstance(table, FunctionalKernels) or self.functional(form) is not table.get(form):
            return None
        return table.compiled.get(form)

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]] | None:
        """By form, the functions that are this kernel. The table of a base class is that of another kernel."""
        return vars(self.owner).get(f"functional_{self.key}")

    def __str__(self) -> str:
        return f"{self.owner.__qualname__}.{self.method}"


@dataclass(frozen=True)
class KernelChoice:
    """The method of ``cls`` that becomes ``forward``.

    Attributes:
        found: the definitions that can run, the winner first.
        missing: the definitions that cannot run, each with the reason.
        switch: the setting that enables or disables the op.
        left_to_compiler: the op is disabled only so that a compiler may fuse it.
        idle_oot: the classes in the tree with a ``forward_oot`` that does not run here.
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
        return self.found[0]

    @cached_property
    def uncompiled(self) -> Kernel:
        """The kernel where no compiler has the op: the winner, or what would be if the op were not left to one."""
        if not self.left_to_compiler:
            return self.winner
        return min(self.found, key=declared_kernels(self.cls, self.chain).index)

    @property
    def passed_over(self) -> list[tuple[Kernel, str]]:
        """The kernels that would come before the winner and cannot run, and why."""
        order = declared_kernels(self.cls, self.chain)
        first = order.index(self.winner)
        return [
            (kernel, why)
            for kernel, why in self.missing
            if self.enabled and order.index(kernel) < first
        ]

    @property
    def decision(self) -> Decision:
        candidates = tuple(
            Candidate(
                self._shown(kernel),
                kernel is self.winner,
                self._verdict(kernel),
                location=kernel.location,
            )
            for kernel in self.found
        ) + tuple(
            Candidate(self._shown(kernel), False, why, location=kernel.location)
            for kernel, why in self.missing
        )
        state = "enabled" if self.enabled else "disabled"
        reason = f"{state}: {self.enabled_because}; dispatch chain {' > '.join(self.chain)}"
        switchable = getattr(self.cls, "switchable", True) and len(self.found) > 1
        setting = self.switch if switchable else ""
        return Decision(
            f"kernel of {self.cls.__qualname__}",
            self._shown(self.winner),
            reason,
            candidates,
            setting,
        )

    def _verdict(self, kernel: Kernel) -> str:
        if not self.enabled:
            if kernel is self.winner:
                return "the op is disabled, so its native definition runs"
            planned = self.left_to_compiler and kernel is self.uncompiled
            return f"the op is disabled{', and a DecoderPlan takes this where it computes' if planned else ''}"
        if kernel is self.winner:
            notes = ["the most derived definition for this chain"]
            if kernel.inference_only:
                notes.append(
                    "without a backward, so forward_native runs where a gradient is required"
                )
            if kernel.fallback:
                notes.append(kernel.fallback)
            if kernel.shadow:
                notes.append(str(kernel.shadow))
            if (
                kernel.key != "native"
                and kernel.functions is None
                and definer(self.cls, "forward_native")
            ):
                notes.append(
                    f"its class brings no functional_{kernel.key}, so functional forms, if the op has any, run their "
                    "native definition"
                )
            return "; ".join(notes)
        if kernel.owner is self.winner.owner:
            return f"later in the chain than {self.winner.method}"
        return f"{self._shown_class(self.winner.owner)} is more derived"

    def _shown(self, kernel: Kernel) -> str:
        return f"{self._shown_class(kernel.owner)}.{kernel.method}"

    def _shown_class(self, cls: type) -> str:
        return told_apart(cls, (kernel.owner for kernel in (*self.found, *dict(self.missing))))


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

    The MRO is walked from ``cls`` up to the base of all ops. The first class that itself defines
    ``forward``, or a ``forward_<key>`` for a key of ``chain`` (in the chain's order), decides. A
    disabled op runs ``forward_native`` or ``forward``; the classes that replace ``target`` count
    with ``forward_native`` alone. ``forward_oot`` of the classes ``idle_oot`` does not count.

    Raises:
        MissingKernelError: no class defines any of them.
    """
    defined = declared_kernels(cls, chain)
    missing: dict[Kernel, str] = {}
    for kernel in defined:
        reason = objection_to_kernel(kernel, idle_oot)
        if reason:
            missing[kernel] = reason
    found = [kernel for kernel in defined if kernel not in missing]
    # Sorted, not filtered: the decision shows the kernels that do not run, too.
    if not enabled:
        # Stable: the class order stays.
        found.sort(key=lambda kernel: not _runs_disabled(kernel, target or cls))
    if not found:
        lacking = "".join(f" {kernel} cannot run here: {why}." for kernel, why in missing.items())
        raise MissingKernelError(
            f"{cls.__qualname__} at {location_of(cls)} defines neither forward nor a kernel for any key of the "
            f"dispatch chain {chain} that can run here.{lacking} Define forward_native, which every platform can run"
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
        return IN_TREE
    return kernel.missing()


def declared_kernels(cls: type, chain: tuple[str, ...]) -> list[Kernel]:
    """Return every definition that counts for a chain, the most derived first, whether or not it can run here."""
    wanted = ["forward", *(f"forward_{key}" for key in chain)]
    return [kernel for base in own_classes(cls) for kernel in _kernels(base, wanted)]


def _kernels(base: type, methods: Iterable[str]) -> list[Kernel]:
    return [Kernel(base, method) for method in methods if method in vars(base)]


def _runs_disabled(kernel: Kernel, target: type) -> bool:
    if kernel.method == "forward_native":
        return True
    native_beside = "forward_native" in vars(kernel.owner)
    return kernel.method == "forward" and kernel.owner in target.__mro__ and not native_beside


OWN_FORWARD = "_own_forward"
"""The attribute in which a specialisation keeps the ``forward`` that its op class defines."""


def continuations(choice: KernelChoice) -> dict[str, str | None]:
    """Return the method to call instead of each method of the base class, or ``None``.

    ``forward_<key>`` calls the next one in the chain after ``key``. A key outside the chain calls
    the native definition. Without a native definition, the class's own ``forward`` comes last.
    ``forward`` is the most derived kernel, of a disabled op the native one.
    """
    chain = choice.chain
    defined = [_usable_methods(base, choice) for base in own_classes(choice.cls)]
    methods = [f"forward_{key}" for key in chain]

    def first(names: Sequence[str], scopes: Sequence[set[str]]) -> str | None:
        for scope in scopes:
            for name in names:
                if name in scope:
                    return name
        return None

    last = OWN_FORWARD if any("forward" in scope for scope in defined) else None
    further = {"forward": first(methods if choice.enabled else ["forward_native"], defined)}
    for key in DISPATCH_KEYS:
        # A key that is not in this chain is another device's: after it comes what runs everywhere.
        rest = methods[chain.index(key) + 1 :] if key in chain else ["forward_native"]
        further[f"forward_{key}"] = first(rest, [set().union(*defined)]) or last
    return further


def _usable_methods(base: type, choice: KernelChoice) -> set[str]:
    kernels = _kernels(base, kernel_methods())
    return {each.method for each in kernels if not objection_to_kernel(each, choice.idle_oot)}


def method_of(raw: Any) -> Callable[..., Any]:
    """Return a definition as it stands in a class as a function that takes ``self``."""
    if not isinstance(raw, staticmethod):
        method: Callable[..., Any] = raw
        return method
    function = raw.__func__
    return functools.wraps(function)(lambda self, *args, **kwargs: function(*args, **kwargs))
