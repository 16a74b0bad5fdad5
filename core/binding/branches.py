"""Kernels that take some arguments only: a test before each call, which compilers trace, and the op's own kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opgraft.binding.derivation import prepare
from opgraft.binding.kernels import Kernel


@dataclass(frozen=True)
class Branch:
    """The test that a replacement states as ``supports=``, and the kernel that runs where it is false."""

    supports: Callable[..., Any]
    otherwise: Kernel

    def around(self, kernel: Any) -> Callable[..., Any]:
        """Return the method that runs ``kernel`` where the test holds of the arguments."""
        prepare(self.otherwise.definition)
        run, otherwise, supports = (
            method_of(kernel),
            method_of(self.otherwise.definition),
            self.supports,
        )

        @functools.wraps(run)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return (
                run(self, *args, **kwargs)
                if supports(*args, **kwargs)
                else otherwise(self, *args, **kwargs)
            )

        return forward


def method_of(raw: Any) -> Callable[..., Any]:
    """Return a definition as it stands in a class as a function that takes ``self``."""
    if not isinstance(raw, staticmethod):
        method: Callable[..., Any] = raw
        return method
    function = raw.__func__
    return functools.wraps(function)(lambda self, *args, **kwargs: function(*args, **kwargs))
