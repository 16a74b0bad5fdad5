"""Layers of experts: routers, loading by expert and in one, shared experts, ranks, and what replaces them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import opgraft
import pytest
import torch
from conftest import Cli, Site
from opgraft import functional, ops, set_config
from opgraft.config import OpgraftConfig
from opgraft.errors import LayerError, WeightError
from opgraft.models.load import load_weights
from opgraft.ops.moe.fused.modular import FusedMoEModularKernel
from opgraft.testing.catalogue import SPECS
from support.ranks import Ranks
from torch import nn
from torch.nn import functional as F

EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 8, 3, 12, 6


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)) * 0.3


W1, W3 = drawn(EXPERTS, INTERMEDIATE, HIDDEN), drawn(EXPERTS, INTERMEDIATE, HIDDEN, seed=1)
W2 = drawn(EXPERTS, HIDDEN, INTERMEDIATE)
X, LOGITS = drawn(7, HIDDEN), drawn(7, EXPERTS) * 9


def layer(**settings: Any) -> Any:
    return ops.FusedMoE(EXPERTS, TOPK, HIDDEN, INTERMEDIATE, prefix="mlp.experts", **settings)


def filled(made: Any) -> Any:
    load_weights(made, {"gate_up_proj": torch.cat([W1, W3], 1), "down_proj": W2})
    return made


def summed(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What chosen experts give, token by token."""
    rows = []
    for token, chosen, shares in zip(X, ids.tolist(), weights, strict=True):
        made = [
            F.linear(F.silu(F.linear(token, W1[e])) * F.linear(token, W3[e]), W2[e]) for e in chosen
        ]
        rows.append(sum(share * one for share, one in zip(shares, made, strict=True)))
    return torch.stack(rows)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_weights_by_expert(names: tuple[str, ...]) -> None:
    """Each expert's matrices come by themselves, under the names of either convention."""
    made = layer()
    by_expert = zip(names, (W1, W3, W2), strict=True)
    load_weights(
        made, {f"{e}.{name}.weight": w[e] for name, w in by_expert for e in range(EXPERTS)}
    )
    assert torch.equal(made.w13_weight, torch.cat([W1, W3], 1))
    assert torch.equal(made.w2_weight, W2)


def test_a_missing_expert_is_named() -> None:
    """The error says which matrix of which expert the checkpoint lacks."""
    weights = {f"{e}.{n}.weight": W1[e] for n in ("w1", "w3") for e in range(EXPERTS)}
    weights |= {f"{e}.w2.weight": W2[e] for e in range(EXPERTS)}
    del weights["5.w3.weight"]
    with pytest.raises(
        opgraft.errors.CheckpointError, match=r"'5\.up_proj\.weight \(a part\)' is missing"
    ):
        load_weights(layer(), weights)


def test_weights_in_one() -> None:
    """All experts come in one tensor, as they are or with input and output exchanged."""
    as_they_are, exchanged = filled(layer()), layer(transposed_checkpoint=True)
    transposed = torch.cat([W1, W3], 1).transpose(1, 2), W2.transpose(1, 2)
    load_weights(exchanged, dict(zip(("gate_up_proj", "down_proj"), transposed, strict=True)))
    assert torch.equal(exchanged.w13_weight, as_they_are.w13_weight)
    assert torch.equal(exchanged.w2_weight, as_they_are.w2_weight)


def test_a_weight_of_another_shape() -> None:
    """The error names the layer, and both sizes."""
    made = layer()
    with pytest.raises(
        WeightError, match=r"FusedMoE 'mlp.experts'.*\(8, 5, 12\), expected 12 in dimension 1 of 3"
    ):
        made.weight_loader(made.w13_weight, torch.zeros(8, 5, 12))
    with pytest.raises(WeightError, match=r"\(5, 12\), expected 6 in dimension 0 of 2"):
        made.weight_loader(made.w13_weight, torch.zeros(5, 12), (1, "w3"))


def test_softmax_router() -> None:
    """The best by softmax, renormalised, as in Mixtral; not renormalised, as in OLMoE."""
    shares, ids = LOGITS.softmax(-1).topk(TOPK)
    torch.testing.assert_close(
        filled(layer())(X, LOGITS), summed(shares / shares.sum(-1, keepdim=True), ids)
    )
    torch.testing.assert_close(filled(layer(renormalize=False))(X, LOGITS), summed(shares, ids))


def test_sigmoid_router_with_bias_and_groups() -> None:
    """The bias and the groups count in the choice, as ``grouped_topk`` says."""
    bias = drawn(EXPERTS)
    made = layer(
        scoring_func="sigmoid",
        use_grouped_topk=True,
        num_expert_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        e_score_correction_bias=bias,
    )
    chosen = functional.grouped_topk(LOGITS, TOPK, True, 4, 2, "sigmoid", 2.5, bias)
    torch.testing.assert_close(filled(made)(X, LOGITS), summed(*chosen))


def test_a_router_of_the_model() -> None:
    """A function takes the router's place."""

    def last(
        hidden_states: Any, logits: Any, top_k: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.arange(EXPERTS - top_k, EXPERTS).expand(len(logits), -1)
        return torch.ones(ids.shape), ids

    made = filled(layer(custom_routing_function=last))
    ids = torch.tensor([[5, 6, 7]] * 7)
    torch.testing.assert_close(made(X, LOGITS), summed(torch.ones(7, 3), ids))


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_the_dtype_of_router_logits(dtype: torch.dtype | None, given: torch.dtype) -> None:
    """Logits are converted to that dtype before experts are chosen, for the model's own router too."""
    seen: list[torch.dtype] = []

    def route(x: Any, logits: torch.Tensor, top_k: int, renormalize: bool) -> Any:
        seen.append(logits.dtype)
        return logits.float().softmax(-1).topk(top_k)

    logits = LOGITS.to(given)
    converted = logits if dtype is None else logits.to(dtype)
    found = filled(layer(router_logits_dtype=dtype))(X, logits)
    torch.testing.assert_close(found, filled(layer())(X, converted), rtol=0, atol=0)
    filled(layer(router_logits_dtype=dtype, custom_routing_function=route))(X, logits)
    assert seen == [converted.dtype]


def test_shared_experts_and_leading_dimensions() -> None:
    """A shared expert sees every token; batches keep their shape."""
    shared = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
    alone = filled(layer())(X, LOGITS)
    made = layer(shared_experts=shared)
    made.w13_weight.data, made.w2_weight.data = torch.cat([W1, W3], 1), W2
    torch.testing.assert_close(made(X[None], LOGITS[None])[0], alone + shared(X))


def test_a_weight_on_the_input() -> None:
    """One expert's weight multiplies what goes in."""
    made = filled(
        ops.FusedMoE(
            EXPERTS, 1, HIDDEN, INTERMEDIATE, apply_router_weight_on_input=True, renormalize=False
        )
    )
    shares, ids = LOGITS.softmax(-1).topk(1)
    gate, up = (torch.einsum("tih,th->ti", w[ids[:, 0]], X * shares) for w in (W1, W3))
    torch.testing.assert_close(
        made(X, LOGITS), torch.einsum("thi,ti->th", W2[ids[:, 0]], F.silu(gate) * up)
    )


def test_experts_that_the_caller_has_chosen() -> None:
    """The layer of transformers' blocks takes weights and ids, and what else they pass."""
    made = filled(ops.TransformersFusedMoE(EXPERTS, TOPK, HIDDEN, INTERMEDIATE))
    shares, ids = LOGITS.softmax(-1).topk(TOPK)
    torch.testing.assert_close(made(X, ids, shares, layer_idx=3), summed(shares, ids))


def test_the_state_that_callers_of_vllm_pass() -> None:
    """The chosen ids stand in the state that the layer was made with, and either name of the class is the same."""
    state = SimpleNamespace(topk_ids=None, is_sequence_parallel=False)
    made = filled(ops.TransformersMoERunner(EXPERTS, TOPK, HIDDEN, INTERMEDIATE, moe_state=state))
    assert made.op_class is ops.TransformersFusedMoE
    shares, ids = LOGITS.softmax(-1).topk(TOPK)
    torch.testing.assert_close(made(X, topk_ids=ids, topk_weights=shares), summed(shares, ids))
    assert state.topk_ids is ids


def test_three_parts() -> None:
    """Prepare, experts and finalize together are what the form does in one."""
    made = filled(layer())
    expected = made(X, LOGITS)
    made.quant_method = ops.FusedMoEModularMethod(made.quant_method, FusedMoEModularKernel())
    torch.testing.assert_close(made(X, LOGITS), expected, atol=0, rtol=0)
    made.process_weights_after_loading()


def test_what_the_parts_refuse() -> None:
    """Ids of no expert, and weights in codes, which the part that computes takes for numbers."""
    made = filled(layer())
    made.quant_method = ops.FusedMoEModularMethod(made.quant_method)
    for wrong in (EXPERTS, -2):
        with pytest.raises(ValueError, match="modular_fused_moe: topk_ids reach from"):
            made.quant_method.apply(made, X, torch.ones(7, 1), torch.full((7, 1), wrong))
    made.w13_weight = nn.Parameter(made.w13_weight.to(torch.int8), requires_grad=False)
    with pytest.raises(
        ValueError, match=r"moe_experts: w13_weight is torch\.int8, expected torch\.float32 as x"
    ):
        made(X, LOGITS)


@pytest.mark.parametrize("form", ["fused_experts", "quantized_experts", "modular_fused_moe"])
def test_what_is_elsewhere_adds_nothing(form: str) -> None:
    """Weights beside an id of -1 do not count, whatever they are."""
    spec = SPECS["quantized_experts" if form == "quantized_experts" else "fused_experts"]
    given = spec.arguments(next(iter(spec.variants)), torch.float32, (6,), 16)
    given["topk_ids"][::2, 1] = given["topk_ids"][1] = -1
    call = spec.functional
    if form == "modular_fused_moe":
        method, arguments = spec.module(**given)
        modular = ops.FusedMoEModularMethod(method)

        def call(**changed: Any) -> Any:
            return modular(*arguments[:2], *list(changed.values())[3:])

    expected = call(**given)
    spoilt = given["topk_weights"].masked_fill(given["topk_ids"] < 0, torch.nan)
    assert torch.equal(call(**{**given, "topk_weights": spoilt}), expected)
    assert not expected[1].any()


def test_torch_applies_a_function_to_all_modules() -> None:
    """A layer's weight method, which has an ``apply`` of its own, is no obstacle to that of a model."""
    seen: list[nn.Module] = []
    made = layer()
    made.apply(seen.append)
    assert seen[-1] is made
    assert made.quant_method in seen


def test_a_token_with_nan() -> None:
    """NaN in one token's logits leaves other tokens as they are; the setting ``check_values`` makes it an error."""
    made, logits = filled(layer()), LOGITS.clone()
    logits[2] = torch.nan
    with_nan, without = made(X, logits), made(X, LOGITS)
    others = torch.arange(7) != 2
    torch.testing.assert_close(with_nan[others], without[others])
    assert with_nan[2].isnan().all()
    with (
        set_config(OpgraftConfig(check_values=True)),
        pytest.raises(
            ValueError, match=r"router_logits of FusedMoE 'mlp.experts' are NaN for tokens \[2\]"
        ),
    ):
        made(X, logits)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"top_k": 9}, "top_k is 9, expected 1 to 8"),
        ({"top_k": 0}, "top_k is 0, expected 1 to 8"),
        (
            {"use_grouped_topk": True, "num_expert_group": 3, "topk_group": 1},
            "num_expert_group is 3 and topk_group 1, expected a divisor of 8 experts",
        ),
        (
            {"top_k": 5, "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2},
            "top_k is 5, expected 1 to 4",
        ),
        ({"activation": "relu"}, "activation is 'relu', expected one of silu, gelu, swigluoai"),
        (
            {"apply_router_weight_on_input": True},
            "apply_router_weight_on_input is set and top_k is 3, expected 1",
        ),
        ({"tp_size": 2}, "tp_size is 2, and the tensor group of this process has 1: give 1"),
        (
            {"use_grouped_topk": True, "topk_group": 2},
            "use_grouped_topk is set, num_expert_group is None and topk_group 2",
        ),
        (
            {"e_score_correction_bias": torch.zeros(3)},
            r"e_score_correction_bias has shape \(3,\), expected \[8\]",
        ),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], words: str) -> None:
    """The error names the layer, what was given and what fits."""
    given = {"num_experts": EXPERTS, "top_k": TOPK, "prefix": "mlp.experts", **settings}
    with pytest.raises(LayerError, match=f"FusedMoE 'mlp.experts': {words}"):
        ops.FusedMoE(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, **given)


def test_tokens_of_another_size() -> None:
    """The argument is named, not the weights that it does not fit; a layer without a prefix has none in its name."""
    made = ops.FusedMoE(EXPERTS, TOPK, HIDDEN, INTERMEDIATE)
    with pytest.raises(ValueError, match="hidden_states"):
        made(drawn(7, HIDDEN + 1), LOGITS)
    with pytest.raises(
        ValueError, match="fused_moe: intermediate_size is 0, expected a positive number"
    ):
        ops.FusedMoE(EXPERTS, TOPK, HIDDEN, 0)
    with pytest.raises(LayerError, match=r"^FusedMoE: its experts are placed"):
        made.place_experts(range(EXPERTS))


def on_rank(activation: str) -> torch.Tensor:
    """What this rank has after the reduction, with biases, of which the sum has each once."""
    made = layer(reduce_results=True, has_bias=True, activation=activation)
    assert made.w13_weight.shape[1] == 2 * INTERMEDIATE // made.tp_size
    biases = {
        "gate_up_proj_bias": drawn(EXPERTS, 2 * INTERMEDIATE),
        "down_proj_bias": drawn(EXPERTS, HIDDEN),
    }
    load_weights(made, {"gate_up_proj": torch.cat([W1, W3], 1), "down_proj": W2, **biases})
    result: torch.Tensor = made(X, LOGITS)
    return result


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_two_ranks(activation: str, two: Ranks) -> None:
    """Two ranks with half of each expert give what one gives, with rows of gate and up in blocks or in turn."""
    alone = on_rank(activation)
    for result in two.run(on_rank, activation):
        torch.testing.assert_close(result, alone)


PLUGIN = """
import opgraft
from opgraft.ops import FusedMoE, FusedMoEModularMethod, TransformersMoERunner, UnquantizedFusedMoEMethod
from opgraft.ops.moe.fused.modular import MoEExperts, MoEFinalize, MoEPrepare

platforms = "any"
CALLS = []

@FusedMoE.register_oot
class VendorMoE(FusedMoE):
    def forward(self, hidden_states, router_logits, input_ids=None):
        CALLS.append("layer")
        return super().forward(hidden_states, router_logits, input_ids)

@TransformersMoERunner.register_oot
class VendorRunner(TransformersMoERunner):
    def forward(self, hidden_states, topk_ids, topk_weights, **ignored):
        CALLS.append("runner")
        return super().forward(hidden_states, topk_ids, topk_weights, **ignored)

@UnquantizedFusedMoEMethod.register_oot
class VendorMethod(UnquantizedFusedMoEMethod):
    def forward_oot(self, layer, x, topk_weights, topk_ids, shared_experts=None, shared_experts_input=None):
        CALLS.append("method")
        return self.forward_native(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)

@FusedMoEModularMethod.register_oot
class VendorModular(FusedMoEModularMethod):
    def forward_oot(self, layer, x, topk_weights, topk_ids, shared_experts=None, shared_experts_input=None):
        CALLS.append("modular")
        return self.forward_native(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)

@opgraft.PluggableClass.register_oot("moe_prepare")
class VendorPrepare(MoEPrepare):
    def __call__(self, x, topk_ids, num_experts):
        CALLS.append("prepare")
        return super().__call__(x, topk_ids, num_experts)

@opgraft.PluggableClass.register_oot("moe_experts")
class VendorExperts(MoEExperts):
    def __call__(self, layer, prepared, activation):
        CALLS.append("experts")
        return super().__call__(layer, prepared, activation)

@opgraft.PluggableClass.register_oot("moe_finalize")
class VendorFinalize(MoEFinalize):
    def __call__(self, outputs, prepared, topk_weights):
        CALLS.append("finalize")
        return super().__call__(outputs, prepared, topk_weights)
"""


def run_replaced() -> tuple[torch.Tensor, list[str], list[str]]:
    import vendor_experts

    made, runner = (
        filled(layer()),
        filled(ops.TransformersFusedMoE(EXPERTS, TOPK, HIDDEN, INTERMEDIATE)),
    )
    result = made(X, LOGITS)
    runner(X, *reversed(made.select_experts(X, LOGITS)))
    made.quant_method = ops.FusedMoEModularMethod(made.quant_method)
    made(X, LOGITS)
    kernel = made.quant_method.moe_kernel
    parts = (made, runner, made.quant_method, kernel.prepare, kernel.experts, kernel.finalize)
    names = sorted(str(getattr(part, "op_class", type(part)).__qualname__) for part in parts)
    return result, list(vendor_experts.CALLS), names


def test_a_distribution_replaces_each(site: Site) -> None:
    """Layers, methods and the three parts are a plugin's, are called in turn, and compute the same."""
    site.plugin("vendor-experts", PLUGIN)
    expected = filled(layer())(X, LOGITS)
    with Ranks(1, path=[str(site.folder)], plugins="vendor_experts") as ranks:
        ((result, calls, classes),) = ranks.run(run_replaced)
    torch.testing.assert_close(result, expected)
    assert calls == [
        "layer",
        "method",
        "runner",
        "method",
        "layer",
        "modular",
        "prepare",
        "experts",
        "finalize",
    ]
    assert classes == sorted(
        [
            "VendorMoE",
            "VendorRunner",
            "VendorModular",
            "VendorPrepare",
            "VendorExperts",
            "VendorFinalize",
        ]
    )


@pytest.mark.parametrize(
    "name", ["fused_moe", "unquantized_fused_moe", "modular_fused_moe", "transformers_fused_moe"]
)
def test_explained(name: str, cli: Cli) -> None:
    """Each op answers to its name."""
    done = cli("ops", "explain", name)
    assert done.returncode == 0, done.stderr
    assert name in done.stdout
