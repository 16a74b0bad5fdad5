"""Layers of ours in a model of transformers: parallel ones by the plan that its config has, the rest replicated."""

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
"""Styles of linear layers in the plans of transformers, with the layers that do the same."""

WHOLE = ("replicate", "replicated_with_grad_allreduce", "sequence_parallel")
"""Styles under which every rank has the whole weight."""


class ParametersOnMeta(TorchFunctionMode):
    """Makes what ``torch.empty`` makes, as constructors make their parameters, without memory; tables are computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        return func(*args, **({**options, "device": "meta"} if func is torch.empty else options))


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
    """Replaces the linear layers and embeddings of one model, which is on meta.

    Attributes:
        model: the model of transformers.
        plan: pattern of a path → style, as ``base_model_tp_plan`` with the paths of the whole model.
        kept_whole: paths of modules whose layers are not cut, with the reason.
        quant_config: chooses the weight methods.
        prefix: the path of the model in a larger one.
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
        """Return the style that the plan has for a module or a parameter."""
        return self.plan.get(_pattern(path))

    def is_cut(self, path: str) -> bool:
        """Say whether the outputs of a projection right below a module stay cut."""
        module = self.model.get_submodule(path)
        return self._whole_because(path) is None and any(
            self.style(f"{path}.{name}") == "colwise" for name, _ in module.named_children()
        )

    def linears(self) -> None:
        """Replace every ``nn.Linear``; report those that the plan cuts and that stay whole."""
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
        return style in STYLES or style in WHOLE or style.startswith("embedding")

    def experts(self, choices: Mapping[str, int], layers: ExpertLayers) -> None:
        """Replace modules of experts; report those that compute something else.

        Args:
            choices: path of a module of experts → experts of a token.
            layers: makes the layers.
        """
        modules = dict(self.model.named_modules())
        for path, top_k in choices.items():
            # Other stages of a pipeline have the others.
            module = modules.get(path)
            if module is None or module in self.untouched:
                continue
            try:
                layer = layers.layer(module, top_k, joined(self.prefix, path))
            except LeaveAlone as reason:
                self.left.append(LeftAlone(path, type(module).__name__, str(reason)))
                continue
            if layer is not None:
                self.put(path, module, layer)
                self.experts_paths.append(path)

    def _linear(self, path: str, linear: nn.Linear) -> nn.Module:
        served = STYLES.get(self.style(path) or "")
        reason = self._whole_because(path.rpartition(".")[0])
        cls, options = (ReplicatedLinear, {}) if reason or served is None else served
        if reason and served is not None:
            self.left.append(
                LeftAlone(path, type(linear).__name__, f"whole on every rank: {reason}")
            )
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
        """Say why layers below ``parent`` are not cut: those beside them cannot be."""
        if parent in self.kept_whole:
            return self.kept_whole[parent]
        children = self.model.get_submodule(parent)
        names = [*dict(children.named_children()), *children._parameters]
        styles = {self.style(joined(parent, name)) for name in names} - {None, *STYLES, *WHOLE}
        return f"the plan has {', '.join(map(repr, styles))} beside it" if styles else None

    def embeddings(self, embedding: Any, head: Any) -> None:
        """Replace the embedding of the ids, and the output layer where it stands right below the model."""
        tied = head is not None and embedding is not None and head.weight is embedding.weight
        paths = {module: path for path, module in self.model.named_modules()}
        plain = type(embedding) is nn.Embedding
        outer = type(head) is nn.Linear and "." not in paths[head]
        if tied and not (plain and outer):
            reason = "embedding and output layer share a weight, and one of them is of another kind: whole"
            self.untouched[head] = self.untouched[embedding] = reason
        for module in filter(None, (embedding, head)):
            if module in self.untouched:
                self.left.append(
                    LeftAlone(paths[module], type(module).__name__, self.untouched[module])
                )
        replaced = None
        if plain and embedding not in self.untouched:
            replaced = self._vocabulary(VocabParallelEmbedding, paths[embedding], embedding.weight)
            self.put(paths[embedding], embedding, replaced)
        if outer and head not in self.untouched:
            made: Any = self._vocabulary(
                ParallelLMHead, paths[head], head.weight, bias=head.bias is not None
            )
            self.put(paths[head], head, made.tie_weights(replaced) if tied else made)

    def _vocabulary(
        self, cls: type[nn.Module], path: str, weight: Tensor, **options: Any
    ) -> nn.Module:
        return cls(
            *weight.shape,
            params_dtype=weight.dtype,
            quant_config=self.quant_config,
            prefix=joined(self.prefix, path),
            **options,
        )

    def put(self, path: str, module: nn.Module, layer: nn.Module) -> None:
        """Put a layer in a module's place."""
        parent, _, name = path.rpartition(".")
        self.model.get_submodule(parent)._modules[name] = layer
        self.cuts.append(Cut(path, type(module).__name__, type(layer).__name__))


def materialise(model: nn.Module) -> Iterator[str]:
    """Give memory to the parameters and buffers that have none; yield the names of buffers that nothing fills."""
    if torch.get_default_device().type == "meta":
        return  # a model that is described only
    made: dict[Tensor, Tensor] = {}
    for path, module in model.named_modules():
        # They have memory, but for a weight that is quantized as it is loaded.
        if isinstance(module, (LinearBase, FusedMoE)):
            continue
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    empty = torch.empty_like(tensor, device=torch.get_default_device())
                    made[tensor] = (
                        nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
                    )
                registry[name] = made[tensor]
                if name in module._non_persistent_buffers_set:
                    yield f"{path}.{name}"
