"""``PackableLayer``, what a layer is whose weight may be held packed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from opgraft.compat import packed_linear as onednn
from opgraft.errors import WeightError
from opgraft.ops.linear import packed_only
from opgraft.ops.linear.packed_only import PackedWeight
from opgraft.ops.weights import set_weight_attrs
from torch import Tensor, nn

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True)
class Beside:
    """The attributes of a parameter beside its values, which a packed weight has not."""

    requires_grad: bool
    attributes: Mapping[str, Any]


class PackableLayer(nn.Module):
    """A layer whose ``weight`` may be held packed, and then is not a parameter.

    ``weight`` rebuilds the plain weight then, each time that it is read: what is written to that is lost. In a
    ``state_dict``, copies and files it is plain. ``.to()`` and ``load_state_dict`` unpack it and pack it anew.
    """

    packs_always: ClassVar[bool] = False
    """The layer is packed whenever that can be, even where it was not before."""
    _packed: PackedWeight | None = None
    _beside: Beside

    @property
    def weight(self) -> Tensor:
        """The plain weight: a parameter of its own memory, which requires no gradient while the layer is packed."""
        packed = self._packed
        if packed is None:
            held: Any = self.__dict__.get("weight")
            own: Any = (
                self.__getattr__("weight") if held is None else held
            )  # past this property, to the parameters
            return own  # torch says: a tensor or a module
        rebuilt = packed_only.dense(packed)
        if torch.compiler.is_dynamo_compiling():
            return rebuilt
        parameter = nn.Parameter(rebuilt, requires_grad=False)
        if "weight_loader" in self._beside.attributes:
            set_weight_attrs(parameter, {"weight_loader": _refuse_loading})
        return parameter

    @weight.setter
    def weight(self, value: Tensor) -> None:
        self.__dict__["weight"] = value  # no parameter, as weight methods may hold one

    def hold_packed(self) -> None:
        """Hold the weight packed only, where that can be."""
        weight = self._parameters.get("weight")
        if weight is None or obstacle(weight) is not None:
            return
        beside = Beside(weight.requires_grad, dict(vars(weight)))
        self.__dict__.update(_packed=PackedWeight(weight), _beside=beside)
        del self._parameters["weight"]

    def release_weights(self) -> None:
        """Hold the weight as a parameter again, where it was among the others."""
        if self._packed is None:
            return
        self._put(self._packed.dense())
        del self._packed, self._beside

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight" or self._packed is None:
            return super().__setattr__(name, value)
        self.release_weights()
        try:
            super().__setattr__(name, value)
        except TypeError:  # a plain layer refuses it, too
            self.hold_packed()
            raise

    def _put(self, weight: Tensor) -> None:
        """Make a weight the first of the parameters, in the same dictionary, which a grafted module shares."""
        parameter = nn.Parameter(weight, self._beside.requires_grad)
        vars(parameter).update(self._beside.attributes)
        others = {name: value for name, value in self._parameters.items() if name != "weight"}
        self._parameters.clear()
        self._parameters.update(weight=parameter, **others)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Make the weight a parameter inside, and pack it again afterwards, where it was packed and that can be."""
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
            destination[f"{prefix}weight"] = self.weight if keep_vars else self._packed.dense()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            self.release_weights()
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        else:
            with self.plain():
                super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackableLayer:
        """Copy, and pack the copy before the next layer is copied, so that plain weights do not add up."""
        reduced: Any = self.__reduce_ex__(4)
        make, arguments, state, *_ = reduced
        weight = state.pop("_packed")
        copied: PackableLayer = make(*arguments)
        memo[id(self)] = copied
        copied.__setstate__({**copy.deepcopy(state, memo), "_packed": weight})
        return copied

    def __copy__(self) -> PackableLayer:
        """Copy with a dictionary of parameters of its own, as either may be unpacked without the other."""
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
        "a weight that is packed was to be loaded, by a copy that the layer does not compute with: call "
        "opgraft.unpack(model) before its weights are loaded anew, or use load_state_dict"
    )


def obstacle(weight: nn.Parameter) -> str | None:
    """Say why a weight cannot be held packed only, or return ``None``."""
    if type(weight) is not nn.Parameter:
        return f"it is a {type(weight).__name__}, expected a torch.nn.Parameter"
    if weight.is_inference():
        return "it was made in inference mode"
    if weight.layout is not torch.strided or not weight.is_cpu or weight.dim() != 2:
        return "it is no matrix in the memory of the CPU"
    if (reason := onednn.missing(weight.dtype)) is not None:
        return reason
    if not weight.numel():
        return "it is empty"
    if not weight.is_contiguous():
        return f"it is strided, {weight.stride()}"
    if weight.is_shared():  # type: ignore[no-untyped-call]  # torch leaves it so
        return "processes share its memory"
    if weight.grad is not None or any(getattr(weight, hooks) for hooks in _HOOKS):
        return "it has a gradient, or hooks that wait for one"
    return None
