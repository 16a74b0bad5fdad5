"""Replacements are rejected for calls that opgraft really makes, which a table records."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from inspect import signature
from typing import Any

import opgraft
import pytest
import torch
from opgraft import ops
from opgraft.binding.functional import FUNCTIONALS
from opgraft.distributed import Communicator
from opgraft.errors import RegistrationError
from opgraft.ops.linear.methods import UnquantizedLinearMethod
from opgraft.quantization.gptq import GPTQConfig
from opgraft.registry import recorded_calls
from opgraft.registry.op_classes import method_signature, reference_method
from opgraft.registry.recorded_calls import FORWARD, FUNCTIONAL
from opgraft.registry.signatures import bound_call
from opgraft.registry.state import host_state
from support.recording import record, record_all

SOME = ("decoder gemma2", "transformers cohere2", "graft bert", "encoder Bert")
"""A scene of each kind."""


def test_calls_are_in_the_table() -> None:
    """What some models call is recorded; ``python tools/record_calls.py`` renews the table."""
    known = recorded_calls.read()
    found = record(SOME)
    new = {key: set(calls) - set(known.get(key, ())) for key, calls in found.items()}
    assert not {key: calls for key, calls in new.items() if calls}


@pytest.mark.slow
def test_the_table_is_what_all_models_call() -> None:
    """The file has each call of every scene and no other; ``python tools/record_calls.py`` renews the table."""
    assert recorded_calls.FILE.read_text("utf-8") == recorded_calls.written(record_all())


def test_every_recorded_call_fits_its_target() -> None:
    """A constructor or method takes each call that the table has for it."""
    for key, calls in recorded_calls.read().items():
        path, _, method = key.rpartition(".")
        if path.endswith(f".{FUNCTIONAL}"):
            signature = inspect.signature(FUNCTIONALS[method].native)
            assert all(call.failure(signature, signature) is None for call in calls), key
            continue
        module, _, name = path.partition(":")
        target: Any = getattr(importlib.import_module(module), name)
        if method == FORWARD:
            method = reference_method(target) or method
        signature = method_signature(target, method)
        for call in calls:
            assert call.failure(signature, signature) is None, key


def head() -> type:
    class Head(ops.ParallelLMHead):
        def forward_oot(self, x, bias):
            return x

    return Head


def row_parallel() -> type:
    class Row(ops.RowParallelLinear):
        def __init__(
            self, input_size, output_size, bias=True, input_is_parallel=True, skip_bias_add=False,
            params_dtype=None, out_dtype=None, reduce_results=True, quant_config=None, prefix="", *,
            return_bias=True, disable_tp=False,
        ):  # fmt: skip
            pass

    return Row


def experts() -> type:
    class Experts(ops.UnquantizedFusedMoEMethod):
        def forward_oot(
            self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input
        ):
            return x

    return Experts


def encoder_attention() -> type:
    class Attention(ops.MMEncoderAttention):
        def __init__(self, num_heads, head_size, scale=None, num_kv_heads=None, prefix=""):
            super().__init__(num_heads, head_size, scale, num_kv_heads, prefix)

    return Attention


def yarn() -> type:
    class Yarn(ops.YaRNScalingRotaryEmbedding):
        def __init__(
            self, head_size, rotary_dim, max_position_embeddings, base, is_neox_style,
            scaling_factor, dtype, *, attn_factor=1, beta_fast=32,
            beta_slow=1,
        ):  # fmt: skip
            pass

    return Yarn


def rotary() -> type:
    class Rotary(ops.RotaryEmbedding):
        def forward_oot(self, positions, query, key):
            return query, key

    return Rotary


def column_by_keywords() -> type:
    class Column(ops.ColumnParallelLinear):
        def __init__(
            self, input_size, output_size, *, bias=True, gather_output=False, skip_bias_add=False,
            params_dtype=None, quant_config=None, output_sizes=None, prefix="", return_bias=True,
        ):  # fmt: skip
            pass

    return Column


def row_by_keywords() -> type:
    class Row(ops.RowParallelLinear):
        def __init__(
            self, input_size, output_size, *, bias=True, skip_bias_add=False, params_dtype=None,
            reduce_results=True, quant_config=None, prefix="", return_bias=True,
        ):  # fmt: skip
            pass

    return Row


def merged_by_keywords() -> type:
    class Merged(ops.MergedColumnParallelLinear):
        def __init__(
            self, input_size, output_sizes, *, bias=True, quant_config=None, prefix="",
            return_bias=True, disable_tp=False,
        ):  # fmt: skip
            pass

    return Merged


def qkv_by_keywords() -> type:
    class QKV(ops.QKVParallelLinear):
        def __init__(
            self, hidden_size, head_size, total_num_heads, total_num_kv_heads=None, *, bias=True,
            quant_config=None, prefix="", return_bias=True,
        ):  # fmt: skip
            pass

    return QKV


def linear_by_keywords() -> type:
    class Mine(ops.Linear):
        functional_oot = opgraft.FunctionalKernels({"linear": torch.nn.functional.linear})

        def __init__(self, in_features, out_features, *, bias=True):
            pass

    return Mine


def norm_by_keywords() -> type:
    class Norm(ops.RMSNorm):
        def __init__(self, hidden_size, *, eps=1e-6, has_weight=True):
            pass

    return Norm


def layer_norm_by_keywords() -> type:
    class Norm(ops.LayerNorm):
        def __init__(self, normalized_shape, *, eps=1e-5, elementwise_affine=True, bias=True):
            pass

    return Norm


def fixed_ntk() -> type:
    class NTK(ops.NTKScalingRotaryEmbedding):
        def __init__(
            self, head_size, rotary_dim, max_position_embeddings, base, is_neox_style,
            scaling_factor, dtype,
        ):  # fmt: skip
            pass

    return NTK


def communicator() -> type:
    class Other(Communicator):
        def all_reduce(self, input_):
            return input_

    return Other


def quantization() -> type:
    class Other(GPTQConfig):
        @classmethod
        def from_config(cls, quant_config):
            return cls()

    return Other


def looked_up() -> type:
    class Other(UnquantizedLinearMethod):
        def embedding(self, layer, ids):
            return ids

    return Other


ACCEPTED: tuple[Callable[[], type], ...] = (
    column_by_keywords,
    row_by_keywords,
    merged_by_keywords,
    qkv_by_keywords,
    linear_by_keywords,
    norm_by_keywords,
    layer_norm_by_keywords,
    head,
    row_parallel,
    experts,
    encoder_attention,
    yarn,
    rotary,
    fixed_ntk,
    communicator,
    quantization,
    looked_up,
)


@pytest.mark.parametrize("make", ACCEPTED, ids=lambda make: make.__name__)
def test_a_narrower_replacement_that_no_call_notices_is_accepted(make: Callable[[], type]) -> None:
    """A form of a vendor's class is accepted if it takes each recorded call; its record has the finding."""
    cls: Any = make()
    cls.__mro__[1].register_oot(cls)
    (record,) = host_state().active
    assert all(
        finding.endswith("No caller in opgraft makes that call.") for finding in record.findings
    )
    assert len(record.findings) == 1


@pytest.mark.parametrize(
    ("target", "method"),
    [(ops.ReplicatedLinear, "forward"), (ops.GELU, "forward_oot"), (ops.SiluAndMul, "forward_oot")],
)
def test_another_name_of_the_only_argument_is_no_finding(target: Any, method: str) -> None:
    """Models give the only argument of an op by position, so its name is the author's choice."""
    target.register_oot(type("Renamed", (target,), {method: lambda self, input_: input_}))
    (record,) = host_state().active
    assert record.findings == ()


REJECTED: tuple[tuple[type, str, Callable[..., Any], str], ...] = (
    (ops.RMSNorm, "forward_oot", lambda self, x: x, "too many positional arguments"),
    (ops.ReplicatedLinear, "forward", lambda self, x, scale: x, "'scale'"),
    (ops.LogitsProcessor, "forward", lambda self, hidden_states, lm_head: None, "lands in"),
    (ops.RowParallelLinear, "__init__", lambda self, input_size, output_size: None, "bias"),
    (UnquantizedLinearMethod, "embedding", lambda self, input_, layer: None, "lands in"),
    (Communicator, "gather", lambda self, x, dim=-1: None, "unexpected keyword argument 'dst'"),
    (
        ops.UnquantizedFusedMoEMethod,
        "forward_oot",
        lambda self, layer, x, weights, ids, shared, shared_input, mask: x,
        "'mask'",
    ),
)


@pytest.mark.parametrize(("target", "method", "function", "words"), REJECTED)
def test_a_replacement_that_a_call_breaks_is_rejected(
    target: Any, method: str, function: Callable[..., Any], words: str
) -> None:
    """A recorded call that fails, or whose values change places, is named."""
    narrow = type(target)("Narrow", (target,), {method: function})
    with pytest.raises(RegistrationError, match=rf"Narrow\.{method} at .* is narrower.*{words}"):
        target.register_oot(narrow)


def without_bias(
    self, input_size, output_sizes, quant_config, prefix, *, return_bias=True, disable_tp=False
):
    pass


def without_disable_tp(
    self, input_size, output_sizes, bias=True, quant_config=None, prefix="", *, return_bias=True
):
    pass


MISSING = {"bias": without_bias, "disable_tp": without_disable_tp}


@pytest.mark.parametrize("missing", MISSING)
def test_a_merged_layer_that_models_cannot_construct(missing: str) -> None:
    """The reason has the parameter and the whole call. DeepSeek passes disable_tp, most models pass bias."""
    members = {"__init__": MISSING[missing]}
    narrow: Any = type("Narrow", (ops.MergedColumnParallelLinear,), members)
    told = rf"\(input_size, output_sizes, bias=….*got an unexpected keyword argument '{missing}'"
    with pytest.raises(RegistrationError, match=told):
        ops.MergedColumnParallelLinear.register_oot(narrow)


def test_a_renamed_positional_argument_is_no_exchange() -> None:
    """Another name is fine for what is given by position, unless another parameter has that name."""

    def target(query, key): ...

    def renamed(q, k): ...

    def exchanged(key, query): ...

    given = (["query", "key"], [])
    assert bound_call(*given, signature(target), signature(renamed)) is None
    assert "lands in 'key'" in str(bound_call(*given, signature(target), signature(exchanged)))


@pytest.mark.parametrize(
    ("members", "found"),
    [
        ({"forward_oot": lambda self, input, residual=None: input}, True),
        ({"forward": lambda self, input, residual=None: input}, True),
        (
            {"functional_oot": opgraft.FunctionalKernels({"linear": torch.nn.functional.linear})},
            False,
        ),
    ],
)
def test_a_form_that_layers_call_is_a_finding_without_a_function(
    members: dict[str, Any], found: bool
) -> None:
    """A replaced ``Linear`` without a function for the form is told that layers of the engine do not call it."""
    ops.Linear.register_oot(type("Mine", (ops.Linear,), members))
    (record,) = host_state().active
    told = "layers that call opgraft.functional.linear" in " ".join(record.findings)
    assert told == found
