"""The contracts of parts that a device brings: opgraft's own and the toy NPU's keep them, and wrong ones do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TOY_NPU
from opgraft import distributed
from opgraft.distributed.communicator import Communicator
from opgraft.ops.attention import Attention
from opgraft.testing.contracts import check_attention_layout, check_communicator, check_engine
from support.engines import replaced, settings
from support.random_decoders import written
from support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("warm_workers")


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


def own() -> Communicator:
    found = distributed.get_tp_group().communicator
    assert found is not None
    return found


def keeps(name: str) -> None:
    assert type(own()).__name__ == name
    check_communicator(own())


def test_the_communicator_of_opgraft(three: Ranks) -> None:
    """Over gloo the contract is kept."""
    three.run(keeps, "Communicator")


class Unsummed(Communicator):
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


class InPlace(Communicator):
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        summed = super().all_reduce(x)
        return summed if x.dim() == 0 else x.copy_(summed)


class FromTheFirst(Communicator):
    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        return super().broadcast(x, 0)


class AlongTheLast(Communicator):
    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return super().all_gather(x, -1)


class Cut(Communicator):
    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        part = x.shape[dim] // self.world_size
        return super().reduce_scatter(x.narrow(dim, 0, part * self.world_size), dim)


WRONG = {
    Unsummed: "all_reduce of",
    InPlace: "wrote to the tensor",
    FromTheFirst: "broadcast of",
    AlongTheLast: "all_gather returned",
    Cut: "reduce_scatter took a dimension",
}


def breaks(number: int) -> str:
    """What the contract says of a wrong communicator."""
    kind, group = list(WRONG)[number], own()
    with pytest.raises(AssertionError) as caught:
        check_communicator(kind(group.process_group, group.ranks, group.rank, group.name))
    return str(caught.value)


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[kind.__name__ for kind in WRONG])
def test_wrong_communicators(three: Ranks, number: int) -> None:
    """Each is told from a right one, in words that say which collective is wrong."""
    for told in three.run(breaks, number):
        assert list(WRONG.values())[number] in told


def test_attention_of_opgraft() -> None:
    """Over its own pages, in every dtype."""
    check_attention_layout()
    check_attention_layout(dtype=torch.bfloat16, tolerance=0.03)


class Blind(Attention):
    """Sees no window."""

    def attend_batch(self, *args: Any) -> torch.Tensor:
        self.sliding_window = None
        return super().attend_batch(*args)


class Transposed(Attention):
    """Has blocks in dimension 1."""

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, dtype: Any = None
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, self.num_kv_heads * self.head_size)


def test_wrong_attention() -> None:
    """A layer that forgets its window, and one whose blocks are not in dimension 0, break the contract."""
    with pytest.raises(AssertionError):
        check_attention_layout(lambda *args, **kwargs: _of(Blind, *args, **kwargs))
    with pytest.raises(AssertionError, match="dimension 0 is the block"):
        check_attention_layout(lambda *args, **kwargs: _of(Transposed, *args, **kwargs))


def _of(kind: type[Attention], *args: Any, **kwargs: Any) -> Attention:
    """Make a layer of a class that is registered nowhere."""
    layer = Attention(*args, **kwargs)
    layer.__class__ = kind
    return layer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contracts") / "llama"
    written("Llama", folder, num_hidden_layers=1)
    return folder


@pytest.fixture(scope="module")
def tokens(checkpoint: Path) -> list[list[int]]:
    return check_engine(settings(checkpoint, max_num_batched_tokens=11))


def test_an_engine_with_other_tokens(checkpoint: Path, tokens: list[list[int]]) -> None:
    """The check tells tokens apart."""
    with pytest.raises(AssertionError, match="the requests have the tokens"):
        check_engine(settings(checkpoint), [tokens[1], *tokens[1:]])


def test_the_toy_npu_brings_attention(toy_npu: Path) -> None:
    """Its layout, tokens innermost, keeps the contract."""
    assert Attention(4, 16, 0.25).op_class.__name__ == "ToyAttention"
    check_attention_layout()


def test_the_toy_npu_brings_a_communicator(
    toy_npu_site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ring of three keeps the contract."""
    monkeypatch.setenv("TOY_NPU_DEVICE", str(TOY_NPU / "device.json"))
    with Ranks(3, path=[str(toy_npu_site)], plugins="toy_npu") as ranks:
        ranks.run(keeps, "RingCommunicator")


def test_the_toy_npu_runs_the_engine_with_two_workers(
    toy_npu: Path, checkpoint: Path, tokens: list[list[int]]
) -> None:
    """Two processes share the layers over the ring, attend over their own layout, and give the tokens of the CPU."""
    given = replaced(settings(checkpoint, max_num_batched_tokens=11), parallel={"tensor": 2})
    assert check_engine(given, tokens) == tokens


def test_the_toy_npu_is_small() -> None:
    """What it brings, with the glue of a distribution, is what an author reads in one go."""
    files = [*TOY_NPU.rglob("*.py"), TOY_NPU / "pyproject.toml"]
    assert (
        sum(len(path.read_text().splitlines()) for path in files if "build" not in path.parts) < 440
    )
