"""Put layers of ours into a model of transformers.

The config's tensor-parallel plan tells the parallel layers. The other layers are replicated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from opgraft.grafting.obstacles import read_by_parents
from opgraft.grafting.report import LeftAlone
from opgraft.models.description import joined
from opgraft.models.transformers_experts import ExpertLayers
from opgraft.ops.embedding import ParallelLMHead, VocabParallelEmbedding
from opgraft.ops.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from opgraft.ops.linear.parallel import LinearBase
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.moe.fused import FusedMoE
from opgraft.registry.adapter import LeaveAlone
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_GATHERED = (ColumnParallelLinear, {"gather_output": True})
_SPLITTING = (RowParallelLinear, {"input_is_parallel": False})
_TIED_TO_ANOTHER_KIND = (
    "embedding and output layer share a weight, and one of them is of another kind: whole"
)
STYLES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = MappingProxyType(
    {
        "colwise": (ColumnParallelLinear, {}),
        "colwise_gather_output": _GATHERED,
        "colwise_rep": _GATHERED,
        "rowwise": (RowParallelLinear, {}),
        "rowwise_split_input": _SPLITTING,
        "rowwise_rep": _SPLITTING,
    }
)
"""Style of a linear layer in plans of transformers → class with the same effect, options."""

WHOLE = ("replicate", "replicated_with_grad_allreduce", "sequence_parallel")
"""Styles with the whole weight on every rank."""


class ParametersOnMeta(TorchFunctionMode):
    """Gives tensors of ``torch.empty`` no memory, such as the parameters of a new layer.

    Constructors compute tables by other functions. Tables therefore keep their numbers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        return func(*args, **options)


def _pattern(path: str) -> str:
    """Return a path as plans have it, with ``*`` for the number of a layer."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


@dataclass(frozen=True)
class Cut:
    """One layer of the model that became one of ours."""

    path: str
    source: str
    layer: str


@dataclass(eq=False)
class Replacer:
    """Replaces the linear layers and embeddings of a model without memory.

    Attributes:
        model: the model of transformers.
        plan: pattern of a path → style: ``base_model_tp_plan`` with the paths of the whole model.
        kept_whole: path of a module → the reason why the layers below are not cut.
        quant_config: chooses the weight methods.
        prefix: the path of the model in a larger one.
        untouched: module → the reason why the module stays.
        cuts: the modules that were replaced.
        left: the modules that stay, or are whole though the plan cuts them.
        experts_paths: paths of the layers of experts, once they are replaced.
    """

    model: nn.Module
    plan: Mapping[str, str]
    kept_whole: Mapping[str, str]
    quant_config: QuantizationConfig | None
    prefix: str
    untouched: dict[nn.Module, str] = field(init=False)
    experts_paths: list[str] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    left: list[LeftAlone] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.untouched = read_by_parents(self.model)

    def style(self, path: str) -> str | None:
        """Return the plan's style for a module or a parameter."""
        return self.plan.get(_pattern(path))

    def is_cut(self, path: str) -> bool:
        """Return True if a rank has a part only of the outputs of a projection in the module."""
        module = self.model.get_submodule(path)
        if self._whole_because(path) is not None:
            return False
        return any(self.style(f"{path}.{name}") == "colwise" for name, _ in module.named_children())

    def linears(self) -> None:
        """Replace every ``nn.Linear``. Report layers that stay whole though the plan cuts them."""
        for path, module in list(self.model.named_modules()):
            if type(module) is nn.Linear and module not in self.untouched:
                self.put(path, module, self._linear(path, module))
        for pattern, style in self.plan.items():
            if self._is_served(pattern, style):
                continue
            reason = f"the style {style!r} is not served: whole on every rank"
            self.left.append(LeftAlone(pattern, "plan", reason))

    def _is_served(self, pattern: str, style: str) -> bool:
        """Return True if the style of a pattern does not leave weights whole on every rank."""
        # Layers of experts share the weights themselves.
        served = {_pattern(path) for path in self.experts_paths}
        if {pattern, pattern.rpartition(".")[0]} & served:
            return True
        # embeddings() replaces the embedding, whatever its style is.
        return style in STYLES or style in WHOLE or style.startswith("embedding")

    def experts(self, choices: Mapping[str, int], layers: ExpertLayers) -> None:
        """Replace modules of experts. Report each module that stays.

        Args:
            choices: path of a module of experts → experts of a token.
            layers: makes the layers.
        """
        modules = dict(self.model.named_modules())
        for path, top_k in choices.items():
            # Other stages of a pipeline have the other modules.
            module = modules.get(path)
            if module is None:
                continue
            try:
                layer = self._experts_layer(path, module, top_k, layers)
            except LeaveAlone as reason:
                self.left.append(LeftAlone(path, type(module).__name__, str(reason)))
                continue
            self.put(path, module, layer)
            self.experts_paths.append(path)

    def _experts_layer(
        self, path: str, module: nn.Module, top_k: int, layers: ExpertLayers
    ) -> nn.Module:
        """Return the layer for a module of experts.

        Raises:
            LeaveAlone: the module has to stay.
        """
        if module in self.untouched:
            raise LeaveAlone(self.untouched[module])
        layer = layers.layer(module, top_k, joined(self.prefix, path))
        if layer is None:
            raise LeaveAlone("its parameters are not those of experts")
        return layer

    def _linear(self, path: str, linear: nn.Linear) -> nn.Module:
        served = STYLES.get(self.style(path) or "")
        reason = self._whole_because(path.rpartition(".")[0])
        cls: type[nn.Module] = ReplicatedLinear
        options: Mapping[str, Any] = {}
        if served is not None and reason:
            remark = f"whole on every rank: {reason}"
            self.left.append(LeftAlone(path, type(linear).__name__, remark))
        elif served is not None:
            cls, options = served
        return cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            params_dtype=linear.weight.dtype,
            quant_config=self.quant_config,
            prefix=joined(self.prefix, path),
            return_bias=False,
            **options,
        )

    def _whole_because(self, parent: str) -> str | None:
        """Return the reason why layers below ``parent`` are not cut; ``None`` if they may be cut.

        Layers share a cut: if one of them cannot be cut, none is cut.
        """
        if parent in self.kept_whole:
            return self.kept_whole[parent]
        module = self.model.get_submodule(parent)
        names = [*dict(module.named_children()), *module._parameters]
        styles = {self.style(joined(parent, name)) for name in names}
        unserved = styles - {None, *STYLES, *WHOLE}
        if not unserved:
            return None
        return f"the plan has {', '.join(map(repr, unserved))} beside it"

    def embeddings(self, embedding: Any, head: Any) -> None:
        """Replace the embedding of ids, and the output layer if it is a child of the model itself.

        Args:
            embedding: the embedding, or ``None``.
            head: the output layer, or ``None``.
        """
        are_tied = head is not None and embedding is not None and head.weight is embedding.weight
        paths = {module: path for path, module in self.model.named_modules()}
        # A subclass may scale or normalise.
        is_plain = type(embedding) is nn.Embedding
        # ``TransformersForCausalLM`` looks for the head among the model's own children.
        is_outer = type(head) is nn.Linear and "." not in paths[head]
        if are_tied and not (is_plain and is_outer):
            self.untouched[head] = _TIED_TO_ANOTHER_KIND
            self.untouched[embedding] = _TIED_TO_ANOTHER_KIND
        self._report_untouched(paths, embedding, head)
        replaced = None
        if is_plain and embedding not in self.untouched:
            path = paths[embedding]
            replaced = self._over_vocabulary(VocabParallelEmbedding, path, embedding.weight)
            self.put(path, embedding, replaced)
        if is_outer and head not in self.untouched:
            self._replace_head(paths[head], head, replaced if are_tied else None)

    def _replace_head(self, path: str, head: Any, tied: Any) -> None:
        """Replace the output layer, with the weight of the embedding ``tied`` if there is one."""
        has_bias = head.bias is not None
        made: Any = self._over_vocabulary(ParallelLMHead, path, head.weight, bias=has_bias)
        if tied is not None:
            made = made.tie_weights(tied)
        self.put(path, head, made)

    def _report_untouched(self, paths: Mapping[Any, str], *modules: nn.Module | None) -> None:
        for module in modules:
            if module is not None and module in self.untouched:
                reason = self.untouched[module]
                self.left.append(LeftAlone(paths[module], type(module).__name__, reason))

    def _over_vocabulary(
        self, cls: type[nn.Module], path: str, weight: Tensor, **options: Any
    ) -> nn.Module:
        """Make a layer with a weight ``[vocab_size, hidden_size]``."""
        return cls(
            *weight.shape,
            params_dtype=weight.dtype,
            quant_config=self.quant_config,
            prefix=joined(self.prefix, path),
            **options,
        )

    def put(self, path: str, module: nn.Module, layer: nn.Module) -> None:
        """Replace a module by a layer, and note the replacement."""
        parent, _, name = path.rpartition(".")
        self.model.get_submodule(parent)._modules[name] = layer
        self.cuts.append(Cut(path, type(module).__name__, type(layer).__name__))


def materialise(model: nn.Module) -> Iterator[str]:
    """Give memory to parameters and buffers without memory.

    Yields:
        The names of non-persistent buffers: no tensor of the checkpoint fills such a buffer.
    """
    # The model is only described.
    if torch.get_default_device().type == "meta":
        return
    # Tied parameters stay tied.
    made: dict[Tensor, Tensor] = {}
    for path, module in model.named_modules():
        # Our layers have memory. Weights to quantize on loading get memory by their loader.
        if isinstance(module, (LinearBase, FusedMoE)):
            continue
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    made[tensor] = _with_memory(tensor)
                registry[name] = made[tensor]
                if name in module._non_persistent_buffers_set:
                    yield f"{path}.{name}"


def _with_memory(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device=torch.get_default_device())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, False)
    return empty
