"""Which signatures may stand in for which."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from opgraft.registry.signatures import method_signature, rejected_call


def base(x, residual=None): ...
def with_keyword(x, *, scale=1.0): ...
def positional_only(x, y=None, /): ...
def variadic(x, *rest, **more): ...


ACCEPTED: list[tuple[Callable, Callable]] = [
    (base, lambda x, residual=None: ...),
    (base, lambda x, residual=None, extra=None: ...),
    (base, lambda x, residual=None, *args, **kwargs: ...),
    (base, lambda *args, **kwargs: ...),
    (base, lambda x, *args, **kwargs: ...),
    (base, lambda x=None, residual=None, *, extra=1: ...),
    (with_keyword, lambda x, scale=1.0: ...),
    (positional_only, lambda a, b=None: ...),
    (variadic, lambda x, *rest, **more: ...),
]

REJECTED: list[tuple[Callable, Callable, str]] = [
    (base, lambda x: ..., "residual"),
    (base, lambda x, residual: ..., "missing a required argument: 'residual'"),
    (base, lambda y, residual=None: ..., "'y'"),
    (base, lambda x, res=None: ..., "residual"),
    (base, lambda residual=None, x=None: ..., "lands in"),
    (base, lambda x, residual=None, *, scale: ..., "scale"),
    (base, lambda x, *, residual=None: ..., "too many positional"),
    (base, lambda x, /, residual=None: ..., "'x'"),
    (with_keyword, lambda x: ..., "scale"),
    (variadic, lambda x, *rest: ..., "any_other_keyword"),
    (variadic, lambda x, **more: ..., "too many positional"),
    (base, lambda x, other=None, residual=None: ..., "the value for 'residual' lands in 'other'"),
]


@pytest.mark.parametrize(("target", "replacement"), ACCEPTED)
def test_wider_or_equal_signatures_are_accepted(target: Callable, replacement: Callable) -> None:
    """A replacement may take more than its target: optional parameters and variadics do no harm."""
    assert rejected_call(inspect.signature(target), inspect.signature(replacement)) is None


@pytest.mark.parametrize(("target", "replacement", "word"), REJECTED)
def test_narrower_signatures_are_rejected_with_the_failing_call(
    target: Callable, replacement: Callable, word: str
) -> None:
    """A missing, renamed, reordered or newly required parameter is found, and the call that fails is shown."""
    problem = rejected_call(inspect.signature(target), inspect.signature(replacement))
    assert problem is not None
    assert word in problem


def test_method_signatures_are_seen_from_an_instance() -> None:
    """Plain, static and class methods all lose what the caller does not pass."""

    class Methods:
        def plain(self, x): ...

        @staticmethod
        def static(x): ...

        @classmethod
        def of_class(cls, x): ...

    for name in ("plain", "static", "of_class"):
        assert list(method_signature(Methods, name).parameters) == ["x"]
