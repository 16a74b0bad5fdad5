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
        tensors_of_call = self.call.tensors.values()
        return any(TOKENS in tensor.shape for tensor in tensors_of_call)

    def numbers(self, tokens: int) -> int:
        """Count the numbers in the tensors of the call."""
        total = 0
        for tensor in self.call.tensors.values():
            total += math.prod(tensor.sizes(tokens))
        return total

    def at(self, tokens: int) -> OpSpec:
        """Return the spec of the form with the inputs of this call, for a number of tokens.

        A leading dimension of drawn arguments is the number of tokens, whatever the size.
        """

        def inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
            (count,) = lead
            return _drawn(self.call, draw, count)

        lead = (tokens,)
        return dataclasses.replace(
            self.spec,
            inputs=inputs,
            module=_MODULES.get(self.call.form, self.spec.module),
            variants={"": {}},
            leads=(lead,),
            # The recorded sizes count.
            sizes=(1,),
            large=((lead, 1),),
        )

    def obstacle(self) -> str:
        """Return the reason why the call cannot be replayed; empty if it can."""
        for name, tensor in self.call.tensors.items():
            dtype = getattr(torch, tensor.dtype, None)
            if not isinstance(dtype, torch.dtype):
                return f"{name} has the dtype {tensor.dtype}, which torch does not know"
            is_wide = dtype.itemsize > 1
            is_drawn = dtype.is_floating_point and is_wide
            # Codes of 8 bits have a meaning that random bytes lack.
            if not is_drawn and name not in _DRAWERS:
                return f"no numbers are drawn for {name}, {tensor}"
        # A file may be of another version.
        for function in (self.spec.functional.native, self.spec.reference):
            reason = self._refusal(function)
            if reason:
                return f"its arguments are none of the form's spec: {reason}"
        return ""

    def _refusal(self, function: Callable[..., Any]) -> str:
        """Return the reason why a function does not take the arguments; empty if it does."""
        names = dict(self.call.arguments)
        try:
            inspect.signature(function).bind(**names)
        except TypeError as error:
            return str(error)
        return ""

    def builds(self) -> bool:
        """Return True if a module with these settings can be built."""
        build = self.at(1).module
        return build is not None and not self._refusal(build)

    def words(self, tokens: int) -> str:
        """Return the call in few words, such as ``linear 16x3584 18944x3584``."""
        words = [self.call.form]
        for tensor in self.call.tensors.values():
            sizes = tensor.sizes(tokens)
            words.append("x".join(map(str, sizes)))
        for name, value in self.call.settings.items():
            words.append(f"{name}={value}")
        return " ".join(words)

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
    form = spec.functional
    results = checks.results_of(spec, implementation, arguments)
    wanted = [arguments[name] for name in form.mutates]
    if not wanted:
        wanted = tensors(form.fake(**arguments))
    found = []
    # The comparison of numbers tells of a wrong number of results.
    for place, ours in enumerate(results[: len(wanted)]):
        theirs = wanted[place]
        if ours.dtype != theirs.dtype:
            raise AssertionError(f"{form.name} returned {ours.dtype}, expected {theirs.dtype}")
        # A state may be wider than the inputs, and their tolerance counts.
        is_number = ours.is_floating_point() and expected[place].dtype == torch.float64
        found.append(ours.to(dtype) if is_number else ours)
    found += results[len(wanted) :]
    return checks.compare(spec, dtype, found, expected)


def calls_of(record: ShapeRecord, spec: OpSpec) -> list[ReplayedCall]:
    """Return the recorded calls of a spec's form."""
    found = record.calls(spec.functional.name)
    return [ReplayedCall(model, call, spec) for call, model in found.items()]


def _drawn(call: FormCall, draw: Draw, tokens: int) -> Arguments:
    """Draw the arguments of a call."""
    tensors_of_call = call.tensors
    sizes = {name: tensor.sizes(tokens) for name, tensor in tensors_of_call.items()}
    main = _main_dtype(tensors_of_call)
    arguments: Arguments = dict(call.settings)
    for name, setting in arguments.items():
        # Forms take lists of sizes.
        if isinstance(setting, tuple):
            arguments[name] = list(setting)
    for name, tensor in tensors_of_call.items():
        drawer = _OF_FORMS.get((call.form, name)) or _DRAWERS.get(name)
        x = drawer(draw, sizes) if drawer else draw(*sizes[name])
        # Tensors of another dtype than the activations keep theirs, such as a state in float32.
        if tensor.dtype != main:
            x = x.to(getattr(torch, tensor.dtype))
        arguments[name] = x
    return {name: arguments[name] for name, _ in call.arguments}


def _main_dtype(tensors_of_call: Mapping[str, TensorShape]) -> str:
    """Return the dtype of the activations, such as of ``x``."""
    for tensor in tensors_of_call.values():
        if getattr(torch, tensor.dtype).is_floating_point:
            return tensor.dtype
    return ""


def _scaled(name: str) -> Drawer:
    """Return a drawer of weights so small that a sum of products is about as large as one input."""

    def drawer(draw: Draw, sizes: Sizes) -> Tensor:
        shape = sizes[name]
        # All dimensions but the first are summed over, of experts all but two.
        inputs = math.prod(shape[_ROWS.get(name, 1) :])
        return draw(*shape).div_(inputs**0.5)

    return drawer


def _table(draw: Draw, sizes: Sizes) -> Tensor:
    """Draw cosines and sines of random angles."""
    rows, columns = sizes["cos_sin_cache"]
    angles = draw(rows, columns // 2).double()
    return torch.cat((angles.cos(), angles.sin()), -1).to(draw.dtype)


def _positions(draw: Draw, sizes: Sizes) -> Tensor:
    return draw.integers(0, sizes["cos_sin_cache"][0], sizes["positions"])


def _lengths(sizes: Sizes) -> list[int]:
    """Return the tokens of each sequence: about equally many."""
    (bounds,) = sizes["query_start_loc"]
    sequences = bounds - 1
    # The first argument of these forms has a row for each token.
    tokens, *_ = next(iter(sizes.values()))
    least, more = divmod(tokens, sequences)
    longer = [least + 1] * more
    return longer + [least] * (sequences - more)


def _bounds(draw: Draw, sizes: Sizes) -> Tensor:
    lengths = torch.tensor([0, *_lengths(sizes)])
    return lengths.cumsum(0)


def _seq_lens(draw: Draw, sizes: Sizes) -> Tensor:
    return torch.tensor(_lengths(sizes)) + EARLIER


def _blocks(sizes: Sizes) -> int:
    """Return the blocks of the longest sequence."""
    _, _, _, block_size, _ = sizes["cache"]
    longest = max(_lengths(sizes)) + EARLIER
    return math.ceil(longest / block_size)


def _block_table(draw: Draw, sizes: Sizes) -> Tensor:
    (sequences,) = sizes["seq_lens"]
    used = sequences * _blocks(sizes)
    # No two sequences share a block.
    shuffled = torch.randperm(used + SPARE, generator=draw.generator)
    return shuffled[:used].reshape(sequences, -1)


def _pages(draw: Draw, sizes: Sizes) -> Tensor:
    (sequences,) = sizes["seq_lens"]
    used = sequences * _blocks(sizes)
    _, *of_block = sizes["cache"]
    return draw(used + SPARE, *of_block)


def _written_pages(draw: Draw, sizes: Sizes) -> Tensor:
    _, *of_block = sizes["cache"]
    return draw(_written_blocks(sizes), *of_block)


def _written_blocks(sizes: Sizes) -> int:
    (tokens,) = sizes["slots"]
    _, _, _, block_size, _ = sizes["cache"]
    return tokens // block_size + SPARE


def _places(draw: Draw, sizes: Sizes) -> Tensor:
    """Draw different slots: places in a cache, or states."""
    (count,) = sizes["slots"]
    slots = count + SPARE
    if "cache" in sizes:
        _, _, _, block_size, _ = sizes["cache"]
        slots = _written_blocks(sizes) * block_size
    shuffled = torch.randperm(slots, generator=draw.generator)
    return shuffled[:count]


def _states(name: str) -> Drawer:
    """Return a drawer of states, with slots that no sequence has."""

    def drawer(draw: Draw, sizes: Sizes) -> Tensor:
        (sequences,) = sizes["slots"]
        _, *of_slot = sizes[name]
        return draw(sequences + SPARE, *of_slot)

    return drawer


def _decay(draw: Draw, sizes: Sizes) -> Tensor:
    # Negative, or states would grow without bound.
    return -draw(*sizes["A"]).exp()


def _experts(draw: Draw, sizes: Sizes) -> Tensor:
    """Draw different experts for each token."""
    tokens, chosen = sizes["topk_ids"]
    experts, *_ = sizes["w13"]
    # An order of all experts has none twice.
    numbers = torch.rand(tokens, experts, generator=draw.generator)
    return numbers.argsort(-1)[:, :chosen]


def _logits(draw: Draw, sizes: Sizes) -> Tensor:
    """Draw different logits for each token, which every dtype holds exactly."""
    tokens, experts = sizes["gating_output"]
    ranks = draw(tokens, experts).double().argsort(-1)
    # A power of two, as a division by another number rounds.
    power = math.ceil(math.log2(experts / 8 + 1))
    logits: Tensor = (ranks - experts // 2) / 2**power
    return logits.to(draw.dtype)


_ROWS: Mapping[str, int] = MappingProxyType({"w13": 2, "w2": 2})
"""By name of a weight, the dimensions before those of the inputs, if there are several."""

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
        ("conv2d", "weight"): _scaled("weight"),
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
    outputs, inputs = weight.shape
    op = ops.Linear(
        inputs,
        outputs,
        bias is not None,
        activation=activation,
    )
    with_parameters(op, weight=weight, bias=bias)
    if residual is None:
        return op, (x,)
    return op, (x, residual)


def _layer_norm_op(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[nn.Module, tuple[Any, ...]]:
    op = ops.LayerNorm(
        normalized_shape,
        eps,
        elementwise_affine=weight is not None,
        bias=bias is not None,
    )
    with_parameters(op, weight=weight, bias=bias)
    return op, (x,)


def _rotary_op(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor
) -> tuple[nn.Module, tuple[Any, ...]]:
    rows, rotary_dim = cos_sin_cache.shape
    op = ops.RotaryEmbedding(
        head_size,
        rotary_dim,
        rows,
        base=10000.0,
        is_neox_style=True,
        dtype=cos_sin_cache.dtype,
    )
    with_parameters(op, cos_sin_cache=cos_sin_cache)
    return op, (positions, query, key)


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
        # The reference needs a copy in float64.
        if not reason and count > MOST_NUMBERS:
            reason = f"{count:,} numbers are more than the {MOST_NUMBERS:,} that are compared"
        yield each, reason
