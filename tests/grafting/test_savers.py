"""Files of a grafted model are those of the plain one, whoever writes them, and a plain model reads them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opgraft
import pytest
import safetensors.torch
import torch
import transformers
from huggingface_hub import PyTorchModelHubMixin, load_torch_model, save_torch_model
from torch import nn
from torch.distributed import checkpoint


class Gated(nn.Module):
    """A gated MLP as Llama writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(16, 24)
        self.up_proj = nn.Linear(16, 24)
        self.down_proj = nn.Linear(24, 16)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class Shared(nn.Module, PyTorchModelHubMixin):
    """A model as people publish it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(x)
        return out


def by_torch(model: nn.Module, folder: Path) -> nn.Module:
    torch.save(model.state_dict(), folder / "model.pt")
    loaded = Shared()
    loaded.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return loaded


def by_torch_as_a_whole(model: nn.Module, folder: Path) -> nn.Module:
    torch.save(model, folder / "model.pt")
    loaded: nn.Module = torch.load(folder / "model.pt", weights_only=False)
    return loaded


def by_safetensors(model: nn.Module, folder: Path) -> nn.Module:
    safetensors.torch.save_model(model, str(folder / "model.safetensors"))
    loaded = Shared()
    assert safetensors.torch.load_model(loaded, folder / "model.safetensors") == (set(), [])
    return loaded


def by_safetensors_of_a_state(model: nn.Module, folder: Path) -> nn.Module:
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    loaded = Shared()
    loaded.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
    return loaded


def by_hugging_face_hub(model: nn.Module, folder: Path) -> nn.Module:
    save_torch_model(model, folder)
    loaded = Shared()
    load_torch_model(loaded, folder)
    return loaded


def by_hugging_face_hub_in_shards(model: nn.Module, folder: Path) -> nn.Module:
    save_torch_model(model, folder, max_shard_size=2000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    loaded = Shared()
    load_torch_model(loaded, folder)
    return loaded


def by_the_mixin(model: nn.Module, folder: Path) -> nn.Module:
    assert isinstance(model, Shared)
    model.save_pretrained(folder)
    loaded: nn.Module = Shared.from_pretrained(folder)
    return loaded


def by_distributed_checkpoints(model: nn.Module, folder: Path) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is no process group
        checkpoint.save(model.state_dict(), checkpoint_id=folder)
        loaded = Shared()
        state = loaded.state_dict()
        checkpoint.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state)
    return loaded


def by_accelerate(model: nn.Module, folder: Path) -> nn.Module:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.Accelerator(cpu=True).save_model(model, str(folder))
    loaded = Shared()
    accelerate.load_checkpoint_in_model(loaded, str(folder))
    return loaded


SAVERS = [
    by_torch,
    by_torch_as_a_whole,
    by_safetensors,
    by_safetensors_of_a_state,
    by_hugging_face_hub,
    by_hugging_face_hub_in_shards,
    by_the_mixin,
    by_distributed_checkpoints,
    by_accelerate,
]


@pytest.mark.parametrize("save", SAVERS)
@pytest.mark.parametrize(
    "prepare",
    [opgraft.graft, lambda model: (opgraft.graft(model), opgraft.freeze(model, keep_plain=False))],
)
def test_every_saver(
    save: Callable[[nn.Module, Path], nn.Module], prepare: Callable[[Any], Any], tmp_path: Path
) -> None:
    """All weights are there, with every bit, also when gate and up are computed at once, or are packed."""
    plain = Shared().eval()
    model, x = copy.deepcopy(plain), torch.randn(3, 16)
    prepare(model)
    with torch.no_grad():
        model(x)
        loaded = save(model, tmp_path).eval()
        expected, state = plain.state_dict(), loaded.state_dict()
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        torch.testing.assert_close(loaded(x), plain(x), atol=1e-5, rtol=1e-5)


def test_files_are_as_large_as_those_of_the_plain_model(tmp_path: Path) -> None:
    """Nothing is written twice, though gate and up lie side by side."""
    plain = nn.Sequential(*(Gated() for _ in range(8))).eval()
    model = grafted(copy.deepcopy(plain))
    for name, each in (("plain", plain), ("grafted", model)):
        torch.save(each.state_dict(), tmp_path / f"{name}.pt")
        safetensors.torch.save_model(each, str(tmp_path / f"{name}.safetensors"))
    for suffix in ("pt", "safetensors"):
        sizes = [(tmp_path / f"{name}.{suffix}").stat().st_size for name in ("plain", "grafted")]
        assert abs(sizes[0] - sizes[1]) < 0.05 * sizes[0]


def test_save_pretrained(tmp_path: Path) -> None:
    """A causal model of transformers, saved while grafted, is read again by transformers."""
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
        pad_token_id=0,
    )
    model: Any = transformers.LlamaForCausalLM(config).eval()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grafted(model).save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    state = loaded.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def grafted(model: Any) -> Any:
    """The model, grafted, with gate and up computed at once."""
    report = opgraft.graft(model)
    assert "gated_mlp" in [row.op for row in report.replaced]
    return model
