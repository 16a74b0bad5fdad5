"""``FormChoice``, the record of the code that a functional form runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opgraft.binding.functional import Functional, binding_of
from opgraft.binding.specialisation import Binding
from opgraft.platform import DISPATCH_KEYS
from opgraft.plugins.discovery import discover
from opgraft.registry.decision import Provider


@dataclass(frozen=True)
class FormChoice:
    """The choice for a functional form here and now.

    The form runs a function of the bound kernel's class, or the form's own native definition.

    Attributes:
        form: the form.
        binding: the choice of class and kernel for the op of the form.
    """

    form: Functional[..., Any]
    binding: Binding

    @property
    def is_native(self) -> bool:
        """True if the form runs the native definition in plain PyTorch."""
        functions = self.binding.kernel.winner.functions or {}
        return self.form.name not in functions

    @property
    def op_class(self) -> type:
        """The class whose code runs: the replacement only if it brings a function for the form."""
        choice = self.binding.replacement
        return choice.target if self.is_native else choice.cls

    @property
    def kernel_name(self) -> str:
        """The name of the kernel for tables, such as ``linear.native``."""
        return f"{self.form.name}.native" if self.is_native else self.binding.kernel_name

    @property
    def provider(self) -> Provider:
        """The provider of the code that runs."""
        if self.is_native:
            return discover().provider_of(self.form.__module__)
        return self.binding.provider

    @property
    def reason(self) -> str:
        """The reason for the choice, followed by the reasons for class and kernel of the op."""
        decision = self.binding.decision
        own = decision.candidates[0].reason
        return f"{self.unserved or own}; {decision.reason}"

    @property
    def unserved(self) -> str:
        """The reason why the form does not run the bound kernel; empty if it does.

        Empty, too, if the bound kernel is native.
        """
        kernel = self.binding.kernel.winner
        if not self.is_native or kernel.key == "native":
            return ""
        key = kernel.key if kernel.key in DISPATCH_KEYS else "oot"
        return (
            f"the layer calls opgraft.functional.{self.form.name}, for which "
            f"{self.binding.provider} brings no function in a functional_{key}, so the native "
            "definition runs"
        )


def choice_of(form: Functional[..., Any]) -> FormChoice:
    """Return the choice for a form here and now.

    Raises:
        OpgraftError: as constructing the op would.
    """
    return FormChoice(form, binding_of(form))
