"""Replay recorded calls of forms: draw inputs of the shapes that a real model has."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from opgraft import ops
from opgraft.ops.spec import Arguments, Draw, OpSpec, in_float64, tensors, with_parameters
from opgraft.testing import checks
from opgraft.testing.shapes import TOKENS, FormCall, ShapeRecord, TensorShape
from torch import Tensor, nn

MOST_NUMBERS = 1 << 28
"""The most numbers in the tensors of a call to be compared: 2 GiB in float64."""

SPARE = 3
"""Blocks and slots of a drawn cache beyond those in use."""

EARLIER = 5
"""Tokens of a sequence before the tokens of the call."""

Sizes = Mapping[str, tuple[int, ...]]
Drawer = Callable[[Draw, Sizes], Tensor]


@dataclass(frozen=True)
class ReplayedCall:
    """A recorded call of a form.

    Attributes:
        model: the name of the model that makes the call.
        call: the call.
        spec: of the form.
    """

    model: str
    call: FormCall
    spec: OpSpec

    @property
    def is_per_token(self) -> bool:
        """True if the number of tokens is free."""
        return any(TOKENS in tensor.shape for tensor in self.call.tensors.values())

    def numbers(self, tokens: int) -> int:
        """Count the numbers in the tensors of the call."""
        sizes = (tensor.sizes(tokens) for tensor in self.call.tensors.values())
        return sum(map(math.prod, sizes))

    def at(self, tokens: int) -> OpSpec:
        """Return the spec of the form with the inputs of this call, for a number of tokens.

        A leading dimension of drawn arguments is the number of tokens, whatever the size.
        """

        def inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
            return _drawn(self.call, draw, lead[0])

        return dataclasses.replace(
            self.spec,
            inputs=inputs,
            module=_MODULES.get(self.call.form, self.spec.module),
            variants={"": {}},
            leads=((tokens,),),
            sizes=(1,),
            large=(((tokens,), 1),),
        )

    def obstacle(self) -> str:
        """Return the reason why the call cannot be replayed; empty if it can."""
        for name, tensor in self.call.tensors.items():
            dtype = getattr(torch, tensor.dtype, None)
            if not isinstance(dtype, torch.dtype):
                return f"{name} has the dtype {tensor.dtype}, which torch does not know"
            is_drawn = dtype.is_floating_point and dtype.itemsize > 1
            if not is_drawn and name not in _DRAWERS:
                return f"no numbers are drawn for {name}, {tensor}"
        names = dict.fromkeys(name for name, _ in self.call.arguments)
        for function in (self.spec.functional.native, self.spec.reference):
            try:
                inspect.signature(function).bind(**names)
            except TypeError as error:
                return f"its arguments are none of the form's spec: {error}"
        return ""

    def builds(self) -> bool:
        """Return True if a module with these settings can be built."""
        build = self.at(1).module
        if build is None:
            return False
        try:
            inspect.signature(build).bind(**dict(self.call.arguments))
        except TypeError:
            return False
        return True

    def words(self, tokens: int) -> str:
        """Return the call in few words, such as ``linear 16x3584 18944x3584``."""
        sizes = [x.sizes(tokens) for x in self.call.tensors.values()]
        shapes = ["x".join(map(str, each)) for each in sizes]
        settings = [f"{name}={value}" for name, value in self.call.settings.items()]
        return " ".join([self.call.form, *shapes, *settings])

    def check_values(self, dtype: torch.dtype, tokens: int, *, by_module: bool) -> float:
        """Compare a call with the reference in float64.

        If the native definition leaves the tolerance, too, the kernel is not to blame.

        Args:
            dtype: replaces the dtype of the call's first floating-point tensor.
            tokens: if their number is free.
            by_module: call the module of the op, not the form.

        Returns:
            The largest error, as a share of the tolerance.

        Raises:
            AssertionError: the results are wrong. The message names model and call.
        """
        spec = self.at(tokens)
        implementation = checks.by_module(spec) if by_module else spec.functional
        arguments = spec.arguments("", dtype, (tokens,), 1)
        with torch.no_grad():
            expected = tensors(spec.reference(**in_float64(arguments)))
            try:
                return _compared(spec, dtype, implementation, arguments, expected)
            except AssertionError as error:
                if self._is_hard(spec, dtype, arguments, expected):
                    return 0.0
                where = f"at a call of {self.model}, {self.call.at(tokens)}, in {dtype}"
                raise AssertionError(f"{where}: {error}") from error

    def _is_hard(
        self, spec: OpSpec, dtype: torch.dtype, arguments: Arguments, expected: list[Tensor]
    ) -> bool:
        """Return True if the native definition leaves the tolerance, too."""
        try:
            _compared(spec, dtype, spec.functional.native, arguments, expected)
        except AssertionError:
            return True
        return False


def _compared(
    spec: OpSpec,
    dtype: torch.dtype,
    implementation: Any,
    arguments: Arguments,
    expected: list[Tensor],
) -> float:
    results = checks.results_of(spec, implementation, arguments)
    wanted = [arguments[name] for name in spec.functional.mutates]
    if not wanted:
        wanted = tensors(spec.functional.fake(**arguments))
    named = spec.functional.name
    for ours, theirs in zip(results, wanted, strict=False):
        if ours.dtype != theirs.dtype:
            raise AssertionError(f"{named} returned {ours.dtype}, expected {theirs.dtype}")
    # A state may be wider than the inputs, and their tolerance counts.
    narrow = [
        ours.to(dtype) if theirs.dtype == torch.float64 else ours
        for ours, theirs in zip(results, expected, strict=False)
    ]
    found = narrow if len(results) == len(expected) else results
    return checks.compare(spec, dtype, found, expected)


def calls_of(record: ShapeRecord, spec: OpSpec) -> list[ReplayedCall]:
    """Return the recorded calls of a spec's form."""
    found = record.calls(spec.functional.name)
    return [ReplayedCall(model, call, spec) for call, model in found.items()]


def _drawn(call: FormCall, draw: Draw, tokens: int) -> Arguments:
    """Draw the arguments of a call."""
    sizes = {name: tensor.sizes(tokens) for name, tensor in call.tensors.items()}
    main = next((x.dtype for x in call.tensors.values() if _is_floating(x)), "")
    arguments: Arguments = {}
    for name, value in call.arguments:
        if not isinstance(value, TensorShape):
            arguments[name] = list(value) if isinstance(value, tuple) else value
            continue
        drawer = _OF_FORMS.get((call.form, name)) or _DRAWERS.get(name)
        x = drawer(draw, sizes) if drawer else draw(*sizes[name])
        # Tensors of another dtype than the activations keep theirs, such as a state in float32.
        if value.dtype != main:
            x = x.to(getattr(torch, value.dtype))
        arguments[name] = x
    return arguments


def _is_floating(tensor: TensorShape) -> bool:
    return getattr(torch, tensor.dtype).is_floating_point


def _scaled(name: str) -> Drawer:
    """Return a drawer of weights so small that a sum of products is about as large as one input."""
    return lambda draw, sizes: draw(*sizes[name]).div_(sizes[name][-1] ** 0.5)


def _table(draw: Draw, sizes: Sizes) -> Tensor:
    """Draw cosines and sines of random angles."""
    rows, columns = sizes["cos_sin_cache"]
    angles = draw(rows, columns // 2).double()
    return torch.cat((angles.cos(), angles.sin()), -1).to(draw.dtype)


def _positions(draw: Draw, sizes: Sizes) -> Tensor:
    return draw.integers(0, sizes["cos_sin_cache"][0], sizes["positions"])


def _lengths(sizes: Sizes) -> list[int]:
    """Return the tokens of each sequence: about equally many."""
    sequences = sizes["query_start_loc"][0] - 1
    first = next(iter(sizes))
    tokens = sizes[first][0]
    return [tokens * (n + 1) // sequences - tokens * n // sequences for n in range(sequences)]


def _bounds(draw: Draw, sizes: Sizes) -> Tensor:
    lengths = torch.tensor([0, *_lengths(sizes)])
    return lengths.cumsum(0)


def _seq_lens(draw: Draw, sizes: Sizes) -> Tensor:
    return torch.tensor(_lengths(sizes)) + EARLIER


def _blocks(sizes: Sizes) -> int:
    """Return the blocks of the longest sequence."""
    block_size = sizes["cache"][3]
    return -(-(max(_lengths(sizes)) + EARLIER) // block_size)


def _block_table(draw: Draw, sizes: Sizes) -> Tensor:
    shape = (sizes["seq_lens"][0], _blocks(sizes))
    blocks = math.prod(shape) + SPARE
    shuffled = torch.randperm(blocks, generator=draw.generator)
    return shuffled[: math.prod(shape)].reshape(shape)


def _pages(draw: Draw, sizes: Sizes) -> Tensor:
    blocks = sizes["seq_lens"][0] * _blocks(sizes) + SPARE
    return draw(blocks, *sizes["cache"][1:])


def _written_pages(draw: Draw, sizes: Sizes) -> Tensor:
    return draw(_written_blocks(sizes), *sizes["cache"][1:])


def _written_blocks(sizes: Sizes) -> int:
    return sizes["slots"][0] // sizes["cache"][3] + SPARE


def _places(draw: Draw, sizes: Sizes) -> Tensor:
    """Draw different slots: places in a cache, or states."""
    (count,) = sizes["slots"]
    slots = count + SPARE
    if "cache" in sizes:
        slots = _written_blocks(sizes) * sizes["cache"][3]
    return torch.randperm(slots, generator=draw.generator)[:count]


def _states(name: str) -> Drawer:
    return lambda draw, sizes: draw(sizes["slots"][0] + SPARE, *sizes[name][1:])


def _decay(draw: Draw, sizes: Sizes) -> Tensor:
    # Negative, or states would grow without bound.
    return -draw(*sizes["A"]).exp()


def _experts(draw: Draw, sizes: Sizes) -> Tensor:
    """Draw different experts for each token."""
    tokens, chosen = sizes["topk_ids"]
    shuffled = torch.rand(tokens, sizes["w13"][0], generator=draw.generator).argsort(-1)
    return shuffled[:, :chosen]


def _logits(draw: Draw, sizes: Sizes) -> Tensor:
    """Draw different logits for each token, which every dtype holds exactly."""
    tokens, experts = sizes["gating_output"]
    ranks = draw(tokens, experts).double().argsort(-1)
    power_of_two = 2 ** math.ceil(math.log2(experts / 8 + 1))
    return ((ranks - experts // 2) / power_of_two).to(draw.dtype)


_DRAWERS: Mapping[str, Drawer] = MappingProxyType(
    {
        "A": _decay,
        "block_table": _block_table,
        "conv_state": _states("conv_state"),
        "cos_sin_cache": _table,
        "gating_output": _logits,
        "positions": _positions,
        "query_start_loc": _bounds,
        "seq_lens": _seq_lens,
        "slots": _places,
        "state": _states("state"),
        "topk_ids": _experts,
        "w13": _scaled("w13"),
        "w2": _scaled("w2"),
    }
)
"""By name of an argument: all forms call such an argument by that name."""

_OF_FORMS: Mapping[tuple[str, str], Drawer] = MappingProxyType(
    {
        ("conv2d", "weight"): lambda draw, sizes: draw(*sizes["weight"]).div_(
            math.prod(sizes["weight"][1:]) ** 0.5
        ),
        ("linear", "weight"): _scaled("weight"),
        ("paged_attention", "cache"): _pages,
        ("write_kv_cache", "cache"): _written_pages,
    }
)
"""By form and name of an argument."""


def _linear_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> tuple[nn.Module, tuple[Any, ...]]:
    op = ops.Linear(x.shape[-1], weight.shape[0], bias is not None, activation=activation)
    arguments = (x,) if residual is None else (x, residual)
    return with_parameters(op, weight=weight, bias=bias), arguments


def _layer_norm_op(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[nn.Module, tuple[Any, ...]]:
    has_weight = weight is not None
    op = ops.LayerNorm(normalized_shape, eps, elementwise_affine=has_weight, bias=bias is not None)
    return with_parameters(op, weight=weight, bias=bias), (x,)


def _rotary_op(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor
) -> tuple[nn.Module, tuple[Any, ...]]:
    rows, rotary_dim = cos_sin_cache.shape
    op = ops.RotaryEmbedding(head_size, rotary_dim, rows, 10000.0, True, cos_sin_cache.dtype)
    return with_parameters(op, cos_sin_cache=cos_sin_cache), (positions, query, key)


_MODULES: Mapping[str, Any] = MappingProxyType(
    {"layer_norm": _layer_norm_op, "linear": _linear_op, "rotary_embedding": _rotary_op}
)
"""By form, the module of the op. The specs of these forms build modules of one size only."""


def replayable(
    record: ShapeRecord, spec: OpSpec, tokens: int
) -> Iterator[tuple[ReplayedCall, str]]:
    """Yield the recorded calls of a form, each with the reason to leave it out, or an empty one.

    Args:
        record: the record.
        spec: of the form.
        tokens: of each call.
    """
    for each in calls_of(record, spec):
        reason = each.obstacle()
        count = each.numbers(tokens)
        if not reason and count > MOST_NUMBERS:
            reason = f"{count:,} numbers are more than the {MOST_NUMBERS:,} that are compared"
        yield each, reason
