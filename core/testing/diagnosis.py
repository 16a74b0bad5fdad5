"""Diagnosis of the plugins that were loaded: checks of their hooks, classes, functions and kernels."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from opgraft.base.text import described
from opgraft.binding.functional import FUNCTIONALS, Functional
from opgraft.binding.idle_plugins import IdlePlugin, idle_plugins
from opgraft.binding.kernels import Kernel, KernelChoice, declared_kernels
from opgraft.binding.marks import CHECK_RAISED, SWITCH_RAISED
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.binding.provenance import exits_as_errors
from opgraft.binding.specialisation import Binding, bind
from opgraft.errors import ConfigError, ConflictError, OpgraftError, PluginError, close_matches
from opgraft.ops.spec import Arguments, OpSpec, tensors
from opgraft.platform import DISPATCH_KEYS, effective_chain
from opgraft.plugins import hookspecs
from opgraft.plugins.device_types import why_unusable
from opgraft.plugins.discovery import PLUGIN_GROUP, discover
from opgraft.plugins.selection import selected_platform
from opgraft.registry.choice import ReplacementChoice
from opgraft.registry.declarations import Replacement
from opgraft.registry.finding import Finding
from opgraft.registry.op_classes import location_of, own_classes
from opgraft.registry.recorded_calls import is_constructed
from opgraft.registry.signatures import rejected_call
from opgraft.registry.state import PluginStatus, host_state
from opgraft.registry.watching import watched
from opgraft.testing import checks, inventory
from opgraft.testing.catalogue import SPECS
from opgraft.testing.kernel_checks import hidden_by
from opgraft.testing.mentions import may_call, may_construct
from opgraft.testing.subjects import claimed_dtypes
from torch import Tensor

_TABLE = "functional_"


def diagnose() -> list[Finding]:
    """Find everything that is wrong with what is loaded. A check that crashes is a finding, not an end."""
    found: list[Finding] = []
    for check in CHECKS:
        try:
            found += check()
        except KeyboardInterrupt:
            raise
        except PluginError as error:  # such as that of a method of the platform, which names it
            if str(error) not in [each.message for each in found]:
                found.append(Finding(str(error), None, error.location, exit_code=error.exit_code))
        except BaseException as error:  # code of plugins, which these checks call
            found.append(
                Finding(f"the check '{_words(check)}' ended with {described(error)}", exit_code=4)
            )
    return list(dict.fromkeys(found))


def _words(check: Callable[[], object]) -> str:
    return str(check.__doc__).partition(".")[0].strip()


def forgotten_marks() -> Iterator[Finding]:
    """Find functions of plugins that are named as a hook, or nearly, and are not marked as one."""
    for offer in discover().of_group(PLUGIN_GROUP):
        record = host_state().plugins.get(offer.name)
        if record is None or record.status is not PluginStatus.ACTIVATED:
            continue
        for name, function, hint in hookspecs.unmarked(offer.load()):
            message = f"plugin {offer.name}: {name} is never called: {hint}"
            yield Finding(message, offer.provider, location_of(function))


def unknown_device_type() -> Iterator[Finding]:
    """Find that the platform of this process names a device type that torch cannot use."""
    selection = selected_platform()
    platform = selection.platform
    error = why_unusable(platform.device_type)
    if error is not None:
        message = (
            f"platform {platform.name}: torch cannot use its device_type {platform.device_type!r}: "
            f"{_first_line(error)}. A new one is made known by torch.utils.rename_privateuse1_backend"
        )
        yield Finding(message, selection.provider, location_of(type(platform)))


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else described(error)


def failing_methods() -> Iterator[Finding]:
    """Find methods of the platform that raise, or return what opgraft cannot use.

    Each is called as opgraft calls it while a model runs, for every device.
    """
    selection = selected_platform()
    platform = selection.platform
    if why_unusable(platform.device_type) is not None:
        return
    found: list[PluginError] = []

    def answer(method: Callable[..., Any], *args: int) -> Any:
        try:
            return method(*args)
        except PluginError as error:
            found.append(error)
            return None

    devices = answer(platform.device_count)
    for index in range(devices or 1):
        for method in (platform.capability, platform.memory, platform.synchronize):
            answer(method, index)
    answer(platform.manual_seed, 0)
    for error in found:
        yield Finding(str(error), selection.provider, error.location, exit_code=error.exit_code)
    if devices == 0:
        message = f"platform {platform.name}: its probe says that it is available, and its device_count() returned 0"
        location = location_of(type(platform).device_count)
        yield Finding(message, selection.provider, location)


def conflicts() -> Iterator[Finding]:
    """Find classes for which no choice can be made here, each with the error that constructing them would raise."""
    for cls in _classes():
        try:
            _choose(cls)
        except OpgraftError as error:
            rivals = tuple(
                dict.fromkeys(r.provider for r in host_state().active if r.target is cls)
            )
            yield Finding(str(error), exit_code=error.exit_code, others=rivals)


def without_kernels() -> Iterator[Finding]:
    """Find plugins with several kernels, none of which can run here: one finding, as one cause is likely."""
    for idle in _idle_plugins().values():
        yield Finding(str(idle), idle.provider, idle.replacements[0].location)


def _idle_plugins() -> dict[str, IdlePlugin]:
    """Return the plugins without a kernel, by name. A plugin with one op has a more exact finding of its own."""
    return {idle.name: idle for idle in idle_plugins() if len(idle.replacements) > 1}


def never_used() -> Iterator[Finding]:
    """Find active replacements that constructing their target does not yield here, unless a setting says so."""
    wanted = host_state().settings().config.providers or {}
    idle = _idle_plugins()
    for replacement, choice in _chosen():
        if replacement.plugin in idle and dict(choice.rows)[replacement]:
            continue  # without_kernels() tells
        if choice.winner is not replacement and choice.op_name not in wanted:
            row = next(c for c in choice.decision.candidates if c.location == replacement.location)
            message = f"{row.name} at {row.location} ({row.provider}) is never used: {row.reason}"
            yield Finding(message, replacement.provider, replacement.location)


def never_fire() -> Iterator[Finding]:
    """Find kernels that a ``forward`` hides, and replacements that are constructed here and have none that can run."""
    idle = _idle_plugins()
    for replacement, binding in _bound():
        target = _target(replacement)
        declared = declared_kernels(replacement.cls, DISPATCH_KEYS)
        own = [kernel for kernel in declared if kernel.owner not in target.__mro__]
        yield from _hidden(replacement, own)
        if replacement.plugin not in idle and binding.replacement.winner is replacement:
            yield from _lacking(replacement, binding.kernel, own)


def _hidden(replacement: Replacement, own: list[Kernel]) -> Iterator[Finding]:
    for kernel in own:
        hiding = hidden_by(kernel, own)
        if hiding:
            message = f"{kernel} can never run: {hiding} of that op hides it"
            yield Finding(message, replacement.provider, kernel.location)


def _lacking(
    replacement: Replacement, choice: KernelChoice, own: list[Kernel]
) -> Iterator[Finding]:
    if not choice.enabled or choice.winner in own:
        return
    lacking = "; ".join(f"{kernel}: {why}" for kernel, why in choice.missing if kernel in own)
    if lacking:
        message = (
            f"{replacement.cls.__qualname__} has no kernel that can run here, so {choice.winner} "
            f"does: {lacking}"
        )
        yield Finding(message, replacement.provider, replacement.location)


def uncalled_kernels() -> Iterator[Finding]:
    """Find methods that are named like a kernel for a key that is no dispatch key, and that nothing calls."""
    known = {f"forward_{key}" for key in DISPATCH_KEYS}
    for replacement in _settled():
        target = _target(replacement)
        own = [base for base in own_classes(replacement.cls) if base not in target.__mro__]
        # The most derived definition of a name counts.
        defined = {name: base for base in reversed(own) for name in vars(base)}
        for name, base in defined.items():
            if not name.startswith("forward_") or name in known or hasattr(target, name):
                continue
            if may_call(replacement.cls, name):
                continue
            key = name.removeprefix("forward_")
            message = (
                f"{base.__qualname__}.{name} is never called: {key!r} is no dispatch key. "
                "Call the method forward_oot"
            )
            yield Finding(message, replacement.provider, location_of(vars(base)[name]))


def unconstructed_targets() -> Iterator[Finding]:
    """Find replacements of a class that no model constructs, only classes derived from the class."""
    for replacement in _settled():
        target = _target(replacement)
        variants = [cls for cls in target.__subclasses__() if _is_variant(cls)]
        # A class of a plugin is in no record, and so are the classes derived from it.
        derived = [cls.__qualname__ for cls in variants if is_constructed(cls)]
        if not derived or is_constructed(target) or may_construct(replacement.cls, target):
            continue
        message = (
            f"{replacement.cls.__qualname__} replaces {target.__qualname__}, which no model constructs, "
            f"so it never runs: replace {' or '.join(derived)}"
        )
        yield Finding(message, replacement.provider, replacement.location)


def _is_variant(cls: type) -> bool:
    return cls in host_state().registry.targets()


def broken_needs() -> Iterator[Finding]:
    """Find kernels whose check of what they need raises."""
    chain = effective_chain(selected_platform().platform)
    for replacement in _settled():
        for kernel in declared_kernels(replacement.cls, chain):
            reason = kernel.missing() or ""
            if kernel.owner not in _target(replacement).__mro__ and reason.startswith(CHECK_RAISED):
                yield Finding(
                    f"{kernel} is never used: {reason}", replacement.provider, kernel.location
                )


def broken_switches() -> Iterator[Finding]:
    """Find classes that are disabled, as their method which decides about that raises."""
    for replacement, binding in _bound():
        kernel = binding.kernel
        if binding.replacement.winner is replacement and kernel.enabled_because.startswith(
            SWITCH_RAISED
        ):
            message = f"{replacement.cls.__qualname__} is disabled: {kernel.enabled_because}"
            yield Finding(message, replacement.provider, replacement.location)


def wrong_functions() -> Iterator[Finding]:
    """Find functions of kernels under a name that no form of the op has, or that do not take what the form takes."""
    for replacement in _settled():
        target = _target(replacement)
        for base in own_classes(replacement.cls):
            if base in target.__mro__:
                break
            for attribute, functions in vars(base).items():
                if not attribute.startswith(_TABLE):
                    continue
                with suppress(
                    ImportError
                ):  # of functions that are imported when they are needed: needs() tells
                    for message in _wrong_in_table(target, attribute, functions):
                        yield Finding(
                            f"{base.__qualname__}.{message}",
                            replacement.provider,
                            location_of(base),
                        )


def _wrong_in_table(target: type, attribute: str, functions: Any) -> Iterator[str]:
    keys = [f"{_TABLE}{key}" for key in DISPATCH_KEYS]
    if attribute not in keys:
        yield f"{attribute} belongs to no dispatch key: {close_matches(attribute, keys)}"
    if not isinstance(functions, Mapping):
        yield f"{attribute} is a {type(functions).__name__}, expected a mapping of functional form to function"
        return
    forms = {form.name: form for form in inventory.functionals_of(target)}
    for name in functions:
        if name not in forms:
            yield f"{attribute} names {name!r}, which is no functional form of the op: {close_matches(name, forms)}"
        elif problem := rejected_call(
            inspect.signature(forms[name].native), inspect.signature(functions[name])
        ):
            yield f"{attribute}[{name!r}] is narrower than the functional form: {problem}"


def wrong_fakes() -> Iterator[Finding]:
    """Find forms whose fake rule does not take what the form takes."""
    for form in FUNCTIONALS.values():
        problem = rejected_call(inspect.signature(form.native), inspect.signature(form.fake))
        if problem:
            message = f"the fake rule of the form {form.name} is narrower than its native definition: {problem}"
            yield Finding(message, discover().provider_of(form.__module__), location_of(form.fake))


def wrong_results() -> Iterator[Finding]:
    """Find kernels of plugins that raise on small inputs, or return other tensors than the native definition.

    Number, shape, dtype, device and layout of the results are compared. ``plugins check`` compares their numbers, too.
    """
    for replacement, kernel, spec in _called():
        with watched(f"{kernel} of {replacement.provider}", replacement.provider):
            faults = list(dict.fromkeys(_wrong_results(spec, kernel)))
        further = f"'opgraft plugins check {replacement.plugin}' compares all its results"
        for fault in faults:
            message = f"{kernel} {fault}" + (f". {further}" if replacement.plugin else "")
            yield Finding(message, replacement.provider, kernel.location)


def _wrong_results(spec: OpSpec, kernel: Kernel) -> Iterator[str]:
    """Yield what is wrong with the results of a kernel in each dtype, as a module and as a function."""
    variant, lead, size = next(iter(spec.variants)), spec.leads[1], max(spec.sizes[:2])
    claimed = claimed_dtypes(selected_platform().platform)
    for dtype in (dtype for dtype in spec.dtypes if dtype in claimed and dtype != torch.float64):
        inputs = f"for {_short(dtype)} inputs of {spec.functional.name}"
        for call in _calls(spec, kernel):
            arguments = spec.arguments(variant, dtype, lead, size)
            with torch.no_grad():
                expected = checks.results_of(spec, spec.functional.native, arguments)
                try:
                    with exits_as_errors():
                        found = checks.results_of(spec, call, arguments)
                except Exception as error:  # the kernel's own
                    yield f"raised {_own_words(error)} {inputs}"
                    continue
            made_contiguous = kernel.functional(spec.functional.name) is not None
            for fault in _other_tensors(found, expected, made_contiguous):
                yield f"{fault} {inputs}"


def _own_words(error: Exception) -> str:
    """Describe what a kernel raised; of an exit that became an error, the exit."""
    cause = error.__cause__
    own = isinstance(error, PluginError) and isinstance(cause, SystemExit | KeyboardInterrupt)
    return described(cause if own and cause is not None else error)


def _other_tensors(
    found: Sequence[Tensor], expected: Sequence[Tensor], made_contiguous: bool
) -> Iterator[str]:
    """Say in which ways tensors are others than those that are expected, whatever numbers they hold.

    Args:
        found: the results of a kernel.
        expected: those of the native definition.
        made_contiguous: compiled code copies the results, whose rows may so lie in any order.
    """
    if len(found) != len(expected):
        yield f"returns {len(found)} tensors, expected {len(expected)},"
        return
    for ours, theirs in zip(found, expected, strict=True):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            yield f"returns {_form(ours)}, expected {_form(theirs)},"
        elif ours.device != theirs.device:
            yield f"returns a tensor on {ours.device}, expected {theirs.device},"
        elif made_contiguous and ours.stride()[-1:] == (1,):
            continue
        elif theirs.is_contiguous() and not ours.is_contiguous():
            strides = f"strides {list(ours.stride())}, expected {list(theirs.stride())},"
            yield f"returns a tensor that is not contiguous, with {strides}"


def _form(x: Tensor) -> str:
    return f"{_short(x.dtype)} {list(x.shape)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def lost_gradients() -> Iterator[Finding]:
    """Find kernels of plugins that lose gradients, or fail, on small inputs that require one.

    Kernels that are marked ``inference_only`` give way to the native definition there.
    """
    for replacement, kernel, spec in _called():
        if kernel.inference_only or spec.functional.mutates or not spec.differentiable:
            continue
        with watched(f"{kernel} of {replacement.provider}", replacement.provider):
            reasons = list(dict.fromkeys(_lost(spec, kernel)))
        for reason in reasons:
            yield Finding(f"{kernel} {reason}", replacement.provider, kernel.location)


def _called() -> Iterator[tuple[Replacement, Kernel, OpSpec]]:
    """Yield the kernels of plugins that run here, each with the proof of a form that it serves.

    There are none where torch knows no device for the inputs.
    """
    device = selected_platform().platform.device_type
    if why_unusable(device) is not None:
        return
    for replacement, binding in _bound():
        kernel = binding.kernel.winner
        inherited = kernel.owner in _target(replacement).__mro__
        if binding.replacement.winner is not replacement or inherited:
            continue
        for form in inventory.functionals_of(_target(replacement)):
            spec = SPECS.get(form.name)
            if spec and _serves(form, replacement):
                yield replacement, kernel, dataclasses.replace(spec, device=device)


def _serves(form: Functional[..., Any], replacement: Replacement) -> bool:
    return host_state().registry.find_target(form.op) is replacement.target


def _lost(spec: OpSpec, kernel: Kernel) -> Iterator[str]:
    """Yield what is wrong with the gradients of a kernel, as a module and as a function."""
    variant, lead, size = next(iter(spec.variants)), spec.leads[1], max(spec.sizes[:2])
    for call in _calls(spec, kernel):
        arguments = checks.with_gradients(spec.arguments(variant, torch.float32, lead, size))
        with torch.enable_grad():
            expected = tensors(spec.functional.native(**arguments))
            try:
                with exits_as_errors():
                    got = tensors(call(**arguments))
            except Exception as error:  # the kernel's own
                if not _raises(call, arguments):  # otherwise another check tells
                    yield (
                        f"raised {_own_words(error)} for float32 inputs of {spec.functional.name} "
                        "that require a gradient"
                    )
                continue
        if any(
            theirs.requires_grad and not ours.requires_grad
            for ours, theirs in zip(got, expected, strict=False)
        ):
            yield "loses gradients: its results require none where the inputs do. Mark it with @opgraft.inference_only"


def _calls(spec: OpSpec, kernel: Kernel) -> list[checks.Implementation]:
    """List what computes a form by a kernel: the module where one stands for it, and the kernel's own function."""
    function = kernel.functional(spec.functional.name)
    modules = [checks.by_module(spec)] if spec.module and not spec.functional.mutates else []
    return [*modules, *([function] if function else [])]


def _raises(call: checks.Implementation, arguments: Arguments) -> bool:
    """Tell whether a call raises where no gradient is required, too."""
    with torch.no_grad():
        try:
            with exits_as_errors():
                call(**arguments)
        except Exception:  # the kernel's own
            return True
    return False


def _classes() -> list[type]:
    """List every class that may be constructed here, registered, replaced or a variant."""
    targets = [r.target for r in host_state().active if r.target is not None]
    return list(dict.fromkeys([*host_state().registry.targets(), *targets]))


def _settled() -> list[Replacement]:
    """Return the active replacements whose target is known."""
    return [replacement for replacement in host_state().active if replacement.target is not None]


def _chosen() -> Iterator[tuple[Replacement, ReplacementChoice]]:
    """Yield the active replacements with what is constructed for their target; not those with a conflict."""
    for replacement in _settled():
        try:
            yield replacement, _choose(_target(replacement))
        except (ConflictError, ConfigError):
            continue


def _bound() -> Iterator[tuple[Replacement, Binding]]:
    """Yield the active replacements of ops with what constructing their target binds; not those with a conflict."""
    for replacement, choice in _chosen():
        if not issubclass(choice.target, PluggableClass):
            yield replacement, bind(choice.target)


def _choose(cls: type) -> ReplacementChoice:
    """Choose the class as constructing it does, which asks the conditions and checks of those who replace it."""
    providers = list(dict.fromkeys(r.provider for r in host_state().active if r.target is cls))
    names = " and ".join(map(str, providers)) or "opgraft"
    with watched(
        f"a check of {names} for {cls.__qualname__}", providers[0] if len(providers) == 1 else None
    ):
        return inventory.choice_here(cls)


def _target(replacement: Replacement) -> Any:
    return replacement.target


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    forgotten_marks,
    unknown_device_type,
    failing_methods,
    conflicts,
    without_kernels,
    never_used,
    never_fire,
    uncalled_kernels,
    unconstructed_targets,
    broken_needs,
    broken_switches,
    wrong_functions,
    wrong_fakes,
    wrong_results,
    lost_gradients,
)
"""Each yields what it finds."""
