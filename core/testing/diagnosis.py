"""Diagnosis of loaded plugins: checks of hooks, classes, functions and kernels."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from opgraft.base.text import described
from opgraft.binding.functional import FUNCTIONALS, Functional
from opgraft.binding.idle_plugins import IdlePlugin, idle_plugins
from opgraft.binding.kernels import Kernel, KernelChoice, declared_kernels
from opgraft.binding.marks import CheckRaised, SwitchRaised
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.binding.provenance import exits_as_errors, own_words
from opgraft.binding.specialisation import Binding, bind, unfinished
from opgraft.config import NATIVE_CHOICE, OpgraftConfig, set_config
from opgraft.errors import (
    ConfigError,
    ConflictError,
    ConstructionError,
    OpgraftError,
    PluginError,
    close_matches,
)
from opgraft.ops.spec import Arguments, OpSpec, tensors
from opgraft.platform import DISPATCH_KEYS, effective_chain
from opgraft.plugins import hookspecs
from opgraft.plugins.changes import Change
from opgraft.plugins.device_types import why_unusable
from opgraft.plugins.discovery import PLUGIN_GROUP, discover
from opgraft.plugins.guarding import Guard
from opgraft.plugins.selection import selected_platform
from opgraft.registry.choice import ReplacementChoice
from opgraft.registry.decision import Provider
from opgraft.registry.declarations import Replacement, unapplied_at
from opgraft.registry.finding import Finding
from opgraft.registry.op_classes import definer, location_of, own_classes
from opgraft.registry.recorded_calls import is_constructed
from opgraft.registry.signatures import rejected_call
from opgraft.registry.state import PluginStatus, host_state
from opgraft.registry.watching import watching_code
from opgraft.testing import checks, inventory
from opgraft.testing.catalogue import SPECS
from opgraft.testing.kernel_checks import hidden_by
from opgraft.testing.layer_calls import call_of
from opgraft.testing.mentions import may_call, may_call_constructor, may_construct
from opgraft.testing.side_by_side import loses_gradients, other_tensors
from opgraft.testing.subjects import claimed_dtypes
from torch import Tensor, nn

_TABLE = "functional_"


def diagnose() -> list[Finding]:
    """Find everything wrong with loaded plugins. A check that crashes is a finding, not an end."""
    found: list[Finding] = []
    # One faulty plugin must not hide the faults of others.
    for check in DOCTOR_CHECKS:
        try:
            found += check()
        except KeyboardInterrupt:
            raise
        except PluginError as error:
            # The message names a method of the platform that several checks call.
            if str(error) not in [each.message for each in found]:
                found.append(Finding(str(error), None, error.location, exit_code=error.exit_code))
        except BaseException as error:
            # The checks call code of plugins.
            message = f"the check '{_words(check)}' ended with {described(error)}"
            found.append(Finding(message, exit_code=4))
    return list(dict.fromkeys(found))


def _words(check: Callable[[], object]) -> str:
    return str(check.__doc__).partition(".")[0].strip()


def forgotten_marks() -> Iterator[Finding]:
    """Find functions of plugins with the name of a hook, or nearly, and without the mark."""
    for offer in discover().of_group(PLUGIN_GROUP):
        record = host_state().plugins.get(offer.name)
        # Loading the offer of a failed plugin would fail again.
        if record is None or record.status is not PluginStatus.ACTIVATED:
            continue
        for name, function, hint in hookspecs.unmarked(offer.load()):
            message = f"plugin {offer.name}: {name} is never called: {hint}"
            yield Finding(message, offer.provider, location_of(function))


def unknown_device_type() -> Iterator[Finding]:
    """Find a device type of the platform without support in torch."""
    selection = selected_platform()
    platform = selection.platform
    error = why_unusable(platform.device_type)
    if error is not None:
        message = (
            f"platform {platform.name}: torch cannot use its device_type {platform.device_type!r}: "
            f"{_first_line(error)}. A new one is made known by "
            "torch.utils.rename_privateuse1_backend"
        )
        yield Finding(message, selection.provider, location_of(type(platform)))


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else described(error)


def failing_methods() -> Iterator[Finding]:
    """Find methods of the platform that raise, or return a useless value.

    The methods are called as during a run of a model, for every device.
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
    # A platform that failed to count may still have a device.
    for index in range(devices or 1):
        for method in (platform.capability, platform.memory, platform.synchronize):
            answer(method, index)
    answer(platform.manual_seed, 0)
    for error in found:
        yield Finding(str(error), selection.provider, error.location, exit_code=error.exit_code)
    # The probe has promised a device.
    if devices == 0:
        message = (
            f"platform {platform.name}: its probe says that it is available, "
            "and its device_count() returned 0"
        )
        location = location_of(type(platform).device_count)
        yield Finding(message, selection.provider, location)


def conflicts() -> Iterator[Finding]:
    """Find classes without a possible choice, each with the error of constructing the class."""
    for cls in _classes():
        try:
            _choose(cls)
        except OpgraftError as error:
            yield Finding(str(error), exit_code=error.exit_code, others=tuple(_providers_of(cls)))


def without_kernels() -> Iterator[Finding]:
    """Find plugins with several kernels, none of them for this machine.

    A plugin is one finding, as one cause is likely.
    """
    for idle in _idle_plugins().values():
        yield Finding(str(idle), idle.provider, idle.replacements[0].location)


def _idle_plugins() -> dict[str, IdlePlugin]:
    """Return the plugins without a kernel, by name.

    A plugin with one op is left out, as another check has a more exact finding.
    """
    return {idle.name: idle for idle in idle_plugins() if len(idle.replacements) > 1}


def never_used() -> Iterator[Finding]:
    """Find active replacements that are never constructed here, unless a setting says so."""
    wanted = host_state().settings().config.providers or {}
    idle = _idle_plugins()
    for replacement, choice in _chosen():
        if choice.winner is replacement or choice.op_name in wanted:
            continue
        # without_kernels() tells of an idle plugin.
        if replacement.plugin in idle and dict(choice.rows)[replacement]:
            continue
        rows = choice.decision.candidates
        row = next(row for row in rows if row.location == replacement.location)
        message = f"{row.name} at {row.location} ({row.provider}) is never used: {row.reason}"
        yield Finding(message, replacement.provider, replacement.location)


def never_fire() -> Iterator[Finding]:
    """Find kernels hidden by a ``forward``, and replacements without a kernel for this machine."""
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
    # A disabled op runs the native definition by request.
    if not choice.enabled or choice.winner in own:
        return
    missing = [f"{kernel}: {why}" for kernel, why in choice.missing if kernel in own]
    if missing:
        message = (
            f"{replacement.cls.__qualname__} has no kernel that can run here, so {choice.winner} "
            f"does: {'; '.join(missing)}"
        )
        yield Finding(message, replacement.provider, replacement.location)


def uncalled_kernels() -> Iterator[Finding]:
    """Find methods with the name of a kernel for an unknown dispatch key, if nothing calls them."""
    known = {f"forward_{key}" for key in DISPATCH_KEYS}
    for replacement in _settled():
        target = _target(replacement)
        own = [base for base in own_classes(replacement.cls) if base not in target.__mro__]
        # The most derived definition of a name counts.
        defined = {name: base for base in reversed(own) for name in vars(base)}
        for name, base in defined.items():
            if not name.startswith("forward_") or name in known or hasattr(target, name):
                continue
            # A plugin may have a dispatch of its own.
            if may_call(replacement.cls, name):
                continue
            key = name.removeprefix("forward_")
            message = (
                f"{base.__qualname__}.{name} is never called: {key!r} is no dispatch key. "
                "Call the method forward_oot"
            )
            yield Finding(message, replacement.provider, location_of(vars(base)[name]))


def unconstructed_targets() -> Iterator[Finding]:
    """Find replacements of a class that is never constructed, while derived classes are."""
    for replacement in _settled():
        target = _target(replacement)
        variants = [cls for cls in target.__subclasses__() if _is_variant(cls)]
        # A class of a plugin is in no record, and so are the classes derived from it.
        derived = [cls.__qualname__ for cls in variants if is_constructed(cls)]
        # A replacement may construct the target itself.
        if not derived or is_constructed(target) or may_construct(replacement.cls, target):
            continue
        message = (
            f"{replacement.cls.__qualname__} replaces {target.__qualname__}, "
            f"which no model constructs, so it never runs: replace {' or '.join(derived)}"
        )
        yield Finding(message, replacement.provider, replacement.location)


def _is_variant(cls: type) -> bool:
    return cls in host_state().registry.targets()


def broken_needs() -> Iterator[Finding]:
    """Find kernels with a check of their needs that raises."""
    chain = effective_chain(selected_platform().platform)
    for replacement in _settled():
        inherited = _target(replacement).__mro__
        for kernel in declared_kernels(replacement.cls, chain):
            reason = kernel.missing()
            if kernel.owner in inherited or not isinstance(reason, CheckRaised):
                continue
            message = f"{kernel} is never used: {reason}"
            yield Finding(message, replacement.provider, kernel.location)


def broken_switches() -> Iterator[Finding]:
    """Find classes that are disabled, as the method ``enabled`` raises."""
    for replacement, binding in _bound():
        because = binding.kernel.enabled_because
        if binding.replacement.winner is replacement and isinstance(because, SwitchRaised):
            message = f"{replacement.cls.__qualname__} is disabled: {because}"
            yield Finding(message, replacement.provider, replacement.location)


def unfinished_constructors() -> Iterator[Finding]:
    """Find constructors that do not call ``super().__init__()``."""
    for replacement in _settled():
        owner = definer(replacement.cls, "__init__", above=_target(replacement))
        if owner is None or not issubclass(owner, nn.Module) or may_call_constructor(owner):
            continue
        location = location_of(vars(owner)["__init__"])
        yield Finding(unfinished(owner), replacement.provider, location)


def unapplied_registrations() -> Iterator[Finding]:
    """Find calls of ``register_oot`` with a decorator for no class."""
    discovery = discover()
    reasons = [record.reason for record in host_state().plugins.values()]
    # A copy, as another thread may register a class meanwhile.
    for location, module in host_state().registry.unapplied.copy().items():
        # A plugin that registers nothing else has failed for this reason.
        if any(unapplied_at(location) in reason for reason in reasons):
            continue
        yield Finding(unapplied_at(location), discovery.provider_of(module), location)


def wrong_functions() -> Iterator[Finding]:
    """Find functions of kernels for an unknown form, or with a narrower signature than the form."""
    for replacement in _settled():
        target = _target(replacement)
        for base in own_classes(replacement.cls):
            if base in target.__mro__:
                break
            for message in _wrong_in_class(target, base):
                told = f"{base.__qualname__}.{message}"
                yield Finding(told, replacement.provider, location_of(base))


def _wrong_in_class(target: type, base: type) -> Iterator[str]:
    for attribute, functions in vars(base).items():
        if attribute.startswith(_TABLE):
            # Some functions are imported on first use. needs() tells of a failing import.
            with suppress(ImportError):
                yield from _wrong_in_table(target, attribute, functions)


def _wrong_in_table(target: type, attribute: str, functions: Any) -> Iterator[str]:
    keys = [f"{_TABLE}{key}" for key in DISPATCH_KEYS]
    if attribute not in keys:
        yield f"{attribute} belongs to no dispatch key: {close_matches(attribute, keys)}"
        return
    forms = {form.name: form for form in inventory.functionals_of(target)}
    for name in functions:
        if name not in forms:
            matches = close_matches(name, forms)
            yield f"{attribute} names {name!r}, which is no functional form of the op: {matches}"
            continue
        expected = inspect.signature(forms[name].native)
        problem = rejected_call(expected, inspect.signature(functions[name]))
        if problem:
            yield f"{attribute}[{name!r}] is narrower than the functional form: {problem}"


def wrong_fakes() -> Iterator[Finding]:
    """Find forms with a fake rule that has a narrower signature than the form."""
    for form in FUNCTIONALS.values():
        problem = rejected_call(inspect.signature(form.native), inspect.signature(form.fake))
        if problem:
            message = (
                f"the fake rule of the form {form.name} is narrower than its native definition: "
                f"{problem}"
            )
            provider = discover().provider_of(form.__module__)
            yield Finding(message, provider, location_of(form.fake))


def wrong_results() -> Iterator[Finding]:
    """Find kernels of plugins that raise on small inputs, or return tensors of another form.

    Number, shape, dtype, device and layout of the results are compared with those of the native
    definition. ``plugins check`` compares the numbers, too. A kernel that changes the process for
    others, such as the default dtype or a function of torch, is a finding as well.
    """
    guard = Guard()
    for replacement, kernel, spec in _kernels_with_spec():
        changes = list[str]()
        with guard.watching("when it was called", _no_change_stays, _list_in(changes)):
            faults = _faults(replacement, kernel, _wrong_results(spec, kernel))
        for change in changes:
            yield Finding(f"{kernel} {change}", replacement.provider, kernel.location)
        further = f". 'opgraft plugins check {replacement.plugin}' compares all its results"
        for fault in faults:
            message = f"{kernel} {fault}{further if replacement.plugin else ''}"
            yield Finding(message, replacement.provider, kernel.location)


def changes_by_layers() -> Iterator[Finding]:
    """Find changes of the process by a call of a plugin's layer without a functional form.

    An exception is no finding: the layer may need an input of another size.
    """
    guard = Guard()
    for replacement, binding, call in _called_layers(torch.float32):
        provider = replacement.provider
        name = binding.kernel_name
        location = binding.kernel.winner.location
        changes = list[str]()
        with (
            guard.watching("when it was called", _no_change_stays, _list_in(changes)),
            watching_code(f"{name} of {provider}", provider),
            torch.random.fork_rng([]),
            torch.no_grad(),
        ):
            if _seeds(call):
                changes.append(_SEEDS)
        for change in changes:
            yield Finding(f"{name} {change}", provider, location)


def wrong_results_of_layers() -> Iterator[Finding]:
    """Find layers of plugins without a functional form that return tensors of another form.

    Number, shape, dtype, device and layout are compared with those of the replaced class. An
    exception is no finding, as in ``changes_by_layers``.
    """
    # Models are served in these, and a layer may compute in float32 only.
    for dtype in (torch.float32, torch.bfloat16):
        for replacement, binding, call in _called_layers(dtype):
            name = binding.kernel_name
            inputs = (
                f"for {str(dtype).removeprefix('torch.')} inputs of {_target(replacement).__name__}"
            )
            for fault in _faults_of_layer(replacement, binding, call):
                message = f"{name} {fault} {inputs}"
                yield Finding(message, replacement.provider, binding.kernel.winner.location)


def _faults_of_layer(
    replacement: Replacement, binding: Binding, call: Callable[[], object]
) -> list[str]:
    native = OpgraftConfig(providers={str(binding.replacement.op_name): NATIVE_CHOICE})
    provider = replacement.provider
    with (
        watching_code(f"{binding.kernel_name} of {provider}", provider),
        torch.random.fork_rng([]),
        torch.no_grad(),
    ):
        try:
            with exits_as_errors():
                found = tensors(call())
            # Weights are filled with one number, so that a second layer has the same.
            with set_config(native):
                expected = tensors(call())
        except Exception:  # of the layer, or of an input that the layer does not take
            return []
    return list(other_tensors(found, expected))


def _called_layers(
    dtype: torch.dtype,
) -> Iterator[tuple[Replacement, Binding, Callable[[], object]]]:
    """Yield the layers of plugins without a functional form, each with a call in a dtype."""
    platform = selected_platform().platform
    device = platform.device_type
    if why_unusable(device) is not None or dtype not in claimed_dtypes(platform):
        return
    for replacement, binding in _bound():
        call = call_of(_target(replacement), device, dtype)
        if binding.replacement.winner is replacement and call is not None:
            yield replacement, binding, call


_SEEDS = (
    "sets the state of torch's random numbers, so that all models of the process draw the same "
    "ones again: draw from a torch.Generator of its own"
)


def _seeds(call: Callable[[], object]) -> bool:
    """Return True if the random state after a call does not depend on the state before."""
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        try:
            with exits_as_errors():
                call()
        except Exception:  # the kernel's own
            return False
        states.append(torch.get_rng_state())
    return torch.equal(*states)


def _no_change_stays(change: Change) -> bool:
    """Return False: no kernel has to change the process for others."""
    return False


def _list_in(changes: list[str]) -> Callable[[Sequence[Change], Sequence[str]], None]:
    """Return a function that receives the changes by a step, and adds their words to the list."""

    def report(kept: Sequence[Change], told: Sequence[str]) -> None:
        changes.extend(told)

    return report


def _faults(replacement: Replacement, kernel: Kernel, found: Iterator[str]) -> list[str]:
    """List the faults of a kernel, each once; the parent process learns that the kernel runs."""
    with watching_code(f"{kernel} of {replacement.provider}", replacement.provider):
        return list(dict.fromkeys(found))


def _wrong_results(spec: OpSpec, kernel: Kernel) -> Iterator[str]:
    """Yield the faults in the results of a kernel in each dtype, as a module and as a function."""
    claimed = claimed_dtypes(selected_platform().platform)
    made_contiguous = kernel.functional(spec.functional.name) is not None
    # Modules draw their weights, and some forms draw results. Neither is a change by the kernel.
    with torch.random.fork_rng([]):
        yield from _wrong_in_dtypes(spec, kernel, claimed, made_contiguous)
        if any(_seeds_at(spec, call) for call in _calls(spec, kernel)):
            yield _SEEDS


def _seeds_at(spec: OpSpec, call: checks.Implementation) -> bool:
    """Return True if a call on small inputs sets torch's random numbers."""
    arguments = _small(spec, spec.dtypes[0])
    with torch.no_grad():
        return _seeds(lambda: checks.results_of(spec, call, arguments))


def _wrong_in_dtypes(
    spec: OpSpec, kernel: Kernel, claimed: Collection[torch.dtype], made_contiguous: bool
) -> Iterator[str]:
    for dtype in spec.dtypes:
        # float64 is for proofs; models rarely use float64.
        if dtype not in claimed or dtype == torch.float64:
            continue
        inputs = f"for {str(dtype).removeprefix('torch.')} inputs of {spec.functional.name}"
        for call in _calls(spec, kernel):
            arguments = _small(spec, dtype)
            before = _bytes_of_arguments(arguments)
            with torch.no_grad():
                expected = checks.results_of(spec, spec.functional.native, arguments)
                try:
                    with exits_as_errors():
                        found = checks.results_of(spec, call, arguments)
                except ConstructionError:  # unfinished_constructors() tells of the class
                    continue
                except Exception as error:  # the kernel's own
                    yield f"raised {own_words(error)} {inputs}"
                    continue
            for name in _written(before, arguments):
                yield f"writes into its argument {name!r}, which the op leaves alone, {inputs}"
            for fault in other_tensors(found, expected, made_contiguous=made_contiguous):
                yield f"{fault} {inputs}"


def _bytes_of_arguments(arguments: Arguments) -> dict[str, list[Tensor]]:
    """Copy the bytes of the tensors of each argument."""
    given = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor | list | tuple):
            given[name] = [_bytes_of(each).clone() for each in tensors(value)]
    return given


def _written(before: Mapping[str, list[Tensor]], arguments: Arguments) -> Iterator[str]:
    """Yield the arguments that a call has written into. Declared ones were copies in the call."""
    for name, copies in before.items():
        now = [_bytes_of(each) for each in tensors(arguments[name])]
        if not all(map(torch.equal, copies, now)):
            yield name


def _bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of a tensor, since NaN equals nothing and some dtypes have no comparison."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def _small(spec: OpSpec, dtype: torch.dtype) -> Arguments:
    """Draw small arguments of a form in its first variant."""
    return checks.small_arguments(spec, next(iter(spec.variants)), dtype)


def lost_gradients() -> Iterator[Finding]:
    """Find kernels of plugins that lose gradients, or fail, on small inputs that require one.

    A kernel with the mark ``inference_only`` gives way to the native definition there.
    """
    for replacement, kernel, spec in _kernels_with_spec():
        if kernel.inference_only or spec.functional.mutates or not spec.differentiable:
            continue
        for reason in _faults(replacement, kernel, _lost(spec, kernel)):
            yield Finding(f"{kernel} {reason}", replacement.provider, kernel.location)


def _kernels_with_spec() -> Iterator[tuple[Replacement, Kernel, OpSpec]]:
    """Yield the kernels of plugins that run here, each with the spec of a form.

    If torch knows no device for the inputs, there are none.
    """
    device = selected_platform().platform.device_type
    if why_unusable(device) is not None:
        return
    for replacement, binding in _bound():
        kernel = binding.kernel.winner
        target = _target(replacement)
        if binding.replacement.winner is not replacement or kernel.owner in target.__mro__:
            continue
        for form in inventory.functionals_of(target):
            spec = SPECS.get(form.name)
            if spec and _serves(form, replacement):
                yield replacement, kernel, dataclasses.replace(spec, device=device)


def _serves(form: Functional[..., Any], replacement: Replacement) -> bool:
    return host_state().registry.find_target(form.op) is replacement.target


def _lost(spec: OpSpec, kernel: Kernel) -> Iterator[str]:
    """Yield the faults in the gradients of a kernel, as a module and as a function."""
    for call in _calls(spec, kernel):
        arguments = checks.with_gradients(_small(spec, torch.float32))
        with torch.enable_grad():
            expected = tensors(spec.functional.native(**arguments))
            try:
                with exits_as_errors():
                    found = tensors(call(**arguments))
            except Exception as error:  # the kernel's own
                # wrong_results() tells of a kernel that raises in any case.
                if not _raises(call, arguments):
                    yield (
                        f"raised {own_words(error)} for float32 inputs of {spec.functional.name} "
                        "that require a gradient"
                    )
                continue
        if loses_gradients(found, expected):
            yield (
                "loses gradients: its results require none where the inputs do. "
                "Mark it with @opgraft.inference_only"
            )


def _calls(spec: OpSpec, kernel: Kernel) -> list[checks.Implementation]:
    """List the implementations of a form by a kernel: the module, and the kernel's own function."""
    found: list[checks.Implementation] = []
    if spec.module and not spec.functional.mutates:
        found.append(checks.by_module(spec))
    function = kernel.functional(spec.functional.name)
    if function:
        found.append(function)
    return found


def _raises(call: checks.Implementation, arguments: Arguments) -> bool:
    """Return True if a call raises even without gradients."""
    try:
        with torch.no_grad(), exits_as_errors():
            call(**arguments)
    except Exception:  # the kernel's own
        return True
    return False


def _classes() -> list[type]:
    """List every class that may be constructed here: registered, replaced or a variant."""
    targets = [replacement.target for replacement in _settled() if replacement.target]
    return list(dict.fromkeys([*host_state().registry.targets(), *targets]))


def _settled() -> list[Replacement]:
    """Return the active replacements with a known target."""
    return [replacement for replacement in host_state().active if replacement.target is not None]


def _chosen() -> Iterator[tuple[Replacement, ReplacementChoice]]:
    """Yield the active replacements with the choice for the target; not those with a conflict."""
    for replacement in _settled():
        with suppress(ConflictError, ConfigError):
            choice = _choose(_target(replacement))
            yield replacement, choice


def _bound() -> Iterator[tuple[Replacement, Binding]]:
    """Yield active replacements of ops with the binding of the target; not those in conflict."""
    for replacement, choice in _chosen():
        if not issubclass(choice.target, PluggableClass):
            yield replacement, bind(choice.target)


def _choose(cls: type) -> ReplacementChoice:
    """Choose the class as constructing does, which calls conditions and checks of plugins."""
    providers = _providers_of(cls)
    names = " and ".join(map(str, providers)) or "opgraft"
    # With several providers none is to blame alone.
    only = providers[0] if len(providers) == 1 else None
    with watching_code(f"a check of {names} for {cls.__qualname__}", only):
        return inventory.choice_here(cls)


def _providers_of(cls: type) -> list[Provider]:
    """List the providers of active replacements of a class."""
    own = [each.provider for each in host_state().active if each.target is cls]
    return list(dict.fromkeys(own))


def _target(replacement: Replacement) -> Any:
    return replacement.target


DOCTOR_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
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
    unfinished_constructors,
    unapplied_registrations,
    wrong_functions,
    wrong_fakes,
    wrong_results,
    changes_by_layers,
    wrong_results_of_layers,
    lost_gradients,
)
"""The checks, each a generator of findings."""
