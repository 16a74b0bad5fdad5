"""The cache of compiled code: its key, its entries, and models that another process has compiled."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from compilation.blocks import WIDTH, Block
from opgraft import CompilationConfig, OpgraftConfig, set_config
from opgraft.compilation import key as keys
from opgraft.compilation.cache import CompilationCache
from opgraft.compilation.capture import Example
from opgraft.errors import CacheEntryError, ConfigError
from opgraft.ops import RMSNorm
from opgraft.plugins.selection import current_platform
from torch import Tensor, nn


def parts(model: nn.Module, *args: Any, shapes: Any = None, **fields: Any) -> dict[str, Any]:
    settings = OpgraftConfig(compilation_config=CompilationConfig(**fields)).resolved().compilation_config
    return keys.parts_of(model.eval(), Example(args, {}, shapes), settings)


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The parts of the key that differ, of which each alone is another key."""
    differing = {name for name in before if before[name] != after[name]}
    assert (keys.digest(before) == keys.digest(after)) == (not differing)
    return differing


@pytest.fixture
def before(block: Block, x: Tensor) -> dict[str, Any]:
    """The key of the block as it is, which is the same for another one with other weights."""
    found = parts(block, x)
    block(x)
    assert not changed(found, parts(block, x))
    other = Block().requires_grad_(False)
    assert not changed(found, parts(other, torch.randn_like(x)))
    return found


def test_changes_of_the_model_miss(block: Block, x: Tensor, before: dict[str, Any]) -> None:
    """Another attribute, class, weight, sharing or example is another key."""
    block.second.variance_epsilon = 0.5
    assert changed(before, parts(block, x)) == {"model"}
    block.second.variance_epsilon = 1e-3
    block.first.weight = block.second.weight
    assert changed(before, parts(block, x)) == {"weights"}
    assert "weights" in changed(before, parts(Block().double(), x))
    assert "model" in changed(before, parts(nn.Sequential(Block()), x))
    for example in ((x[:2],), (x.double(),), (x, 2.0)):
        assert changed(before, parts(Block(), *example)) == {"example"}
    assert changed(before, parts(Block(), x, shapes=({0: torch.export.Dim("n", max=8)},))) == {"example"}


def test_what_python_salts_is_not_in_the_key(block: Block, x: Tensor, before: dict[str, Any]) -> None:
    """A hash that a config keeps of itself differs from process to process; what else it has is in the key."""

    class Kept:
        def __init__(self, number: int, salted: int) -> None:
            self.number, self._original_object_hash = number, salted

    block.generation_config = Kept(1, 5)  # type: ignore[assignment]
    kept = parts(block, x)
    assert changed(before, kept) == {"model"}
    block.generation_config = Kept(1, 6)  # type: ignore[assignment]
    assert not changed(kept, parts(block, x))
    block.generation_config = Kept(2, 6)  # type: ignore[assignment]
    assert changed(kept, parts(block, x)) == {"model"}


def test_changes_of_settings_and_machine_miss(
    block: Block, x: Tensor, before: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings, variables that compilers read, threads, precision, versions and instruction sets are in the key."""
    for fields in ({"custom_ops": ["none"]}, {"backend": "eager"}, {"pass_config": {"copies": False}}):
        assert changed(before, parts(block, x, **fields)) == {"settings"}
    for fields in ({"dump_graphs": "there"}, {"cache": True}, {"cache_folder": "there"}, {"cache_bytes": 1}):
        assert not changed(before, parts(block, x, **fields))
    with set_config(OpgraftConfig(providers={"rms_norm": "opgraft"})):
        assert changed(before, parts(block, x)) == {"settings"}
    with monkeypatch.context() as patched:
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
        assert not changed(before, parts(block, x))
        patched.setenv("CXXFLAGS", "-O1")
        assert changed(before, parts(block, x)) == {"variables"}
    torch.set_float32_matmul_precision("high")
    try:
        assert changed(before, parts(block, x)) == {"threads"}
    finally:
        torch.set_float32_matmul_precision("highest")
    for module, name in ((keys, "__version__"), (torch, "__version__"), (torch.version, "git_version")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, "0.0.0")
            assert changed(before, parts(block, x)) == {"versions"}
    platform = current_platform()
    other = opgraft.DeviceCapability("other", platform.capability().dtypes, features=("t1",))
    monkeypatch.setattr(type(platform), "capability", lambda self, device_id=0: other)
    assert changed(before, parts(block, x)) == {"platform"}


MODULE = """
from opgraft.ops import RMSNorm
class Own(RMSNorm):
    def forward_oot(self, x, residual=None):
        return x * {}
"""


def test_changes_of_sources_miss(
    x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: Block, before: dict[str, Any]
) -> None:
    """A replacement, and then a change of its file, are other keys, and so is a change of the file of the model."""
    file = tmp_path / "acme_kernels_of_this_test.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    file.write_text(MODULE.format(2))
    kind = importlib.import_module(file.stem).Own
    mine = parts(nn.Sequential(kind(WIDTH)), x)
    RMSNorm.register_oot(kind)
    replaced = parts(block, x)
    assert changed(before, replaced) == {"providers"}
    file.write_text(MODULE.format(30))
    assert changed(replaced, parts(block, x)) == {"providers"}
    assert "sources" in changed(mine, parts(nn.Sequential(kind(WIDTH)), x))


def entry(cache: CompilationCache, key: str, content: bytes = b"code") -> None:
    with cache.written(key) as (folder, description):
        (folder / "code").write_bytes(content)
        description["of"] = key


def damage(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


@pytest.mark.parametrize(
    "harm",
    [
        damage("code", lambda content: content[:-1]),
        damage("code", lambda content: b"x" + content[1:]),
        damage("entry.json", lambda content: content[:4]),
        damage("sums.json", lambda content: b"[]"),
        lambda folder: (folder / "code").unlink(),
    ],
)
def test_damaged_entries_are_told(harm: Callable[[Path], object], tmp_path: Path) -> None:
    """A file that is truncated, changed or gone is an error, where a whole entry is read."""
    cache = CompilationCache(tmp_path / "cache", 1 << 20)
    entry(cache, "a")
    found = cache.read("a")
    assert found is not None
    assert (found[0] / "code").read_bytes() == b"code"
    assert found[1] == {"of": "a"}
    assert cache.read("b") is None
    harm(found[0])
    with pytest.raises(CacheEntryError, match=r"damaged|cannot be read"):
        cache.read("a")


def test_what_is_not_finished_is_no_entry(tmp_path: Path) -> None:
    """Where making an entry fails, as on a full disk, nothing is left of it."""
    cache = CompilationCache(tmp_path / "cache", 1 << 20)

    def fill() -> None:
        with cache.written("a") as (folder, _):
            (folder / "code").write_bytes(b"co")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fill()
    assert cache.read("a") is None
    assert not list(cache.folder.iterdir())


def test_the_oldest_entries_go_first(tmp_path: Path) -> None:
    """Beyond its limit a cache removes what was not used for longest, and never what was just written."""
    cache = CompilationCache(tmp_path / "cache", 2500)
    for number, key in enumerate("abc"):
        entry(cache, key, bytes(600))
        os.utime(cache.folder / key, (number, number))
    assert cache.figures().entries == 3
    cache.read("a")
    entry(cache, "d", bytes(600))
    assert [cache.read(key) is not None for key in "abcd"] == [True, False, True, True]
    entry(cache, "e", bytes(5000))
    assert cache.read("e") is not None
    assert cache.figures().entries == 1
    assert cache.clear() == 1
    assert cache.figures().nbytes == 0


def test_a_key_is_locked(tmp_path: Path) -> None:
    """Who wants an entry that another one makes waits for it."""
    cache = CompilationCache(tmp_path / "cache", 1 << 20)
    seen: list[bool] = []

    def wait() -> None:
        with cache.locked("a"):
            seen.append(cache.read("a") is not None)

    with cache.locked("a"):
        waiting = threading.Thread(target=wait)
        waiting.start()
        entry(cache, "a")
    waiting.join()
    assert seen == [True]


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    """Code is loaded only from a folder of this user to which nobody else may write."""
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write to it"):
        CompilationCache(open_to_all, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cache_folder cannot be used"):
        CompilationCache(tmp_path / "file" / "cache", 1)


def test_the_command_line(cli: Any, tmp_path: Path) -> None:
    """`opgraft cache info` counts entries, `clear` removes them."""
    folder = ("--compilation_config.cache_folder", str(tmp_path / "cache"))
    entry(CompilationCache(tmp_path / "cache", 1), "a")
    figures = json.loads(cli("cache", "info", "--json", *folder).stdout)
    assert (figures["entries"], figures["limit"]) == (1, 1 << 30)
    assert figures["bytes"] > 4
    assert json.loads(cli("cache", "clear", "--json", *folder).stdout)["removed"] == 1
    assert "0 entries" in cli("cache", "info", *folder).stdout


def kept(model: nn.Module, folder: Path, x: Tensor) -> opgraft.Compiled:
    made = opgraft.compile(model, CompilationConfig(level=2, cache=True, cache_folder=str(folder)), args=(x,))
    assert isinstance(made, opgraft.Compiled)
    return made


CHILD = """
import sys, torch, opgraft
from pathlib import Path
from compilation.blocks import Block, WIDTH
from compilation.test_cache import kept
model = Block().eval().requires_grad_(False)
print(kept(model, Path(sys.argv[1]), torch.randn(3, 5, WIDTH)).decision.reason)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_what_a_process_has_compiled_another_one_loads(block: Block, x: Tensor, tmp_path: Path) -> None:
    """A child that finds an entry compiles nothing, with no compiler even; here it computes what the model does."""
    first = kept(block, tmp_path / "cache", x)
    assert first.decision.candidates[-1].reason == "it had no such entry"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PATH": "", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", CHILD, str(tmp_path / "cache")]
    told = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert "taken from the cache" in told.stdout, told.stderr
    again = kept(block, tmp_path / "cache", x)
    assert again.graph is None
    assert again.passes == first.passes
    block.mlp.get_submodule("up").weight.mul_(2)
    block.first.weight.data = block.first.weight.data * 3
    for size in (1, 2, 50):
        batch = torch.randn(size, 5, WIDTH)
        torch.testing.assert_close(dict(again(batch)), dict(block(batch)), rtol=1e-5, atol=1e-5)
    cache = CompilationCache(tmp_path / "cache", 1 << 30)
    for path in cache.folder.glob("*/entry.json"):
        if json.loads(path.read_text()):  # the first level
            path.write_text("{}")
    mended = kept(block, tmp_path / "cache", x)  # traced, and the code is there
    assert "entry.json of it is damaged" in mended.decision.candidates[-1].reason
    assert "taken from the cache" in kept(block, tmp_path / "cache", x).decision.reason
