"""Layers of experts, with the router that chooses them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from opgraft.binding.custom_op import CustomOp, PluggableLayer
from opgraft.distributed import (
    get_dp_group,
    get_ep_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from opgraft.errors import LayerError
from opgraft.ops.checks import expect_last_dim, expect_positive, expect_size, values_are_known
from opgraft.ops.linear.quantization_config import QuantizationConfig, chosen_method
from opgraft.ops.linear.sharding import divide
from opgraft.ops.moe.fused.exchange import ExpertExchange
from opgraft.ops.moe.fused.functional import ACTIVATIONS, expect_ids
from opgraft.ops.moe.fused.loading import ExpertLoader, Part, checkpoint_parts
from opgraft.ops.moe.fused.methods import (
    FusedMoEConfig,
    FusedMoEMethodBase,
    UnquantizedFusedMoEMethod,
    with_shared_experts,
)
from opgraft.ops.moe.fused.placement import ExpertPlacement
from opgraft.ops.moe.routing import GroupedTopk
from opgraft.ops.prefixes import claim_prefix
from opgraft.ops.weights import LoadedTensor, set_weight_attrs
from opgraft.registry.state import host_state
from torch import Tensor, nn

RoutingFunction: TypeAlias = Callable[[Tensor, Tensor, int, bool], tuple[Tensor, Tensor]]
"""Called with hidden states, logits, ``top_k`` and ``renormalize``; returns weights and ids ``[tokens, top_k]``."""


@CustomOp.register("fused_moe")
class FusedMoE(PluggableLayer):
    """Experts, of which each token visits the ``top_k`` that its router likes best (arXiv:1701.06538).

    ``Σ weight · w2[e] · act(w13[e] · x)`` over the experts ``e`` of a token. The router scores by softmax (Mixtral,
    arXiv:2401.04088) or by sigmoid, with a bias that counts in the choice only, and may keep to groups of experts
    (DeepSeek-V3, arXiv:2412.19437). Tensor-parallel ranks have a part of every expert, or with ``ep_size`` all ranks
    of the expert group have some experts each. Tokens are then sent to those of other data replicas and back; tensor
    ranks, which have the same tokens, add what their experts make of them.

    Shapes:
        hidden states ``[..., hidden_size]`` and logits ``[..., num_experts]`` to ``[..., hidden_size]``.

    Args:
        num_experts: in all.
        top_k: experts of each token.
        hidden_size: elements of a token.
        intermediate_size: elements between the two products, of all ranks.
        params_dtype: of what is not quantized; torch's default dtype if not given.
        reduce_results: add what the tensor-parallel ranks have.
        renormalize: scale the weights of a token to a sum of one.
        use_grouped_topk: choose from the best ``topk_group`` of ``num_expert_group`` groups of neighbours only.
        num_expert_group: see ``use_grouped_topk``.
        topk_group: see ``use_grouped_topk``.
        quant_config: chooses the weight method.
        tp_size: how many ranks share each expert, if not those of the tensor group.
        prefix: the layer's name in the checkpoint.
        custom_routing_function: chooses in place of the router.
        scoring_func: ``"softmax"`` over the experts, or ``"sigmoid"``.
        routed_scaling_factor: multiplies the weights, last.
        e_score_correction_bias: ``[num_experts]``, added to the scores where experts are compared.
        apply_router_weight_on_input: weigh the input of the one expert, not its output (Llama 4).
        activation: as ``opgraft.functional.fused_experts`` has it.
        has_bias: whether both products have one.
        shared_experts: visited by every token; what it returns is added before ranks add theirs.
        transposed_checkpoint: checkpoints have the weights of all experts in one as ``[experts, in, out]``.
        ep_size: how many ranks share the experts: those of the expert group, or 1 where each has a part of all.
        enable_eplb: count the tokens that experts compute, for a balancer.
        num_redundant_experts: places for experts beyond one for each, of all ranks.
        router_logits_dtype: logits are converted to this dtype before experts are chosen.

    Attributes:
        quant_method: holds the weights; the unquantized one as ``w13_weight`` and ``w2_weight``.
        placement: where experts are; ``None`` where each rank has a part of all.
        local_experts: the experts of this rank, by their numbers in the checkpoint, in the order of their places.
        loader: loads this rank's part of experts' weights.
        weight_loader: method; loads this rank's part of a parameter, of all experts or of one.

    Raises:
        LayerError: more experts are asked for than there are, groups do not divide, the ranks do not, or ``ep_size`` is
            not the size of the expert group.
        ValueError: a size is not positive, or the router has no such ``scoring_func``.
    """

    packed_modules_mapping: ClassVar[Mapping[str, Mapping[str, int | None]]] = {
        "gate_up_proj": {"gate_proj": 0, "up_proj": 1, "w1": 0, "w3": 1},
        "down_proj": {"w2": None},
    }
    quant_method: FusedMoEMethodBase

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        quant_config: QuantizationConfig | None = None,
        tp_size: int | None = None,
        prefix: str = "",
        custom_routing_function: RoutingFunction | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: str = "silu",
        has_bias: bool = False,
        shared_experts: nn.Module | None = None,
        transposed_checkpoint: bool = False,
        ep_size: int = 1,
        enable_eplb: bool = False,
        num_redundant_experts: int = 0,
        router_logits_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        claim_prefix(prefix, self)
        if use_grouped_topk and (num_expert_group is None or topk_group is None):
            raise LayerError(
                f"{self.name}: use_grouped_topk is set, num_expert_group is {num_expert_group} and topk_group "
                f"{topk_group}: take both from the model's config"
            )
        lengths = {
            "num_experts": num_experts,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
        }
        for what, length in lengths.items():
            expect_size("fused_moe", what, length)
            expect_positive("fused_moe", what, length)
        groups, kept = (num_expert_group or 0, topk_group or 0) if use_grouped_topk else (0, 0)
        self._expect_choices(
            num_experts, top_k, groups, kept, activation, apply_router_weight_on_input
        )
        if e_score_correction_bias is not None and e_score_correction_bias.shape != (num_experts,):
            raise LayerError(
                f"{self.name}: e_score_correction_bias has shape {tuple(e_score_correction_bias.shape)}, expected "
                f"[{num_experts}], a number for each expert"
            )
        self.num_experts, self.top_k = num_experts, top_k
        self.renormalize, self.reduce_results = renormalize, reduce_results
        self.router = GroupedTopk(
            top_k, renormalize, groups, kept, scoring_func, routed_scaling_factor
        )
        self.router_logits_dtype = router_logits_dtype
        self.custom_routing_function = custom_routing_function
        self.e_score_correction_bias = e_score_correction_bias
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.shared_experts, self.ep_size, self.records = shared_experts, ep_size, enable_eplb
        self.placement = self._placed(num_experts, num_redundant_experts)
        self.exchange = (
            ExpertExchange(get_dp_group())
            if ep_size > get_tensor_model_parallel_world_size()
            else None
        )
        self._columns = get_tensor_model_parallel_world_size()
        self.tp_size = (
            (1 if self.placement is not None else self._columns) if tp_size is None else tp_size
        )
        if self.tp_size not in (1, self._columns):
            raise LayerError(
                f"{self.name}: tp_size is {tp_size}, and the tensor group of this process has {self._columns}: give 1, "
                "or as many, as opgraft.distributed.init_distributed made them"
            )
        self.tp_rank = get_tensor_model_parallel_rank() if self.tp_size > 1 else 0
        part = divide(intermediate_size, self.tp_size, f"{self.name}: the intermediate size")
        self.moe_config = FusedMoEConfig(
            num_experts, top_k, hidden_size, part, activation, has_bias, params_dtype
        )
        sizes = (self.local_experts, num_experts, part, self.tp_rank, self.tp_size)
        self.loader = ExpertLoader(
            *sizes, activation == "swigluoai", transposed_checkpoint, self.name
        )
        self._by_expert: set[str] = set()
        self._create_weights(quant_config)

    def _placed(self, num_experts: int, redundant: int) -> ExpertPlacement | None:
        """Place the experts, if ranks share them."""
        group = get_ep_group()
        if self.ep_size not in (1, group.world_size):
            raise LayerError(
                f"{self.name}: ep_size is {self.ep_size}, and the expert group of this process has {group.world_size} "
                "ranks: give 1, or as many, as opgraft.distributed.init_distributed made them"
            )
        if self.ep_size == 1:
            if redundant:
                raise LayerError(
                    f"{self.name}: num_redundant_experts is {redundant}, expected 0 where ep_size is 1"
                )
            return None
        return ExpertPlacement(num_experts, redundant, self.ep_size, group.rank_in_group, self.name)

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The experts of this rank, by their numbers in the checkpoint."""
        return tuple(range(self.num_experts)) if self.placement is None else self.placement.local

    def parts_elsewhere(self) -> frozenset[str]:
        """Return the names below this layer of what a checkpoint has for other ranks."""
        return (
            frozenset() if self.placement is None else frozenset(map(str, self.placement.elsewhere))
        )

    def _create_weights(self, quant_config: QuantizationConfig | None) -> None:
        moe = self.moe_config
        chosen: Any = chosen_method(self, quant_config, self.prefix)
        self.quant_method = UnquantizedFusedMoEMethod(moe) if chosen is None else chosen
        sizes = (len(self.local_experts), moe.hidden_dim, moe.intermediate_size_per_partition)
        dtype = moe.in_dtype or torch.get_default_dtype()
        self.quant_method.create_weights(self, *sizes, dtype, weight_loader=self.weight_loader)
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith(("w13_", "w2_")) and not hasattr(parameter, "checkpoint_parts"):
                set_weight_attrs(parameter, {"checkpoint_parts": {}})
                self._by_expert.add(name)
        self._name_parts()

    def _name_parts(self) -> None:
        """Say under which names a checkpoint has the parameters that are still in its form."""
        for name in self._by_expert:
            parameter: Any = self._parameters.get(name)
            if hasattr(parameter, "checkpoint_parts"):
                parameter.checkpoint_parts = checkpoint_parts(name, self.local_experts)

    def place_experts(self, experts: Sequence[int]) -> None:
        """Have tokens, and weights that are loaded, find an expert in each place of all ranks from now on.

        It moves no weights.

        Args:
            experts: the expert in each place, one rank's after the other's; every expert stands in one at least.

        Raises:
            LayerError: ranks do not share the experts.
        """
        if self.placement is None:
            raise LayerError(
                f"{self.name}: its experts are placed, and each rank has a part of all: set ep_size"
            )
        self.placement.place(experts)
        self.loader = dataclasses.replace(self.loader, experts=self.local_experts)
        self._name_parts()

    def _expect_choices(
        self, num_experts: int, top_k: int, groups: int, kept: int, activation: str, on_input: bool
    ) -> None:
        """Raise ``LayerError`` for numbers of experts that do not fit each other, or another activation."""
        candidates = num_experts
        if groups:
            if num_experts % groups or not 1 <= kept <= groups:
                raise LayerError(
                    f"{self.name}: num_expert_group is {groups} and topk_group {kept}, expected a divisor of "
                    f"{num_experts} experts and 1 to {groups}: take both from the model's config"
                )
            candidates = num_experts // groups * kept
        if not 1 <= top_k <= candidates:
            raise LayerError(
                f"{self.name}: top_k is {top_k}, expected 1 to {candidates}, the experts to choose from: take top_k "
                "and num_experts from one model's config"
            )
        if activation not in ACTIVATIONS:
            raise LayerError(
                f"{self.name}: activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}"
            )
        if on_input and top_k != 1:
            raise LayerError(
                f"{self.name}: apply_router_weight_on_input is set and top_k is {top_k}, expected 1: an input has one "
                "weight only where one expert takes it"
            )

    @property
    def name(self) -> str:
        """The layer as messages call it."""
        return (
            f"{self.op_class.__qualname__} {self.prefix!r}"
            if self.prefix
            else self.op_class.__qualname__
        )

    def weight_loader(self, param: Tensor, loaded_weight: LoadedTensor, part: Part = None) -> None:
        """Load this rank's part of a parameter.

        Args:
            param: of this layer.
            loaded_weight: of all experts ``[num_experts, out, in]``, or of one ``[out, in]``; biases without ``in``.
            part: which expert, and ``"w1"``, ``"w2"`` or ``"w3"`` of it; ``None`` for all experts.

        Raises:
            WeightError: it has another shape.
        """
        name = next(name for name, own in self._parameters.items() if own is param)
        self.loader.load(name, param, loaded_weight, part)

    def process_weights_after_loading(self) -> None:
        """Have the weight method bring the weights into the layout that it prefers."""
        self.quant_method.process_weights_after_loading(self)

    def select_experts(self, hidden_states: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose weights and ids, ``[tokens, top_k]``, by logits ``[tokens, num_experts]``.

        Raises:
            ValueError: logits are NaN, where the setting ``check_values`` is on; else such a token gets weights of NaN.
        """
        expect_last_dim("fused_moe", "router_logits", router_logits, self.moe_config.num_experts)
        if self.router_logits_dtype is not None:
            router_logits = router_logits.to(self.router_logits_dtype)
        if (
            values_are_known(router_logits)
            and host_state().checks_values()
            and bool(router_logits.isnan().any())
        ):
            raise ValueError(
                f"fused_moe: router_logits of {self.name} are NaN for tokens "
                f"{router_logits.isnan().any(-1).nonzero().flatten().tolist()[:10]}, expected numbers: see what its "
                "hidden states are"
            )
        if self.custom_routing_function is not None:
            return self.custom_routing_function(
                hidden_states, router_logits, self.top_k, self.renormalize
            )
        chosen: tuple[Tensor, Tensor] = self.router(
            hidden_states, router_logits, self.e_score_correction_bias
        )
        return chosen

    def forward(
        self, hidden_states: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        """Return what the chosen experts make of each token; ``input_ids`` is not read."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, ids = self.select_experts(x, router_logits.reshape(-1, router_logits.shape[-1]))
        return self._apply_experts(hidden_states, weights, ids)

    def _apply_experts(self, hidden_states: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        expect_last_dim("fused_moe", "hidden_states", hidden_states, self.moe_config.hidden_dim)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        given = x
        if self.apply_router_weight_on_input:
            given, weights = (x * weights).to(x.dtype), torch.ones_like(weights)
        if self.placement is None:
            output: Tensor = self.quant_method.apply(
                self, given, weights, ids, self.shared_experts, x
            )
        else:
            routed = self._by_placed_experts(self.placement, given, weights, ids)
            output = with_shared_experts(routed, x, self.shared_experts, None)
        if self.reduce_results and max(self.tp_size, self.ep_size) > 1:
            output = tensor_model_parallel_all_reduce(output)
        return output.reshape(hidden_states.shape)

    def _by_placed_experts(
        self, placement: ExpertPlacement, x: Tensor, weights: Tensor, ids: Tensor
    ) -> Tensor:
        """Return what the experts of this tensor rank, here and in other data replicas, make of each token.

        Raises:
            ValueError: an id names no expert.
        """
        expect_ids(self.name, ids, placement.num_experts)
        places = placement.choose(ids)
        owners, local = places // placement.per_rank, places % placement.per_rank
        replicas, column = owners // self._columns, owners % self._columns
        mine = (places >= 0) & (column == placement.rank % self._columns)
        if self.exchange is None:
            return self._by_local_experts(x, weights, torch.where(mine, local, -1).to(torch.int32))
        return self.exchange(
            x, weights, torch.where(mine, replicas, -1), local, self._by_local_experts
        )

    def _by_local_experts(self, x: Tensor, weights: Tensor, local: Tensor) -> Tensor:
        if self.records and self.placement is not None:
            self.placement.record(local)
        output: Tensor = self.quant_method.apply(self, x, weights, local)
        return output

    def extra_repr(self) -> str:
        moe = self.moe_config
        ranks = f"tp={self.tp_size}, ep={self.ep_size}"
        return f"{moe.num_experts}, top_k={self.top_k}, {moe.hidden_dim}, {ranks}, {moe.activation}"


@CustomOp.register("transformers_fused_moe")
class TransformersFusedMoE(FusedMoE):
    """Experts that the caller has chosen, as the blocks of transformers do; constructed as ``FusedMoE``.

    It is for models that construct it, with weights that it loads. ``graft`` puts ``experts`` in the place of experts
    that a model has, which a replacement of this op does not reach: replace ``UnquantizedFusedMoEMethod``, by which
    both compute with weights that are not quantized.

    Args:
        moe_state: gets the chosen ids as ``topk_ids`` at each call, for callers that read them there.
    """

    def __init__(self, *args: Any, moe_state: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.moe_state = moe_state

    def forward(  # type: ignore[override]  # the choice in place of logits
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, **ignored: Any
    ) -> Tensor:
        """Return what the experts ``topk_ids`` make of each token, by ``topk_weights``: both ``[tokens, top_k]``."""
        if self.moe_state is not None:
            self.moe_state.topk_ids = topk_ids
        return self._apply_experts(hidden_states, topk_weights, topk_ids)


TransformersMoERunner = TransformersFusedMoE
"""The name that newer versions of vLLM have for it."""
