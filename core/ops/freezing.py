"""``freeze`` and ``thaw``: weights without writers, with or without a plain form."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from opgraft.base.text import table
from opgraft.binding.arguments import expect_module
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.specialisation import Binding, bind_exact
from opgraft.errors import PackError
from opgraft.machine.memory import move_to_huge_pages
from opgraft.ops.composites.composite import Composite, served_by
from opgraft.ops.linear import packed as packed_linear
from opgraft.ops.linear.modules import Linear
from opgraft.ops.linear.packed import PackableLayer, obstacle
from opgraft.ops.linear.weight_cache import declare_frozen, forget_copies, withdraw
from torch import Tensor, nn

_OWN = ": graft under OpgraftConfig(providers={'linear': 'opgraft'}) to pack it"


@dataclass(frozen=True)
class Packed:
    """One linear layer with a packed weight only, and the bytes of the plain weight."""

    path: str
    bytes: int


@dataclass(frozen=True)
class Plain:
    """One linear layer with its plain weight, and the reason."""

    path: str
    source: str
    reason: str


@dataclass(frozen=True)
class FreezeReport:
    """The linear layers without a plain weight, and the others with the reason.

    Attributes:
        packed: one row per layer with a packed weight only, in the model's order. Layers packed
            before have a row, too. A layer in several places has one row, under the first path.
        kept: one row per other linear layer.
    """

    packed: tuple[Packed, ...] = ()
    kept: tuple[Plain, ...] = ()

    def total_bytes(self) -> int:
        """Return the bytes of the plain weights of all packed layers."""
        return sum(row.bytes for row in self.packed)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for ``json.dumps``."""
        return {
            "packed": [asdict(row) for row in self.packed],
            "kept": [asdict(row) for row in self.kept],
            "bytes": self.total_bytes(),
        }

    def __str__(self) -> str:
        size = f"{self.total_bytes() / 2**20:,.1f} MiB"
        packed = f"{len(self.packed)} weights packed, whose plain ones took {size}"
        lines = [f"{packed}; {len(self.kept)} kept plain"]
        if self.kept:
            lines += ["", *table(self._kept_rows())]
        return "\n".join(lines)

    def _kept_rows(self) -> list[tuple[str, ...]]:
        """Return a heading, then one row per class and reason, the most frequent first."""
        first: dict[tuple[str, str], str] = {}
        counts: Counter[tuple[str, str]] = Counter()
        for row in self.kept:
            kind = (row.source, row.reason)
            first.setdefault(kind, row.path or "the model itself")
            counts[kind] += 1

        rows: list[tuple[str, ...]] = [("count", "kept plain", "the first", "reason")]
        for kind, count in counts.most_common():
            source, reason = kind
            rows.append((str(count), source, first[kind], reason))
        return rows


class PackedLinear(PackableLayer, Linear):
    """A linear layer with a packed weight in place of a parameter.

    ``freeze(model, keep_plain=False)`` turns a ``Linear`` into this class in place, and ``thaw``
    turns the layer back. oneDNN cannot pack some weights, as after ``.half()`` or on another
    device. Such a weight is an ordinary parameter until ``.to()``, ``load_state_dict`` or
    ``freeze`` makes one for oneDNN. An assigned weight, also by ``load_state_dict`` with
    ``assign=True``, is an ordinary parameter until the next ``freeze``: only ``freeze`` sees all
    owners of the memory.
    """

    packs_always: ClassVar[bool] = True

    def hold_packed(self) -> None:
        """Hold the weight packed only, except in training mode and if oneDNN cannot pack."""
        if not self.training:
            super().hold_packed()

    def process_weights_after_loading(self) -> None:
        """Hold the weight packed only."""
        self.hold_packed()


def freeze(target: nn.Module | Tensor, keep_plain: bool = True) -> FreezeReport:
    """Declare that nobody writes to the weights below a module, or to one parameter.

    Kernels may then keep copies of the weights in faster layouts. The parameters then require no
    gradient.

    The declaration holds for memory, and so for tied weights and everything else in that memory:
    views of a weight, ``detach()``, ``.data``, and parameters made of these. Three events take the
    declaration back: ``.to()``, the step of an optimizer over the weights, and a call with a
    parameter that requires a gradient. After ``load_state_dict`` and other writes with a count in
    torch, kernels make new copies. After any other write, such as through ``.data``, call
    ``refresh``. Each parameter counts its own writes: after a write through another parameter over
    the same memory, call ``refresh``, too. A thread has Linux move the memory to huge pages.

    With ``keep_plain=False``, the ``Linear`` ops of a model hold their weights packed only, in
    place; everything else stays as before. The plain weights then take no memory, and nobody can
    write to them. The ops run packed for any number of rows. If a call needs the plain weight, the
    op rebuilds the weight for this call. Packed weights are no parameters: ``parameters()`` does
    not list them. ``state_dict``, ``load_state_dict``, ``.to()``, copies and files work as before.
    Layers in one storage, computed by one call, are taken apart, and ``thaw`` joins them again.

    A weight stays plain if another parameter or buffer of the model shares the memory, if oneDNN
    cannot pack the weight, if packing never pays here, or if the op has a kernel of another
    provider.

    Args:
        target: a module, or one tensor.
        keep_plain: keep the plain weights beside the packed copies.

    Returns:
        The linear layers with packed weights only, and the others with the reason. A second call
        returns the same.

    Raises:
        TypeError: ``target`` is neither a module nor a tensor, or a tensor with
            ``keep_plain=False``.
        PackError: with ``keep_plain=False``, a ``Linear`` op is in training mode; nothing is
            changed.
        OpgraftError: with ``keep_plain=False``, as constructing an op would; nothing is changed.
    """
    if not keep_plain:
        return _drop_plain_weights(target)

    move_to_huge_pages(declare_frozen(_weights("freeze", target)))
    if isinstance(target, Tensor):
        return FreezeReport()

    layers = _linear_layers(target)
    kept = {path: "keep_plain is True" for path, layer in layers if not _is_packed(layer)}
    return _report(layers, kept)


def thaw(target: nn.Module | Tensor) -> None:
    """Take ``freeze`` back: weights may be written to, and every layer below has a plain weight.

    Plain weights return with every bit, as new parameters. A new parameter requires a gradient if
    the former one did. Layers packed while loading are plain, too.

    Raises:
        TypeError: ``target`` is neither a module nor a tensor.
        PackError: other code derived a class from that of a packed layer; nothing is changed.
        OpgraftError: as constructing an op would; nothing is changed.
    """
    weights = _weights("thaw", target)
    if isinstance(target, nn.Module):
        _restore_plain_weights(target)
    withdraw(weights)


def refresh(target: nn.Module | Tensor) -> None:
    """Forget the kernels' copies of a parameter, or of all parameters below a module.

    Torch does not count some writes to a frozen weight, such as ``weight.data.copy_(merged)``. Call
    ``refresh`` after such a write. The copies of other tensors in the same memory are forgotten,
    too. The copies take no memory until the next call.

    Raises:
        TypeError: ``target`` is neither a module nor a tensor.
    """
    forget_copies(_weights("refresh", target))


def _weights(function: str, target: nn.Module | Tensor) -> list[Tensor]:
    if isinstance(target, Tensor):
        return [target]
    expect_module(function, target)
    return list(target.parameters())


def _linear_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    named = model.named_modules()
    return [(path, module) for path, module in named if isinstance(module, nn.Linear)]


def _report(layers: Sequence[tuple[str, nn.Linear]], kept: dict[str, str]) -> FreezeReport:
    """Return the report on linear layers; ``kept`` has the reason for each plain weight."""
    packed = []
    plain = []
    for path, layer in layers:
        if path in kept:
            plain.append(Plain(path, type(layer).__name__, kept[path]))
        else:
            op: Any = layer
            packed.append(Packed(path, op._packed.nbytes))
    return FreezeReport(tuple(packed), tuple(plain))


def _drop_plain_weights(model: Any) -> FreezeReport:
    """Make the ``Linear`` ops of a model hold their weights packed only, if possible."""
    expect_module("freeze", model)
    _expect_evaluation(model)
    memory = _MemoryMap(model)
    layers = _linear_layers(model)
    kept = {}
    for path, layer in layers:
        reason = _reason_to_stay_plain(path, layer, memory)
        if reason is not None:
            kept[path] = reason

    packable = [layer for path, layer in layers if path not in kept]
    composites = _composites_over(model, packable)
    # A weight inside a joint block cannot be dropped alone.
    for composite in composites:
        if _has_moved(composite, packable):
            composite.release_weights()

    try:
        for layer in packable:
            _drop_plain_weight(layer)
    finally:
        for composite in composites:
            composite.process_weights_after_loading()
    return _report(layers, kept)


def _drop_plain_weight(layer: Any) -> None:
    if not isinstance(layer, PackedLinear):
        layer._adopt(_packed_binding(layer))
    layer.process_weights_after_loading()


def _restore_plain_weights(model: nn.Module) -> None:
    for composite in _composites_over(model, restore_linear_layers(model)):
        composite.process_weights_after_loading()
    for layer in model.modules():
        if isinstance(layer, PackableLayer):
            layer.release_weights()


def restore_linear_layers(model: nn.Module) -> Sequence[nn.Module]:
    """Turn every ``PackedLinear`` back into a ``Linear`` with a plain weight, and return them.

    Layers of one former storage stay apart.

    Raises:
        PackError: other code derived a class from that of a packed layer; nothing is changed.
    """
    found = []
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear):
            found.append((path, module))

    for path, layer in found:
        if type(layer) is not layer.binding.specialisation:
            raise PackError(
                f"thaw: {type(layer).__name__} at {path!r} was derived from a packed layer by "
                "other code, such as a parametrization: take that back first"
            )

    # All bindings first: each may raise, and then nothing is changed.
    plans = [(layer, bind_exact(Linear, Linear, layer.binding.enforced)) for _, layer in found]
    for layer, binding in plans:
        layer.release_weights()
        layer._adopt(binding)
    return [layer for _, layer in found]


def _composites_over(model: nn.Module, layers: Sequence[nn.Module]) -> list[Composite]:
    """Return the composites of a model with one of the layers as a child."""
    some = set(layers)
    composites = [module for module in model.modules() if isinstance(module, Composite)]
    return [each for each in composites if not some.isdisjoint(each.children())]


def _has_moved(composite: Composite, layers: Sequence[nn.Module]) -> bool:
    """Return True if a composite has moved a weight of one of the layers."""
    for name in composite.weights_in_common():
        child, _, _ = name.rpartition(".")
        if composite.get_submodule(child) in layers:
            return True
    return False


def _packed_binding(op: CustomOp) -> Binding:
    return bind_exact(PackedLinear, PackedLinear, op.binding.enforced)


def _is_packed(layer: nn.Module) -> bool:
    return isinstance(layer, PackedLinear) and layer._packed is not None


def _expect_evaluation(model: nn.Module) -> None:
    training = []
    for path, module in model.named_modules():
        if isinstance(module, Linear) and module.training:
            training.append(path)

    if not training:
        return

    first = repr(training[0]) if training[0] else "the model itself"
    raise PackError(
        f"freeze(keep_plain=False): {len(training)} of the linear layers of "
        f"{type(model).__name__} are in training mode, the first is {first}, and packed weights "
        "cannot be trained: call model.eval() first"
    )


class _MemoryMap:
    """The memory of the parameters and buffers of a model.

    Attributes:
        homes: the name of each tensor → the address of the storage.
        residents: the address of a storage → the names of the tensors in the storage.
        together: the name of a parameter in a composite's joint memory → the names of all
            parameters there.
    """

    def __init__(self, model: nn.Module) -> None:
        self.homes: dict[str, int] = {}
        self.residents: dict[int, list[str]] = defaultdict(list)
        self.together: dict[str, frozenset[str]] = {}
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                self._add(prefix + name, tensor)
            if not isinstance(module, Composite):
                continue
            moved = frozenset(prefix + name for name in module.weights_in_common())
            for name in moved:
                self.together[name] = moved

    def _add(self, name: str, tensor: Tensor | None) -> None:
        if type(tensor) is not nn.Parameter and type(tensor) is not Tensor:
            return
        if tensor.is_cpu and tensor.layout is torch.strided:
            home = tensor.untyped_storage().data_ptr()
            self.homes[name] = home
            self.residents[home].append(name)

    def shared(self, name: str, weight: nn.Parameter) -> str | None:
        """Return the reason if a weight, or one in the same joint memory, shares memory."""
        own = self.together.get(name, frozenset((name,)))
        # A layer in several places has homes under one of its names only.
        homes = dict.fromkeys(self.homes[each] for each in sorted(own) if each in self.homes)
        for home in homes:
            others = [other for other in self.residents[home] if other not in own]
            if others:
                return f"it shares memory with {others[0]}"

        if name not in self.together and weight.untyped_storage().nbytes() > weight.nbytes:
            return "it is part of a larger memory"
        return None


def _reason_to_stay_plain(path: str, layer: nn.Linear, memory: _MemoryMap) -> str | None:
    """Return the reason why a layer keeps its plain weight, or ``None``."""
    reason = packed_linear.missing() or _foreign(layer)
    if reason is not None or _is_packed(layer):
        return reason

    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is no parameter"

    name = f"{path}.weight" if path else "weight"
    reason = obstacle(weight) or memory.shared(name, weight)
    if reason is not None or packed_linear.pays_packed(weight):
        return reason
    return f"packing never pays here for {weight.numel():,} elements of {weight.dtype}"


def _foreign(layer: nn.Linear) -> str | None:
    """Return the reason if the class of a layer, or the forward, is not opgraft's own."""
    if not isinstance(layer, Linear):
        return "it is no op: opgraft.graft makes it one"
    if type(layer) is not layer.binding.specialisation:
        return "its class was derived from the op by other code, such as a parametrization"
    if "forward" in vars(layer):
        return "its forward was set on the instance"
    if layer.op_class not in (Linear, PackedLinear):
        hint = _OWN if layer.binding.replacement.target is Linear else ""
        return f"its class is {layer.op_class.__qualname__} of {served_by(layer)}{hint}"

    for binding in (layer.binding, _packed_binding(layer)):
        winner = binding.kernel.winner
        if winner.method != Linear.forward_cpu.__name__:
            return f"its kernel is {winner} under the settings that hold here"
    return None
