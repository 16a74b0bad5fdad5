"""Linear maps on CPUs by oneDNN.

oneDNN reads a weight as the weight lies in memory, or packed in a layout of its own. A packed
weight is either a copy beside a frozen parameter (``linear``), or the only form that a layer has
(``PackedWeight``, ``PackableLayer``). If oneDNN does not pay, or if a tracer must see through the
operators, torch's own linear runs.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from opgraft.binding.marks import gradient_required
from opgraft.compat import packed_linear as onednn
from opgraft.compat import tracing
from opgraft.errors import PackError, WeightError
from opgraft.ops.linear.functional import expect_mappable, mapped
from opgraft.ops.linear.functional import linear as form
from opgraft.ops.linear.weight_cache import WeightCache, declaration, fits, requires_gradient
from opgraft.ops.weights import set_weight_attrs
from opgraft.platform import Platform, cpu_features
from opgraft.plugins.selection import current_platform
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

UNLIMITED = sys.maxsize


class RowRange(NamedTuple):
    """The numbers of rows for which a kernel pays, for weights of some size.

    Attributes:
        size: elements of the smallest weight in this range.
        first: fewest rows.
        last: most rows.
        last_fused: most rows of a call with a fused activation.
    """

    size: int
    first: int
    last: int = UNLIMITED
    last_fused: int = UNLIMITED


NEVER = RowRange(0, UNLIMITED)

_FAST_PLAIN = (
    RowRange(1 << 23, 4, 256, 256),
    RowRange(1 << 20, 4, 256),
    RowRange(1 << 18, 16, 256),
)
_SLOW_PLAIN = (RowRange(1 << 19, 1), RowRange(1 << 17, 16))
_ALWAYS = (RowRange(1 << 14, 1),)
_ON_AVX2 = (RowRange(1 << 23, 2, 256, 24), RowRange(1 << 18, 2, 128, 24))

Table = Mapping[str, Mapping[torch.dtype, Sequence[RowRange]]]

PACKED: Table = MappingProxyType(
    {
        "avx512_fp16": MappingProxyType({torch.float32: _FAST_PLAIN, torch.bfloat16: _ALWAYS}),
        "avx512_bf16": MappingProxyType({torch.float32: _SLOW_PLAIN, torch.bfloat16: _ALWAYS}),
        "avx2": MappingProxyType({torch.float32: _ON_AVX2}),
    }
)
"""Instruction set → dtype → the ranges in which a packed weight pays, large weights first.

The first instruction set that the CPU has counts, and the first range that a weight fits.

Measured with torch 2.13 on 1 and 2 cores, widths 64 to 4,096 and 512 by 32,000, 1 to 2,048 rows, as
ratios of torch's linear to the packed one. torch's float32 linear is tuned for CPUs with fp16
arithmetic: there torch wins for up to 3 rows (ratio 0.3 to 0.9), and for many rows of large weights
(0.9). Between, packing wins by 1.0 to 2.8, and in bfloat16 by 1.0 to 2.5. On CPUs with bfloat16
arithmetic only, packing wins by 1.1 to 4.1 (more on Zen 5 than on Zen 4), for one row from half a
million weights on.

On Zen 3, which has AVX2 only, packing wins by 1.0 to 3.9 on two cores, and by 0.9 to 2.1 on one
core, up to 128 rows, or 256 of large weights. For more, torch wins on one core (0.85 to 0.95). With
a fused GELU packing wins up to 24 rows, by 0.97 to 3.1 and 0.83 to 1.75, and torch wins for many
(0.6 to 0.9). CPUs with AVX-512 and without these bfloat16 and fp16 instructions take the row of
AVX2, unmeasured. All others do not pack.
"""

DIRECT: Table = MappingProxyType(
    {
        "avx512_fp16": MappingProxyType({}),
        "avx512_bf16": MappingProxyType({torch.float32: _SLOW_PLAIN}),
    }
)
"""Likewise, the ranges in which oneDNN over a plain weight pays.

Measured with torch 2.13 on two cores of Zen 4, widths 384 to 4,096 and 512 by 32,000, 1 to 1,024
rows: torch's linear takes 1.4 to 3.3 times as long in float32. oneDNN over a packed weight takes
0.5 to 1.05 of the time of the direct one, the least at 4 to 64 rows. In bfloat16 torch's linear is
oneDNN's. Other CPUs were not measured.
"""

_PACKABLE = (torch.float32, torch.bfloat16)


class ElementRange(NamedTuple):
    """A ``RowRange`` for weights of one shape, counted in elements of the input."""

    least: int
    most: int
    most_fused: int

    def has(self, elements: int, fused: str) -> bool:
        """Return True if an input of so many elements is in the range."""
        most = self.most if fused == "none" else self.most_fused
        return self.least <= elements <= most


class Ranges(NamedTuple):
    """The ranges in which oneDNN pays for weights of one shape and dtype.

    Attributes:
        least: elements of the smallest input for which oneDNN pays.
        packed: the range for a packed weight.
        direct: the range for a plain weight.
    """

    least: int
    packed: ElementRange
    direct: ElementRange


_COPIES = WeightCache(after=12)
"""Packed copies. On one core of Zen 4, packing takes as long as 8 to 20 packed calls save."""


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute the form ``linear`` by oneDNN if that pays.

    The ranges are ``DIRECT``, and ``PACKED`` for a weight frozen by ``opgraft.freeze``. oneDNN
    rounds the result once, at the end; with both an activation and a residual, after each of the
    two.

    oneDNN takes contiguous weights in float32 or bfloat16. If a gradient is required, and under
    autocast, ``torch.func``, a tracer or a dispatch mode, torch's own linear runs. Compilers see
    one opaque operator, and the operator decides at each run.
    """
    if is_dynamo_compiling():
        return _compiled(x, weight, bias, activation, residual)
    if type(x) is Tensor and x.numel() < ranges_for(weight.dtype, weight.shape).least:
        # The one path on which a microsecond counts: a single row in a small layer.
        if activation == "none" and residual is None:
            expect_mappable(x, weight, bias)
            return F.linear(x, weight, bias)
        return form.native(x, weight, bias, activation, residual)
    return _run(x, weight, bias, activation, residual)


def compiled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute the form ``linear`` in compiled code, by the definition unless oneDNN may pay."""
    if x.is_cpu and weight.is_cpu and x.dtype == weight.dtype and _may_pay(x, weight, activation):
        result: Tensor = torch.ops.opgraft.packed_linear(x, weight, bias, activation, residual)
        return result
    return form.native(x, weight, bias, activation, residual)


def _may_pay(x: Tensor, weight: Tensor, activation: str) -> bool:
    elements: object = x.numel()
    if any(type(size) is not int for size in weight.shape):
        return True

    ranges = ranges_for(weight.dtype, weight.shape)
    if not isinstance(elements, int):  # the number of rows is symbolic
        return ranges.least < UNLIMITED
    return ranges.packed.has(elements, activation) or ranges.direct.has(elements, activation)


def missing() -> str | None:
    """Return the reason why oneDNN computes nothing on this machine, or ``None``."""
    absent = onednn.missing()
    platform = current_platform()
    if absent is None and not _row_ranges(PACKED, platform):
        stated = ", ".join(cpu_features(platform)) or "none"
        measured = ", ".join(PACKED)
        absent = (
            f"oneDNN was measured with the instruction sets {measured} only, and "
            f"Platform.capability().features of {platform.name} lists {stated}"
        )
    return f"packed linear unavailable: {absent}" if absent else None


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    operand = None
    fused = "none" if activation == "relu" else activation
    if type(x) is Tensor and fused in onednn.POST_OPS:
        operand = _operand(x, weight, bias, fused, residual)
    if operand is None:
        return form.native(x, weight, bias, activation, residual)
    return _by_onednn(x, operand, bias, activation, residual)


def _by_onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    """Compute the form ``linear`` over a weight, packed or plain.

    Unchecked: ``fits`` must hold and nothing may watch the operators.
    """
    if residual is not None and activation == "none":
        return onednn.linear_add(x, weight, bias, residual)

    fused = "none" if activation == "relu" else activation
    y = onednn.linear(x, weight, bias, fused)
    if fused != activation:
        y.relu_()
    return y if residual is None else y.add_(residual)


def _operand(
    x: Tensor, weight: Tensor, bias: Tensor | None, fused: str, residual: Tensor | None
) -> Tensor | None:
    """Return the weight for oneDNN, packed if frozen; ``None`` for torch's own linear."""
    if type(weight) is not nn.Parameter and type(weight) is not Tensor:
        return None
    if weight.layout is not torch.strided or not weight.is_cpu:
        return None
    if not weight.is_contiguous() or weight.dim() != 2:
        return None

    ranges = ranges_for(weight.dtype, weight.shape)
    elements = x.numel()

    packed_pays = ranges.packed.has(elements, fused) and declaration(weight) > 0
    direct_pays = ranges.direct.has(elements, fused)

    if not (packed_pays or direct_pays) or not fits(x, weight, bias, residual):
        return None
    if requires_gradient(x, weight, bias, residual) or onednn.watched():
        return None

    copied = _COPIES.copy_of(weight, onednn.pack) if packed_pays else None
    if copied is not None:
        return copied
    return weight if direct_pays else None


@functools.lru_cache(maxsize=4096)  # every eager call of a linear layer asks
def ranges_for(dtype: torch.dtype, shape: torch.Size) -> Ranges:
    """Return the ranges in which oneDNN pays on this machine for weights of a dtype and shape."""
    platform = current_platform()
    columns = shape[-1] if shape else 0
    packable = len(shape) == 2 and columns > 0 and onednn.missing(dtype) is None
    found = []
    for table in (PACKED, DIRECT):
        row = rows_for(_row_ranges(table, platform), dtype, shape.numel()) if packable else NEVER
        found.append(ElementRange(*(rows * max(columns, 1) for rows in row[1:])))

    least = min(each.least for each in found)
    return Ranges(least, *found)


def pays_packed(weight: Tensor) -> bool:
    """Return True if packing pays here for the weight's size and dtype, for any number of rows."""
    rows = _row_ranges(PACKED, current_platform())
    return rows_for(rows, weight.dtype, weight.numel()) is not NEVER


def rows_for(
    rows: Mapping[torch.dtype, Sequence[RowRange]], dtype: torch.dtype, size: int
) -> RowRange:
    """Return the row of a table for weights of a dtype and size; ``NEVER`` if there is none."""
    return next((row for row in rows.get(dtype, ()) if size >= row.size), NEVER)


def _row_ranges(table: Table, platform: Platform) -> Mapping[torch.dtype, Sequence[RowRange]]:
    features = cpu_features(platform)
    return next((rows for feature, rows in table.items() if feature in features), {})


def _compiled(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    """Give a compiler the packed linear as one operator if that may run, else the definition."""
    plain = x.dtype not in _PACKABLE or weight.dtype != x.dtype or not (x.is_cpu and weight.is_cpu)
    if plain or torch.is_autocast_enabled("cpu"):
        return form.native(x, weight, bias, activation, residual)

    # An exported program must run without opgraft.
    if gradient_required((x, weight, bias, residual), {}) or tracing.exporting():
        return form.native(x, weight, bias, activation, residual)
    result: Tensor = torch.ops.opgraft.packed_linear(x, weight, bias, activation, residual)
    return result


torch.library.define(
    "opgraft::packed_linear",
    "(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? residual) -> Tensor",
)
torch.library.impl("opgraft::packed_linear", "cpu", _run)
torch.library.register_fake("opgraft::packed_linear", mapped)


class PackedWeight:
    """A weight ``[out_features, in_features]`` in packed form only.

    If a call needs the plain weight, the plain weight is rebuilt for this call.

    Attributes:
        packed: an opaque tensor of the weight's shape and dtype. Compilers cannot take the tensor.
        handle: a tensor with the weight's number, for compiled code to find the weight. A number in
            a tensor lets one graph serve all layers of a shape. Numbers are never used again.
        dtype: of the weight.
        nbytes: bytes of the plain weight.
        rows: of the weight.
        columns: of the weight.
    """

    def __init__(self, weight: Tensor) -> None:
        with torch.inference_mode(False):
            self.packed = onednn.pack(weight)
            self.handle = torch.tensor(next(_NUMBERS), dtype=torch.int64, device="cpu")

        self.dtype = weight.dtype
        self.nbytes = weight.nbytes
        self.rows, self.columns = weight.shape
        _BY_NUMBER[int(self.handle)] = self

    def dense(self) -> Tensor:
        """Rebuild the plain weight, bit by bit, in memory of its own.

        A tracer or a transform sees a constant: a thread of its own rebuilds the weight, because
        tracers and transforms cannot take packed tensors.
        """
        if tracing.followed() or tracing.transformed():
            with ThreadPoolExecutor(1) as unfollowed:
                return unfollowed.submit(onednn.unpack, self.packed).result()
        with torch.inference_mode(False):
            return onednn.unpack(self.packed)


_NUMBERS = itertools.count()
_BY_NUMBER: weakref.WeakValueDictionary[int, PackedWeight] = weakref.WeakValueDictionary()


def linear_packed_only(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    """Compute the form ``linear`` over a packed weight, for any number of rows.

    The plain weight is rebuilt and torch's own linear runs if a gradient is required, under
    autocast, ``torch.func``, forward-mode differentiation, a tracer or a dispatch mode, and for
    arguments that oneDNN does not take. Gradients flow to the input, the bias and the residual.

    Raises:
        ValueError: as the form does.
        PackError: ``torch.export`` looks on, and not for ``opgraft.compile``.
    """
    if is_dynamo_compiling() or tracing.capturing():
        return _compiled_packed_only(x, weight, bias, activation, residual)
    return _run_packed_only(x, weight, bias, activation, residual)


def dense_weight(weight: PackedWeight) -> Tensor:
    """Return the plain weight, in compiled code too."""
    if not is_dynamo_compiling():
        return weight.dense()

    _refuse_export()
    rebuilt: Tensor = torch.ops.opgraft.dense_weight(
        weight.handle, weight.rows, weight.columns, weight.dtype
    )
    return rebuilt


def _run_packed_only(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    watched = type(x) is not Tensor or requires_gradient(x, bias, residual) or onednn.watched()
    if not watched and fits(x, weight.packed, bias, residual):
        return _by_onednn(x, weight.packed, bias, activation, residual)
    _refuse_export()
    return form.native(x, weight.dense(), bias, activation, residual)


def _compiled_packed_only(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    """Give a compiler one operator, or the definition over a weight that an operator rebuilds."""
    plain = x.dtype != weight.dtype or not x.is_cpu or torch.is_autocast_enabled("cpu")
    if plain or tracing.exporting() or gradient_required((x, bias, residual), {}):
        return form.native(x, dense_weight(weight), bias, activation, residual)

    result: Tensor = torch.ops.opgraft.packed_only_linear(
        x, weight.handle, weight.rows, bias, activation, residual
    )
    return result


def _refuse_export() -> None:
    if tracing.exporting():
        raise PackError(
            "torch.export met a linear layer whose weight opgraft.freeze(model, keep_plain=False) "
            "has packed, which no exported program can hold: call opgraft.thaw(model) first"
        )


def _weight_of(handle: Tensor) -> PackedWeight:
    weight = _BY_NUMBER.get(int(handle))
    if weight is None:
        raise PackError(
            "compiled code was called with a packed weight that is gone, because the layer is gone "
            "or was packed again: compile the module that has the layer again"
        )
    return weight


def _packed_only_linear(
    x: Tensor,
    handle: Tensor,
    rows: int,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    return _run_packed_only(x, _weight_of(handle), bias, activation, residual)


def _fake_packed_only_linear(
    x: Tensor,
    handle: Tensor,
    rows: int,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


def _dense_weight(handle: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return _weight_of(handle).dense()


def _fake_dense_weight(handle: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return handle.new_empty((rows, columns), dtype=dtype)


torch.library.define(
    "opgraft::packed_only_linear",
    "(Tensor x, Tensor handle, SymInt rows, Tensor? bias, str activation, Tensor? residual)"
    " -> Tensor",
)
torch.library.impl("opgraft::packed_only_linear", "cpu", _packed_only_linear)
torch.library.register_fake("opgraft::packed_only_linear", _fake_packed_only_linear)
torch.library.define(
    "opgraft::dense_weight",
    "(Tensor handle, SymInt rows, SymInt columns, ScalarType dtype) -> Tensor",
)
torch.library.impl("opgraft::dense_weight", "cpu", _dense_weight)
torch.library.register_fake("opgraft::dense_weight", _fake_dense_weight)


@dataclass(frozen=True)
class _ParameterState:
    """The state of a parameter beside the values, which a packed weight does not have."""

    requires_grad: bool
    attributes: Mapping[str, Any]


class PackableLayer(nn.Module):
    """A layer that may hold ``weight`` packed only, and then not as a parameter.

    Each read of ``weight`` of a packed layer rebuilds the plain weight; a write to the rebuilt
    weight is lost. A ``state_dict``, copies and files have the plain weight. ``.to()`` and
    ``load_state_dict`` unpack the weight and pack the weight again.
    """

    packs_always: ClassVar[bool] = False
    """Pack the layer whenever oneDNN can, even if the layer was plain before."""
    _packed: PackedWeight | None = None
    _parameter_state: _ParameterState

    @property
    def weight(self) -> Tensor:
        """The plain weight. A packed layer returns a new parameter that requires no gradient."""
        packed = self._packed
        if packed is None:
            held: Any = self.__dict__.get("weight")
            # nn.Module.__getattr__ looks past this property, into the parameters.
            own: Any = self.__getattr__("weight") if held is None else held
            return own  # torch says: a tensor or a module

        rebuilt = dense_weight(packed)
        if is_dynamo_compiling():
            return rebuilt

        parameter = nn.Parameter(rebuilt, requires_grad=False)
        if "weight_loader" in self._parameter_state.attributes:
            set_weight_attrs(parameter, {"weight_loader": _refuse_loading})
        return parameter

    @weight.setter
    def weight(self, value: Tensor) -> None:
        self.__dict__["weight"] = value  # no parameter, as weight methods may hold one

    def hold_packed(self) -> None:
        """Hold the weight packed only, if nothing prevents that."""
        weight = self._parameters.get("weight")
        if weight is None or obstacle(weight) is not None:
            return
        state = _ParameterState(weight.requires_grad, dict(vars(weight)))
        self.__dict__.update(_packed=PackedWeight(weight), _parameter_state=state)
        del self._parameters["weight"]

    def release_weights(self) -> None:
        """Hold the weight as a parameter again, the first among the parameters."""
        if self._packed is None:
            return
        self._put(self._packed.dense())
        del self._packed, self._parameter_state

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight" or self._packed is None:
            return super().__setattr__(name, value)

        self.release_weights()
        try:
            super().__setattr__(name, value)
        except TypeError:  # a plain layer refuses the value, too
            self.hold_packed()
            raise

    def _put(self, weight: Tensor) -> None:
        """Make a weight the first parameter."""
        parameter = nn.Parameter(weight, self._parameter_state.requires_grad)
        vars(parameter).update(self._parameter_state.attributes)
        others = {name: value for name, value in self._parameters.items() if name != "weight"}
        # The same dictionary stays, as a grafted module shares it.
        self._parameters.clear()
        self._parameters.update(weight=parameter, **others)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Hold the weight as a parameter inside the block, and pack the weight again afterwards."""
        repacks = self.packs_always or self._packed is not None
        self.release_weights()
        try:
            yield
        finally:
            if repacks:
                self.hold_packed()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with self.plain():
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._packed is not None:
            weight = self.weight if keep_vars else self._packed.dense()
            destination[f"{prefix}weight"] = weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            self.release_weights()
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
            return
        with self.plain():
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackableLayer:
        """Copy and pack the copy at once, so that plain weights of several layers do not add up."""
        reduced: Any = self.__reduce_ex__(4)
        make, arguments, state, *_ = reduced

        weight = state.pop("_packed")
        copied: PackableLayer = make(*arguments)
        memo[id(self)] = copied
        copied.__setstate__({**copy.deepcopy(state, memo), "_packed": weight})
        return copied

    def __copy__(self) -> PackableLayer:
        """Copy with separate parameters, as either layer may be unpacked without the other."""
        reduced: Any = self.__reduce_ex__(4)
        make, arguments, state, *_ = reduced
        copied: PackableLayer = make(*arguments)
        copied.__setstate__({**state, "_parameters": dict(self._parameters)})
        return copied

    def __getstate__(self) -> dict[str, Any]:
        packed = self._packed
        return {**self.__dict__, "_packed": None if packed is None else packed.dense()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        weight = state.pop("_packed", None)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if weight is not None:
            self._put(weight)
            self.hold_packed()


def _refuse_loading(*_: object, **__: object) -> None:
    raise WeightError(
        "a packed weight was to be loaded through a copy that the layer does not compute with: "
        "call opgraft.thaw(model) before loading weights again, or use load_state_dict"
    )


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def obstacle(weight: nn.Parameter) -> str | None:
    """Return the reason why a weight cannot be held packed only, or ``None``."""
    if type(weight) is not nn.Parameter:
        return f"it is a {type(weight).__name__}, expected a torch.nn.Parameter"
    if weight.is_inference():
        return "it was made in inference mode"
    if weight.layout is not torch.strided or not weight.is_cpu or weight.dim() != 2:
        return "it is no matrix in the memory of the CPU"

    unsupported = onednn.missing(weight.dtype)
    if unsupported is not None:
        return unsupported

    if not weight.numel():
        return "it is empty"
    if not weight.is_contiguous():
        return f"it is strided, {weight.stride()}"
    if weight.is_shared():  # type: ignore[no-untyped-call]  # torch leaves it so
        return "processes share its memory"
    if weight.grad is not None or any(getattr(weight, hooks) for hooks in _HOOKS):
        return "it has a gradient, or hooks that wait for one"
    return None
