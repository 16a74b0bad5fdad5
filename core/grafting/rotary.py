"""Rotary position embedding of attention modules that call a function of their file for it.

Exchanging the function would change every model of the process. Instead the instance gets a class of its own, derived
from the former one, whose ``forward`` is the same code in a namespace in which the function leads to an op, which is a
child of the instance. The rest of that namespace is what the file held when the model was grafted.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from opgraft.adapter import LeaveAlone
from opgraft.ops import ApplyRotaryEmb
from torch import Tensor, nn

CHILD = "opgraft_rotary"
ADAPTER = "transformers rotary function"
_FORWARD = "_opgraft_forward"
_HINT = "rotary"

Rotation = Callable[..., tuple[Tensor, Tensor]]


def function_of(module: nn.Module) -> str | None:
    """The name of the rotary function that a module's forward calls, ``None`` if there is none or it is attached."""
    forward = inspect.getattr_static(type(module), "forward")
    if CHILD in module._modules or not isinstance(forward, FunctionType):
        return None
    plain = inspect.unwrap(forward)
    names = [name for name in plain.__code__.co_names if _HINT in name]
    return next((name for name in names if isinstance(plain.__globals__.get(name), FunctionType)), None)


def check(module: nn.Module, name: str, model: nn.Module) -> None:
    """Raise ``LeaveAlone`` if the op is not what the function ``name`` computes, with the tables that it gets."""
    forward = inspect.getattr_static(type(module), "forward")
    if "forward" in vars(module):
        raise LeaveAlone("its forward was set on the instance")
    if inspect.unwrap(forward) is not forward:
        raise LeaveAlone("its forward is decorated")
    if not _rotates_halves(forward.__globals__[name]):
        raise LeaveAlone(f"{name} computes something else than apply_rotary_emb on the halves of a head")
    tables = [part for part in model.modules() if _makes_tables(part, type(module).__module__)]
    if not tables or not all(_repeats(table) for part in tables for table in _tables(part)):
        raise LeaveAlone("nothing in the model shows that both halves of its cosines and sines are the same")


def attach(module: nn.Module, name: str, op: ApplyRotaryEmb) -> None:
    """Let the forward of ``module`` call ``op``, which becomes its child, where it calls the function ``name``."""
    op.train(module.training)
    module._modules[CHILD] = op
    cls: Any = type(module)
    module.__class__ = _derived(cls, name)
    _equip(module)


def detach(module: nn.Module) -> None:
    """Give a module its former class and forward back."""
    if isinstance(module, _Rotating):
        module.__class__ = type(module).__mro__[1]
        del module._modules[CHILD], module.__dict__[_FORWARD]


class _Rotating:
    """Marks the derived classes; what they have in common is set on each, before the methods of the model's class."""

    rotary_name: str


@functools.lru_cache(maxsize=256)
def _derived(cls: Any, name: str) -> Any:
    """A class that is ``cls`` by all appearances, whose forward is the one that each instance carries."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._opgraft_forward(self, *args, **kwargs)

    namespace = {
        "forward": forward,
        "rotary_name": name,
        "__reduce_ex__": _reduce,
        "__setstate__": _set_state,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls)(cls.__name__, (cls, _Rotating), namespace)


def _reduce(self: Any, protocol: Any) -> Any:
    """Copies and pickles hold the class that can be found by its name, and no function of ours."""
    derived: Any = type(self)
    reduced = super(derived, self).__reduce_ex__(protocol)
    state = {name: value for name, value in reduced[2].items() if name != _FORWARD}
    return (_restore, (derived.__mro__[1], derived.rotary_name), state, *reduced[3:])


def _set_state(self: Any, state: dict[str, Any]) -> None:
    super(type(self), self).__setstate__(state)
    _equip(self)


def _restore(cls: Any, name: str) -> Any:
    derived = _derived(cls, name)
    return derived.__new__(derived)


def _equip(module: Any) -> None:
    """Give an instance its forward: the code of its class, with a namespace of its own."""
    name, forward = module.rotary_name, inspect.unwrap(type(module).forward)
    wanted, namespace = set(_names(forward.__code__)), forward.__globals__
    known: dict[str, Any] = {key: value for key, value in namespace.items() if key in wanted or key == "__builtins__"}
    known[name] = functools.partial(_rotate, module._modules[CHILD], namespace[name])
    function = FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
    function.__kwdefaults__ = forward.__kwdefaults__
    module.__dict__[_FORWARD] = function


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _rotate(
    op: nn.Module, function: Rotation, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """What the file's function does, by the op where the shapes are those that it takes.

    Query and key are ``[batch, heads, sequence, head_size]``; cos and sin ``[batch or 1, sequence, head_size]`` with
    two equal halves.
    """
    usual = not args and not kwargs and (query.dim(), key.dim(), cos.dim()) == (4, 4, 3)
    if not usual or cos.dtype != query.dtype or not query.shape[-1] == key.shape[-1] == cos.shape[-1]:
        return function(query, key, cos, sin, *args, **kwargs)
    half = query.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    return _turned(op, query, cos, sin), _turned(op, key, cos, sin)


def _turned(op: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens = x.transpose(1, 2)
    if cos.shape[0] == 1:
        turned: Tensor = op(tokens, cos[0], sin[0])
    else:  # each row has positions of its own
        turned = op(tokens.flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1)).view(tokens.shape)
    return turned.transpose(1, 2)


@functools.lru_cache(maxsize=256)
def _rotates_halves(function: Rotation) -> bool:
    """Whether a function computes on random heads what the op computes, in two precisions."""
    generator = torch.Generator().manual_seed(0)
    for dtype, batch in ((torch.float64, 2), (torch.float64, 1), (torch.bfloat16, 2)):
        query, key = (torch.randn(2, heads, 5, 8, dtype=torch.float64, generator=generator) for heads in (4, 2))
        angles = torch.randn(batch, 5, 4, dtype=torch.float64, generator=generator).repeat(1, 1, 2)
        arguments = [t.to(dtype) for t in (query, key, angles.cos(), angles.sin())]
        op = _Native()
        try:
            found, wanted = function(*arguments), _rotate(op, function, *arguments)
        except Exception:  # whatever a function of another kind raises
            return False
        tolerance = 1e-12 if dtype is torch.float64 else 0.1
        if not all(_agree(a, b, tolerance) for a, b in zip(found, wanted, strict=True)):
            return False
    return True


class _Native(nn.Module):
    """The definition, whatever kernels are bound here."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return ApplyRotaryEmb.forward_native(ApplyRotaryEmb(), x, cos, sin)


def _agree(found: Any, wanted: Tensor, tolerance: float) -> bool:
    alike = isinstance(found, Tensor) and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    return alike and bool(torch.allclose(found, wanted, atol=tolerance, rtol=tolerance))


def _makes_tables(module: nn.Module, file: str) -> bool:
    """Whether a module of the same file makes cosines and sines."""
    return type(module).__module__ == file and any(name.endswith("inv_freq") for name in module._buffers)


def _tables(module: Any) -> Iterator[Tensor]:
    """The cosines and sines that a module makes of the first positions, for each type of layer that it knows."""
    twin = copy.deepcopy(module)  # it may note the positions that it has seen
    kinds: list[Mapping[str, Any]] = [{"layer_type": kind} for kind in getattr(module, "layer_types", ())] or [{}]
    x = next(iter(module._buffers.values())).new_zeros(1, 4, 1)
    positions = torch.arange(4, device=x.device)[None]
    for options in kinds:
        with torch.no_grad():
            yield from twin(x, positions, **options)


def _repeats(table: Tensor) -> bool:
    half = table.shape[-1] // 2
    return not table.is_meta and torch.equal(table[..., :half], table[..., half:])
