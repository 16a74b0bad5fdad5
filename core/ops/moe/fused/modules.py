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

__all__ = ["FusedMoE", "TransformersFusedMoE", "TransformersMoERunner"]

RoutingFunction: TypeAlias = Callable[[Tensor, Tensor, int, bool], tuple[Tensor, Tensor]]
"""Called with hidden states, logits, ``top_k`` and ``renormalize``.

Returns weights and ids, both ``[tokens, top_k]``.
"""


@CustomOp.register("fused_moe")
class FusedMoE(PluggableLayer):
    """Experts and their router: each token visits its ``top_k`` best experts (arXiv:1701.06538).

    The output of a token is ``Σ weight · w2[e] · act(w13[e] · x)`` over its experts ``e``. The
    router scores experts by softmax (Mixtral, arXiv:2401.04088) or by sigmoid. A bias may count in
    the choice alone, and the choice may keep to the best groups of experts (DeepSeek-V3,
    arXiv:2412.19437).

    By default each tensor-parallel rank holds a part of every expert. With ``ep_size``, each rank
    of the expert group holds some whole experts. Tokens then travel to the experts of other data
    replicas and back. Tensor-parallel ranks hold the same tokens, so they only sum their outputs.

    Shapes:
        hidden states ``[..., hidden_size]`` and logits ``[..., num_experts]`` to
        ``[..., hidden_size]``.

    Args:
        num_experts: the experts of all ranks.
        top_k: experts of each token.
        hidden_size: elements of a token.
        intermediate_size: elements between the two products, of all ranks.
        params_dtype: the dtype of plain parameters; torch's default dtype if not given.
        reduce_results: sum the outputs of the tensor-parallel ranks.
        renormalize: scale the weights of a token to a sum of one.
        use_grouped_topk: choose from the best ``topk_group`` of ``num_expert_group`` groups only.
            A group holds neighbours.
        num_expert_group: see ``use_grouped_topk``.
        topk_group: see ``use_grouped_topk``.
        quant_config: chooses the weight method.
        tp_size: the number of ranks that share each expert; by default the size of the tensor
            group, or 1 if ranks share whole experts.
        prefix: the layer's name in the checkpoint.
        custom_routing_function: chooses in place of the router.
        scoring_func: ``"softmax"`` over the experts, or ``"sigmoid"``.
        routed_scaling_factor: multiplies the weights, last.
        e_score_correction_bias: ``[num_experts]``, added to the scores for the choice alone.
        apply_router_weight_on_input: multiply the input of the one expert by the weight, instead
            of the output (Llama 4).
        activation: as in ``opgraft.functional.fused_experts``.
        has_bias: both products have a bias.
        shared_experts: visited by every token. The output is added before ranks sum theirs.
        transposed_checkpoint: checkpoints hold the weights of all experts in one tensor,
            ``[experts, in, out]``.
        ep_size: the number of ranks that share the experts: the size of the expert group, or 1
            if each rank holds a part of every expert.
        enable_eplb: count the tokens of each expert, for a balancer.
        num_redundant_experts: places for experts beyond one for each, of all ranks.
        router_logits_dtype: logits are converted to this dtype before the choice.

    Attributes:
        quant_method: holds the weights; if not quantized, as ``w13_weight`` and ``w2_weight``.
        placement: the place of each expert; ``None`` if each rank holds a part of every expert.
        local_experts: the experts of this rank, by their numbers in the checkpoint, in the order
            of their places.
        loader: loads this rank's part of the weights.
        weight_loader: method; loads this rank's part of a parameter, of all experts or of one.

    Raises:
        LayerError: ``top_k`` exceeds the number of experts, groups do not divide the experts,
            ranks do not divide a size, or ``ep_size`` is not the size of the expert group.
        ValueError: a size is not positive, or the router knows no such ``scoring_func``.
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

        groups, kept_groups = self._group_counts(use_grouped_topk, num_expert_group, topk_group)
        _expect_sizes(
            num_experts=num_experts, hidden_size=hidden_size, intermediate_size=intermediate_size
        )
        self._expect_top_k(top_k, num_experts, groups, kept_groups)

        self._expect_activation(activation)
        if apply_router_weight_on_input:
            self._expect_one_choice(top_k)
        self._expect_correction_bias(e_score_correction_bias, num_experts)

        self.num_experts = num_experts
        self.top_k = top_k
        self.renormalize = renormalize
        self.reduce_results = reduce_results

        self.router = GroupedTopk(
            top_k, renormalize, groups, kept_groups, scoring_func, routed_scaling_factor
        )

        self.router_logits_dtype = router_logits_dtype
        self.custom_routing_function = custom_routing_function
        self.e_score_correction_bias = e_score_correction_bias
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.shared_experts = shared_experts

        self.records = enable_eplb
        self._share_experts(ep_size, num_redundant_experts, tp_size)

        part = divide(intermediate_size, self.tp_size, f"{self.name}: the intermediate size")
        self.moe_config = FusedMoEConfig(
            num_experts, top_k, hidden_size, part, activation, has_bias, params_dtype
        )
        self.loader = self._new_loader(transposed_checkpoint)
        self._by_expert: set[str] = set()
        self._create_weights(quant_config)

    def _group_counts(
        self, is_grouped: bool, num_expert_group: int | None, topk_group: int | None
    ) -> tuple[int, int]:
        """Return the number of groups and the number of kept ones; zeros without groups."""
        if not is_grouped:
            return 0, 0
        if num_expert_group is None or topk_group is None:
            raise LayerError(
                f"{self.name}: use_grouped_topk is set, num_expert_group is {num_expert_group} and "
                f"topk_group {topk_group}: take both from the model's config"
            )
        return num_expert_group, topk_group

    def _expect_top_k(self, top_k: int, num_experts: int, groups: int, kept: int) -> None:
        """Raise ``LayerError`` unless the kept groups hold ``top_k`` experts."""
        candidates = num_experts
        if groups:
            if num_experts % groups or not 1 <= kept <= groups:
                raise LayerError(
                    f"{self.name}: num_expert_group is {groups} and topk_group {kept}, expected a "
                    f"divisor of {num_experts} experts and 1 to {groups}: take both from the "
                    "model's config"
                )
            candidates = num_experts // groups * kept

        if not 1 <= top_k <= candidates:
            raise LayerError(
                f"{self.name}: top_k is {top_k}, expected 1 to {candidates}, the experts to choose "
                "from: take top_k and num_experts from one model's config"
            )

    def _expect_activation(self, activation: str) -> None:
        if activation not in ACTIVATIONS:
            names = ", ".join(ACTIVATIONS)
            raise LayerError(f"{self.name}: activation is {activation!r}, expected one of {names}")

    def _expect_one_choice(self, top_k: int) -> None:
        if top_k != 1:
            raise LayerError(
                f"{self.name}: apply_router_weight_on_input is set and top_k is {top_k}, expected "
                "1: an input has one weight only where one expert takes it"
            )

    def _expect_correction_bias(self, bias: Tensor | None, num_experts: int) -> None:
        if bias is not None and bias.shape != (num_experts,):
            raise LayerError(
                f"{self.name}: e_score_correction_bias has shape {tuple(bias.shape)}, expected "
                f"[{num_experts}], a number for each expert"
            )

    def _share_experts(self, ep_size: int, redundant: int, tp_size: int | None) -> None:
        """Set the attributes of the ranks: the placement, the exchange, and the tensor ranks."""
        self.ep_size = ep_size
        self.placement = self._new_placement(redundant)
        self._columns = get_tensor_model_parallel_world_size()

        # Tensor ranks hold the same tokens, so only data replicas exchange tokens.
        spans_replicas = ep_size > self._columns
        self.exchange = ExpertExchange(get_dp_group()) if spans_replicas else None
        self.tp_size = self._ranks_of_each_expert(tp_size)
        self.tp_rank = get_tensor_model_parallel_rank() if self.tp_size > 1 else 0

    def _new_placement(self, redundant: int) -> ExpertPlacement | None:
        """Return the placement of experts on the ranks that share them; ``None`` for one rank."""
        group = get_ep_group()
        if self.ep_size not in (1, group.world_size):
            raise LayerError(
                f"{self.name}: ep_size is {self.ep_size}, and the expert group of this process has "
                f"{group.world_size} ranks: give 1, or as many, as "
                "opgraft.distributed.init_distributed made them"
            )
        if self.ep_size > 1:
            rank = group.rank_in_group
            return ExpertPlacement(self.num_experts, redundant, self.ep_size, rank, self.name)
        if redundant:
            raise LayerError(
                f"{self.name}: num_redundant_experts is {redundant}, expected 0 where ep_size is 1"
            )
        return None

    def _ranks_of_each_expert(self, tp_size: int | None) -> int:
        """Return the number of ranks that share each expert; ``tp_size`` if given."""
        if tp_size is None:
            return self._columns if self.placement is None else 1
        if tp_size not in (1, self._columns):
            raise LayerError(
                f"{self.name}: tp_size is {tp_size}, and the tensor group of this process has "
                f"{self._columns}: give 1, or as many, as opgraft.distributed.init_distributed "
                "made them"
            )
        return tp_size

    def _new_loader(self, transposed: bool) -> ExpertLoader:
        return ExpertLoader(
            experts=self.local_experts,
            num_experts=self.num_experts,
            intermediate_size=self.moe_config.intermediate_size_per_partition,
            rank=self.tp_rank,
            ranks=self.tp_size,
            # gpt-oss, with this activation, stores rows of gate and up in turn.
            interleaved=self.moe_config.activation == "swigluoai",
            transposed=transposed,
            what=self.name,
        )

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The experts of this rank, by their numbers in the checkpoint."""
        if self.placement is None:
            return tuple(range(self.num_experts))
        return self.placement.local

    def parts_elsewhere(self) -> frozenset[str]:
        """Return the names below this layer that a checkpoint has for other ranks alone."""
        if self.placement is None:
            return frozenset()
        return frozenset(map(str, self.placement.elsewhere))

    def _create_weights(self, quant_config: QuantizationConfig | None) -> None:
        moe = self.moe_config
        chosen: Any = chosen_method(self, quant_config, self.prefix)
        self.quant_method = UnquantizedFusedMoEMethod(moe) if chosen is None else chosen

        self.quant_method.create_weights(
            self,
            len(self.local_experts),
            moe.hidden_dim,
            moe.intermediate_size_per_partition,
            moe.in_dtype or torch.get_default_dtype(),
            weight_loader=self.weight_loader,
        )
        for name, parameter in self.named_parameters(recurse=False):
            # A method that stores weights in a form of its own names the parts itself.
            if name.startswith(("w13_", "w2_")) and not hasattr(parameter, "checkpoint_parts"):
                set_weight_attrs(parameter, {"checkpoint_parts": {}})
                self._by_expert.add(name)
        self._name_parts()

    def _name_parts(self) -> None:
        """Note the names in a checkpoint of the parameters that still have its form."""
        for name in self._by_expert:
            parameter: Any = self._parameters.get(name)
            # The weight method may have replaced the parameter after loading.
            if hasattr(parameter, "checkpoint_parts"):
                parameter.checkpoint_parts = checkpoint_parts(name, self.local_experts)

    def place_experts(self, experts: Sequence[int]) -> None:
        """Give each place of all ranks an expert, for tokens and for weights to be loaded.

        The caller moves the weights.

        Args:
            experts: the expert in each place, one rank's after the other's. Every expert has at
                least one place.

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

    @property
    def name(self) -> str:
        """The layer as messages call it."""
        cls = self.op_class.__qualname__
        return f"{cls} {self.prefix!r}" if self.prefix else cls

    def weight_loader(self, param: Tensor, loaded_weight: LoadedTensor, part: Part = None) -> None:
        """Load this rank's part of a parameter.

        Args:
            param: of this layer.
            loaded_weight: of all experts ``[num_experts, out, in]``, or of one ``[out, in]``;
                biases without ``in``.
            part: the expert, and ``"w1"``, ``"w2"`` or ``"w3"``; ``None`` for all experts.

        Raises:
            WeightError: the shape of ``loaded_weight`` does not fit.
        """
        # Callers pass the parameter alone, as to every weight_loader.
        name = next(name for name, own in self._parameters.items() if own is param)
        self.loader.load(name, param, loaded_weight, part)

    def process_weights_after_loading(self) -> None:
        """Let the weight method change the weights to the layout of its kernel."""
        self.quant_method.process_weights_after_loading(self)

    def select_experts(self, hidden_states: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose weights and ids, ``[tokens, top_k]``, by logits ``[tokens, num_experts]``.

        Raises:
            ValueError: a logit is NaN and the setting ``check_values`` is on. With the setting
                off, the token gets weights of NaN.
        """
        expect_last_dim("fused_moe", "router_logits", router_logits, self.moe_config.num_experts)
        if self.router_logits_dtype is not None:
            router_logits = router_logits.to(self.router_logits_dtype)

        # A look at values waits for the device, so the setting is off by default.
        if values_are_known(router_logits) and host_state().checks_values():
            self._expect_numbers(router_logits)
        if self.custom_routing_function is not None:
            return self.custom_routing_function(
                hidden_states, router_logits, self.top_k, self.renormalize
            )

        chosen: tuple[Tensor, Tensor] = self.router(
            hidden_states, router_logits, self.e_score_correction_bias
        )
        return chosen

    def _expect_numbers(self, router_logits: Tensor) -> None:
        """Raise ``ValueError`` if a logit is NaN, with the first ten tokens."""
        is_nan = router_logits.isnan()
        if is_nan.any():
            tokens = is_nan.any(-1).nonzero().flatten().tolist()[:10]
            raise ValueError(
                f"fused_moe: router_logits of {self.name} are NaN for tokens {tokens}, expected "
                "numbers: see what its hidden states are"
            )

    def forward(
        self, hidden_states: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        """Return the output ``[..., hidden_size]`` of the chosen experts.

        ``input_ids`` is not read.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = router_logits.reshape(-1, router_logits.shape[-1])
        weights, ids = self.select_experts(tokens, logits)
        return self._apply_experts(hidden_states, weights, ids)

    def _apply_experts(self, hidden_states: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        expect_last_dim("fused_moe", "hidden_states", hidden_states, self.moe_config.hidden_dim)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        # Shared experts read the tokens as given, without weights.
        routed_input = x
        if self.apply_router_weight_on_input:
            routed_input = (x * weights).to(x.dtype)
            weights = torch.ones_like(weights)
        if self.placement is None:
            output: Tensor = self.quant_method.apply(
                self, routed_input, weights, ids, self.shared_experts, x
            )
        else:
            routed = self._by_placed_experts(self.placement, routed_input, weights, ids)
            output = with_shared_experts(routed, x, self.shared_experts, None)

        # A tensor rank has the sum over its parts of experts, or over its own experts.
        if self.reduce_results and max(self.tp_size, self.ep_size) > 1:
            output = tensor_model_parallel_all_reduce(output)
        return output.reshape(hidden_states.shape)

    def _by_placed_experts(
        self, placement: ExpertPlacement, x: Tensor, weights: Tensor, ids: Tensor
    ) -> Tensor:
        """Return the output of the experts in this rank's column, of all data replicas.

        The expert group is a grid: a row for each data replica, a column for each tensor rank. The
        tensor ranks of a replica hold the same tokens. So a rank sends tokens within its column
        only.

        Raises:
            ValueError: an id names no expert.
        """
        expect_ids(self.name, ids, placement.num_experts)
        places = placement.choose(ids)
        owners = places // placement.per_rank
        local = places % placement.per_rank

        replicas = owners // self._columns
        columns = owners % self._columns
        is_mine = (places >= 0) & (columns == placement.rank % self._columns)

        if self.exchange is None:
            local_ids = torch.where(is_mine, local, -1).to(torch.int32)
            return self._by_local_experts(x, weights, local_ids)
        replica_of_mine = torch.where(is_mine, replicas, -1)
        return self.exchange(x, weights, replica_of_mine, local, self._by_local_experts)

    def _by_local_experts(self, x: Tensor, weights: Tensor, local: Tensor) -> Tensor:
        if self.records and self.placement is not None:
            self.placement.record(local)
        output: Tensor = self.quant_method.apply(self, x, weights, local)
        return output

    def extra_repr(self) -> str:
        moe = self.moe_config
        ranks = f"tp={self.tp_size}, ep={self.ep_size}"
        return f"{moe.num_experts}, top_k={self.top_k}, {moe.hidden_dim}, {ranks}, {moe.activation}"


def _expect_sizes(**sizes: int) -> None:
    for argument, size in sizes.items():
        expect_size("fused_moe", argument, size)
        expect_positive("fused_moe", argument, size)


@CustomOp.register("transformers_fused_moe")
class TransformersFusedMoE(FusedMoE):
    """Experts for a caller that chooses, as the blocks of transformers do.

    A model constructs this layer as ``FusedMoE``, and loads the weights into it. ``graft`` does not
    construct this layer: it replaces a model's experts by a module ``experts``, so a replacement
    of this op does not apply there. Both compute unquantized weights by
    ``UnquantizedFusedMoEMethod``: replace that method to reach both.

    Args:
        moe_state: gets the chosen ids as ``topk_ids`` at each call, for callers that read them
            there.
    """

    def __init__(self, *args: Any, moe_state: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.moe_state = moe_state

    def forward(  # type: ignore[override]  # the choice in place of logits
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, **ignored: Any
    ) -> Tensor:
        """Return the output of the experts ``topk_ids`` ``[tokens, top_k]``.

        ``topk_weights`` has the same shape.
        """
        if self.moe_state is not None:
            self.moe_state.topk_ids = topk_ids
        return self._apply_experts(hidden_states, topk_weights, topk_ids)


TransformersMoERunner = TransformersFusedMoE
"""The name of the layer in newer versions of vLLM."""
