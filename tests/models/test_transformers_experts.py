"""Modules of experts in models of transformers: those that a layer replaces, and those that stay."""

from __future__ import annotations

import pytest
import torch
from opgraft.errors import CheckpointError
from opgraft.models.transformers_experts import ExpertLayers, ExpertsRecorder
from opgraft.models.transformers_layers import Replacer
from opgraft.models.transformers_names import TransformersNames
from opgraft.ops.moe.fused.placement import ALONE
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")


def experts() -> nn.Module:
    """Experts of transformers without memory."""
    sizes = {"hidden_size": 16, "moe_intermediate_size": 24, "num_experts": 4}
    config = transformers.Qwen2MoeConfig(num_experts_per_tok=2, **sizes)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        return transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeExperts(config)


def test_each_module_that_stays_has_a_row() -> None:
    """The report has experts that a parent reads, and modules of another kind, each with the reason."""
    model = nn.Module()
    model.free = experts()
    model.plain = nn.Linear(4, 4, device="meta")
    model.reader = nn.TransformerEncoderLayer(16, 2, device="meta")
    model.reader.experts = experts()
    replacer = Replacer(model, {}, {}, None, "")
    paths = ("free", "plain", "reader.experts", "of.another.stage")
    replacer.experts(dict.fromkeys(paths, 2), ExpertLayers(None, ALONE))
    assert replacer.experts_paths == ["free"]
    assert {row.path: row.reason for row in replacer.left} == {
        "plain": "its parameters are not those of experts",
        "reader.experts": "TransformerEncoderLayer reads its weights in fused code",
    }


class _Changed(nn.Module):
    """Parameters of experts, other arguments, and an activation with children."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 48, 16, device="meta"))
        self.down_proj = nn.Parameter(torch.empty(4, 16, 24, device="meta"))
        self.act_fn = nn.Sequential(nn.SiLU())

    def forward(self, x: Tensor, *chosen: Tensor) -> Tensor:
        return x


def test_the_second_argument_has_ids() -> None:
    """A call with weights before ids is another call, and gives no number of experts."""
    module = _Changed()
    recorder = ExpertsRecorder(module)
    x, ids = torch.empty(3, 16), torch.zeros(3, 2, dtype=torch.int64)
    module(x, torch.ones(3, 2), ids)
    assert recorder.choices == {}
    module(x, ids, torch.ones(3, 2))
    assert recorder.choices == {module: 2}


def test_a_module_that_stays_keeps_its_children() -> None:
    """A trial puts ops into a copy only: the modules within the activation are the same as before."""
    model = nn.Module()
    model.experts = _Changed()
    before = dict(model.named_modules())
    replacer = Replacer(model, {}, {}, None, "")
    replacer.experts({"experts": 2}, ExpertLayers(None, ALONE))
    assert [row.path for row in replacer.left] == ["experts"]
    assert dict(model.named_modules()) == before


def test_a_pattern_of_one_part_stacks_nothing() -> None:
    """A converter of a plugin may take a tensor by its last name: the tensor is not one of an expert."""
    loading = pytest.importorskip("transformers.core_model_loading")
    stack = [loading.MergeModulelist(dim=0)]
    converter = loading.WeightConverter("packed", "experts.down_proj", operations=stack)
    names = TransformersNames(computing=(converter,), experts={"layers.0.experts"})
    with pytest.raises(CheckpointError, match=r"transformers computes .*, which is not served"):
        names.map("layers.0.packed")
