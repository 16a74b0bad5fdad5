"""The work of ``opgraft ops explain``, in a module that imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opgraft.binding.names import op_name_of
from opgraft.cli.output import print_json, print_wrapped
from opgraft.errors import InputError, near_matches
from opgraft.ops import CustomOp
from opgraft.plugins.host import load_plugins
from opgraft.registry.decision import Decision
from opgraft.registry.declarations import Replacement
from opgraft.registry.state import PluginStatus, host_state
from opgraft.testing import inventory
from opgraft.testing.inventory import FormHere, KernelHere

_ALL_NAMES = "'opgraft ops list' shows the names of all."


def print_explanation(name: str, *, as_json: bool) -> None:
    """Print the explanation of an op.

    Args:
        name: of the op, a class, a replacement, a kernel or a functional form.
        as_json: print JSON.

    Raises:
        InputError: nothing has this name.
    """
    load_plugins()
    target = inventory.find_op(name)
    if target is None:
        raise InputError(_unknown(name))
    is_op = target in CustomOp.op_registry.values()
    variants = inventory.variants_of(target) if is_op else []
    found = _OpExplanation(
        target,
        decision=inventory.decision_here(target),
        variants={cls.__qualname__: inventory.kernel_here(cls) for cls in variants},
        forms=inventory.forms_here(target),
        inactive=_inactive(target),
        packages=inventory.missing_packages(target),
    )
    if as_json:
        print_json("opgraft.ops.explain/2", found.to_dict())
    else:
        found.print()


@dataclass(frozen=True)
class _OpExplanation:
    """Everything that the command tells about an op.

    Attributes:
        target: class of the op.
        decision: for a kernel.
        variants: kernels of derived classes, by name.
        forms: functional forms.
        inactive: declared replacements of plugins that are not active.
        packages: packages with kernels for this op that are not installed.
    """

    target: type
    decision: Decision
    variants: Mapping[str, KernelHere]
    forms: Sequence[FormHere]
    inactive: Sequence[Replacement]
    packages: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        variants = [{"target": name, **row.to_dict()} for name, row in self.variants.items()]
        return {
            "op": op_name_of(self.target, host_state()),
            "target": self.target.__qualname__,
            "decision": self.decision.to_dict(),
            "variants": variants,
            "forms": [dataclasses.asdict(form) for form in self.forms],
            "inactive": [_replacement_as_dict(replacement) for replacement in self.inactive],
            "not_installed": self.packages,
        }

    def print(self) -> None:
        print_wrapped(self.decision.lines())
        for name, row in self.variants.items():
            state = "" if row.enabled else ", disabled"
            runs = row.error or f"{row.kernel} of {row.provider}{state}"
            print_wrapped(f"  the variant {name} gets {runs}")
        for form in self.forms:
            print_wrapped(f"  {form.call} runs {form.function} at {form.location}")
        for replacement in self.inactive:
            place = f"{replacement.cls.__qualname__} at {replacement.location}"
            print_wrapped(f"  declared but not active: {place}")
        for package in self.packages:
            print_wrapped(f"  not installed: {package} has kernels for this op on this platform")


def _unknown(name: str) -> str:
    """Return the message about an unknown name."""
    message = f"no op is called {name!r}: "
    near = near_matches(name, inventory.known_names())
    if near:
        message += f"did you mean {' or '.join(map(repr, near))}? "
    message += _ALL_NAMES
    # Nobody knows the names in a plugin that was not imported.
    unread = []
    for record in host_state().plugins.values():
        if record.status is not PluginStatus.ACTIVATED:
            state = f"is {record.status.value}: {record.reason}"
            unread.append(f"plugin {record.name} of {record.provider} {state}")
    if unread:
        message += f" Classes of plugins that are not active are not known: {'; '.join(unread)}."
        message += " 'opgraft plugins doctor' checks the plugins."
    return message


def _inactive(target: type) -> list[Replacement]:
    """Return the declared replacements of a class, of plugins that are not active."""
    state = host_state()
    declared = [each for each in state.registry.replacements if each.target is target]
    return [each for each in declared if each not in state.active]


def _replacement_as_dict(replacement: Replacement) -> dict[str, Any]:
    provider = replacement.provider.to_dict()
    return {
        "class": replacement.cls.__qualname__,
        "provider": provider,
        "location": replacement.location,
    }
