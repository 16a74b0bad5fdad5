"""Replacing plain weights by packed ones in place, and putting them back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from opgraft.binding.arguments import expect_module
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.specialisation import Binding, bind_exact
from opgraft.errors import PackError
from opgraft.ops.composites.composite import Composite, served_by
from opgraft.ops.linear import packed as packed_linear
from opgraft.ops.linear.modules import Linear
from opgraft.ops.linear.pack_report import Packed, PackReport, Plain
from opgraft.ops.linear.packable import PackableLayer, obstacle
from opgraft.ops.linear.packed_layer import PackedLinear
from torch import Tensor, nn

_OWN = ": graft under OpgraftConfig(providers={'linear': 'opgraft'}) to pack it"


class _Places:
    """In which memory the parameters and buffers of a model lie.

    Attributes:
        homes: the name of each → where its storage begins.
        residents: where a storage begins → the names of those that lie in it.
        together: the name of a parameter that a composite has moved → the names of all that it moved.
    """

    def __init__(self, model: nn.Module) -> None:
        self.homes: dict[str, int] = {}
        self.residents: dict[int, list[str]] = defaultdict(list)
        self.together: dict[str, frozenset[str]] = {}
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if (
                    type(tensor) in (nn.Parameter, Tensor)
                    and tensor.is_cpu
                    and tensor.layout is torch.strided
                ):
                    self.homes[prefix + name] = home = tensor.untyped_storage().data_ptr()
                    self.residents[home].append(prefix + name)
            if isinstance(module, Composite):
                moved = frozenset(prefix + name for name in module.weights_in_common())
                self.together.update(dict.fromkeys(moved, moved))

    def shared(self, name: str, weight: nn.Parameter) -> str | None:
        """Say with whom a weight, or one that would have to be moved with it, shares memory."""
        own = self.together.get(name, frozenset((name,)))
        # A layer that also stands elsewhere goes by the name that it has there.
        for home in dict.fromkeys(self.homes[each] for each in sorted(own) if each in self.homes):
            if others := [other for other in self.residents[home] if other not in own]:
                return f"it shares memory with {others[0]}"
        alone = name not in self.together and weight.untyped_storage().nbytes() > weight.nbytes
        return "it is part of a larger memory" if alone else None


def pack(model: nn.Module) -> PackReport:
    """Have the ``Linear`` ops of ``model``, itself perhaps, hold their weights packed only, in place.

    The plain weights take no memory then. The ops run packed for any number of rows; a call that needs the plain
    weight rebuilds it for as long as it lasts: see ``opgraft.ops.linear.packed_only``. Weights are no parameters while
    they are packed, and so they are frozen and ``parameters()`` does not list them; ``state_dict``,
    ``load_state_dict``, ``.to()``, copies and files are as before.

    Layers that share one storage, so that one call computes them, are taken apart, and ``unpack`` joins them again.
    Weights stay plain that share memory with any other parameter or buffer of the model, that cannot be packed, or for
    which packing never pays here, and so do those of ops with a kernel that is not opgraft's own. Where weights cannot
    be packed at all, nothing is changed.

    Returns:
        Which layers are packed now, and which are not and why. Called again, the same.

    Raises:
        PackError: a ``Linear`` op is in training mode; nothing is changed.
        OpgraftError: as constructing an op would; nothing is changed.
    """
    expect_module("pack", model)
    _expect_evaluation(model)
    places = _Places(model)
    layers = [
        (path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    reasons = {path: _reason(path, layer, places) for path, layer in layers}
    packable = [layer for path, layer in layers if reasons[path] is None]
    composites = _composites_over(model, packable)
    for composite in composites:
        if _has_moved(composite, packable):
            composite.release_weights()
    try:
        sizes = {layer: _change_over(layer) for layer in packable}
    finally:
        for composite in composites:
            composite.process_weights_after_loading()
    return PackReport(
        tuple(Packed(path, sizes[layer]) for path, layer in layers if layer in sizes),
        tuple(
            Plain(path, type(layer).__name__, reason)
            for path, layer in layers
            if (reason := reasons[path])
        ),
    )


def unpack(model: nn.Module) -> None:
    """Have what ``pack``, or loading, has packed below ``model`` hold plain weights again, with every bit as it was.

    The weights are parameters again, new objects that require a gradient if the former did. A model without packed
    weights stays as it is.

    Raises:
        PackError: other code derived a class from that of a packed layer; nothing is changed.
        OpgraftError: as constructing an op would; nothing is changed.
    """
    expect_module("unpack", model)
    for composite in _composites_over(model, restore(model)):
        composite.process_weights_after_loading()
    for layer in model.modules():
        if isinstance(layer, PackableLayer):
            layer.release_weights()


def restore(model: nn.Module) -> Sequence[nn.Module]:
    """Unpack as ``unpack`` does, save that layers are not joined again; return those that were packed."""
    found = [
        (path, module) for path, module in model.named_modules() if isinstance(module, PackedLinear)
    ]
    for path, layer in found:
        if type(layer) is not layer.binding.specialisation:
            raise PackError(
                f"unpack: {type(layer).__name__} at {path!r} was derived from a packed layer by other code, such as a "
                "parametrization: take that back first"
            )
    plans = [(layer, bind_exact(Linear, Linear, layer.binding.enforced)) for _, layer in found]
    for layer, binding in plans:
        layer.release_weights()
        layer._adopt(binding)
    return [layer for _, layer in found]


def _composites_over(model: nn.Module, changed: Sequence[nn.Module]) -> list[Composite]:
    """Return the composites of ``model`` of which one of the ``changed`` layers is a child."""
    some = set(changed)
    composites = [module for module in model.modules() if isinstance(module, Composite)]
    return [layer for layer in composites if not some.isdisjoint(layer.children())]


def _has_moved(composite: Composite, layers: Sequence[nn.Module]) -> bool:
    """Tell whether a composite has put the weight of one of its children, among ``layers``, where it wants it."""
    names = composite.weights_in_common()
    return any(composite.get_submodule(name.rpartition(".")[0]) in layers for name in names)


def _change_over(layer: Any) -> int:
    """Pack a layer that may be, and say how many bytes its plain weight takes."""
    if not isinstance(layer, PackedLinear):
        layer._adopt(_binding_for(layer))
    layer.process_weights_after_loading()
    size: int = layer._packed.nbytes
    return size


def _binding_for(op: CustomOp) -> Binding:
    return bind_exact(PackedLinear, PackedLinear, op.binding.enforced)


def _expect_evaluation(model: nn.Module) -> None:
    training = [
        path
        for path, module in model.named_modules()
        if isinstance(module, Linear) and module.training
    ]
    if training:
        first = repr(training[0]) if training[0] else "the model itself"
        raise PackError(
            f"pack: {len(training)} of the linear layers of {type(model).__name__} are in training mode, the first is "
            f"{first}, and packed weights cannot be trained: call model.eval() first"
        )


def _reason(path: str, layer: nn.Linear, places: _Places) -> str | None:
    """Say why a layer keeps its plain weight, or return ``None``."""
    if (missing := packed_linear.missing()) is not None:
        return missing
    reason = _foreign(layer)
    if reason is not None or (isinstance(layer, PackedLinear) and layer._packed is not None):
        return reason
    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is no parameter"
    return (
        obstacle(weight) or places.shared(f"{path}.weight".lstrip("."), weight) or _useless(weight)
    )


def _foreign(layer: nn.Linear) -> str | None:
    """Say why the class of a layer, or its forward, is not opgraft's own, or return ``None``."""
    if not isinstance(layer, Linear):
        return "it is no op: opgraft.graft makes it one"
    if type(layer) is not layer.binding.specialisation:
        return "its class was derived from the op by other code, such as a parametrization"
    if "forward" in vars(layer):
        return "its forward was set on the instance"
    if layer.op_class not in (Linear, PackedLinear):
        replaced = layer.binding.replacement.target is Linear
        return f"its class is {layer.op_class.__qualname__} of {served_by(layer)}{_OWN if replaced else ''}"
    for binding in (layer.binding, _binding_for(layer)):
        if binding.kernel.winner.method != Linear.forward_cpu.__name__:
            return f"its kernel is {binding.kernel.winner} under the settings that hold here"
    return None


def _useless(weight: nn.Parameter) -> str | None:
    if packed_linear.pays_packed(weight):
        return None
    return f"packing never pays here for {weight.numel():,} elements of {weight.dtype}"
