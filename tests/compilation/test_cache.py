"""The cache of compiled code: its entries, and models that another process has compiled."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from opgraft import CompilationConfig
from opgraft.compilation import key as keys
from opgraft.compilation.bundles import export_entries, import_entries
from opgraft.compilation.cache import CompilationCache
from opgraft.compilation.packages import temporary
from opgraft.errors import CacheEntryError, CompilationError, ConfigError
from support.blocks import WIDTH, Block
from torch import Tensor, nn

A, B, C, D, E = (keys.digest(number) for number in range(5))


def entry(cache: CompilationCache, key: str, content: bytes = b"code") -> None:
    with cache.locked(key), cache.written(key) as (folder, description):
        (folder / "code").write_bytes(content)
        description["of"] = key


def names(cache: CompilationCache) -> set[str]:
    """Everything in the folder but locks."""
    return {path.name for path in cache.folder.iterdir() if path.suffix != ".lock"}


def damage(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


@pytest.mark.parametrize(
    "harm",
    [
        damage("code", lambda content: content[:-1]),
        damage("code", lambda content: b"x" + content[1:]),
        damage("entry.json", lambda content: content[:4]),
        damage("sums.json", lambda content: b"[]"),
        damage("sums.json", lambda content: b"{}"),
        lambda folder: (folder / "more").touch(),
        lambda folder: (folder / "code").unlink(),
    ],
)
def test_damaged_entries_are_told(harm: Callable[[Path], object], tmp_path: Path) -> None:
    """A file that is truncated, changed or gone is an error, where a whole entry is read."""
    cache = CompilationCache(tmp_path / "cache", 1 << 20)
    entry(cache, A)
    found = cache.read(A)
    assert found is not None
    assert (found[0] / "code").read_bytes() == b"code"
    assert found[1] == {"of": A}
    assert cache.read(B) is None
    harm(found[0])
    with pytest.raises(CacheEntryError, match=r"damaged|cannot be read"):
        cache.read(A)


def test_what_is_not_finished_is_no_entry(tmp_path: Path) -> None:
    """Where making an entry fails, as on a full disk, nothing is left of it."""
    cache = CompilationCache(tmp_path / "cache", 1 << 20)

    def fill() -> None:
        with cache.written(A) as (folder, _):
            (folder / "code").write_bytes(b"co")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fill()
    assert cache.read(A) is None
    assert not list(cache.folder.iterdir())


def test_what_has_the_name_of_an_entry_makes_room(tmp_path: Path) -> None:
    """A file, or a link to another folder, of which nothing is removed but the link."""
    cache, outside = CompilationCache(tmp_path / "cache", 1 << 20), tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    (cache.folder / A).touch()
    (cache.folder / B).symlink_to(outside)
    for key in (A, B):
        entry(cache, key)
        assert cache.read(key) is not None
    assert (outside / "file").exists()


def test_the_oldest_entries_go_first(tmp_path: Path) -> None:
    """Beyond its limit a cache removes what was not used for longest, and never what was just written."""
    cache = CompilationCache(tmp_path / "cache", 2500)
    for number, key in enumerate((A, B, C)):
        entry(cache, key, bytes(600))
        os.utime(cache.folder / key, (number, number))
    assert cache.figures().entries == 3
    cache.read(A)
    entry(cache, D, bytes(600))
    assert [cache.read(key) is not None for key in (A, B, C, D)] == [True, False, True, True]
    entry(cache, E, bytes(5000))
    assert cache.read(E) is not None
    assert cache.figures().entries == 1
    assert cache.clear() == 1
    assert not list(cache.folder.iterdir())


def test_nothing_else_in_the_folder_is_touched(tmp_path: Path) -> None:
    """A folder that has other things in it loses entries alone, however old the others are and however full it is."""
    others = [
        tmp_path / name
        for name in ("project", "poetry.lock", "writing-a-book", "notes.writing", "f" * 39)
    ]
    for path in others:
        path.mkdir()
        (path / "file").write_bytes(bytes(5000))
        os.utime(path, (0, 0))
    cache = CompilationCache(tmp_path, 1000)
    for key in (A, B):
        entry(cache, key, bytes(600))
    assert (cache.figures().entries, cache.read(A)) == (1, None)
    assert cache.clear() == 1
    assert sorted(tmp_path.iterdir()) == sorted(others)
    assert all((path / "file").is_file() for path in others)


def test_what_somebody_uses_stays(tmp_path: Path) -> None:
    """Neither a full cache nor who clears it takes an entry that another one reads or makes."""
    cache = CompilationCache(tmp_path, 1000)
    entry(cache, A, bytes(600))
    with cache.locked(A), cache.locked(B), cache.written(B) as (folder, _):
        entry(cache, C, bytes(600))
        assert cache.read(A) is not None
        assert cache.clear() == 1
        assert names(cache) == {A, folder.name}
    assert names(cache) == {A, B}


def test_what_a_killed_process_has_begun_goes(tmp_path: Path) -> None:
    """By the next one that writes, whichever entry that is."""
    cache = CompilationCache(tmp_path, 1 << 20)
    code = "import os, sys; from pathlib import Path; from opgraft.compilation.cache import CompilationCache as C\n"
    code += "c = C(Path(sys.argv[1]), 9)\nwith c.locked(sys.argv[2]), c.written(sys.argv[2]): os._exit(1)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path), A], check=False)
    assert len(names(cache)) == 1
    entry(cache, B)
    assert names(cache) == {B}


def test_a_process_that_is_killed_while_it_removes_an_entry_leaves_none(tmp_path: Path) -> None:
    """No entry with some of its files is there, and the next one that writes removes these files."""
    cache = CompilationCache(tmp_path, 1 << 20)
    entry(cache, A)
    code = "import os, shutil, sys; from pathlib import Path\n"
    code += "from opgraft.compilation.cache import CompilationCache as C\n"
    code += "def torn(path, **_):\n    for file in Path(path).glob('*'):\n        file.unlink(); os._exit(1)\n"
    code += "shutil.rmtree = torn; C(Path(sys.argv[1]), 9).discard(sys.argv[2])"
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path), A], check=False)
    assert ended.returncode == 1
    assert cache.read(A) is None
    entry(cache, B)
    assert names(cache) == {B}


def test_who_waits_for_a_lock_that_is_removed_takes_the_next(tmp_path: Path) -> None:
    """So that two never hold the lock of a key at once."""
    cache, lock = CompilationCache(tmp_path, 1 << 20), tmp_path / f"{A}.lock"
    held: list[bool] = []

    def wait() -> None:
        with cache.locked(A):
            held.append(lock.exists())

    with cache.locked(A):
        waiting = threading.Thread(target=wait)
        waiting.start()
        while opened(lock) < 2:
            pass
        lock.unlink()
    waiting.join()
    assert held == [True]


def opened(path: Path) -> int:
    """Count the descriptors of this process that are of a file."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.islink(link)].count(str(path))


def test_a_key_is_locked(tmp_path: Path) -> None:
    """Who wants an entry that another one makes waits for it."""
    cache = CompilationCache(tmp_path / "cache", 1 << 20)
    seen: list[bool] = []

    def wait() -> None:
        with cache.locked(A):
            seen.append(cache.read(A) is not None)

    with cache.locked(A):
        waiting = threading.Thread(target=wait)
        waiting.start()
        with cache.written(A):
            pass
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
    with pytest.raises(
        ConfigError, match="cache_folder cannot be used: ValueError: embedded null byte"
    ):
        CompilationCache(tmp_path / "\0", 1)


def test_the_command_line(cli: Any, tmp_path: Path) -> None:
    """`opgraft cache info` counts entries, `clear` removes them."""
    folder = ("--compilation_config.cache_folder", str(tmp_path / "cache"))
    entry(CompilationCache(tmp_path / "cache", 1), A)
    figures = json.loads(cli("cache", "info", "--json", *folder).stdout)
    assert (figures["entries"], figures["limit"]) == (1, 1 << 30)
    assert figures["bytes"] > 4
    assert json.loads(cli("cache", "clear", "--json", *folder).stdout)["removed"] == 1
    assert "0 entries" in cli("cache", "info", *folder).stdout


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("planted")


@pytest.fixture
def by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the cache by default, of a user of this test, and no setting about the cache."""
    monkeypatch.delenv("OPGRAFT_COMPILATION_CONFIG_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "opgraft" / "compiled"


def reason_of(model: nn.Module, x: Tensor, **settings: Any) -> str:
    """Compile at level 2, and return the reason of the decision."""
    made = opgraft.compile(model, CompilationConfig(level=2, **settings), args=(x,))
    assert isinstance(made, opgraft.Compiled)
    return str(made.decision.reason)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_the_cache_is_on_by_default(
    by_default: Path, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second compilation takes the code of the first from the folder of the user."""
    # To optimise the code around kernels, too, would take a quarter of the time.
    monkeypatch.setattr("torch._inductor.config.aot_inductor.compile_wrapper_opt_level", "O0")
    model = nn.PReLU().eval()
    assert "one graph for any size" in reason_of(model, x)
    assert by_default.stat().st_mode & 0o777 == 0o700
    assert "taken from the cache of compiled code" in reason_of(model, x)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_levels_without_generated_code_need_no_cache(
    by_default: Path, block: Block, x: Tensor
) -> None:
    """Without a setting about the cache, a mode or a backend that keeps no code is no error."""
    for settings in ({"level": 0}, {"level": 1}, {"mode": "STOCK_TORCH_COMPILE"}):
        opgraft.compile(block, CompilationConfig(**settings), args=(x,))
    assert not by_default.exists()


def test_a_default_folder_that_cannot_be_used_is_a_warning(
    by_default: Path, x: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is compiled, as far as it can be. If a setting asks for the cache, the folder is an error."""
    by_default.parent.mkdir()
    by_default.write_text("")
    model = Failing().eval()
    with pytest.raises(ConfigError, match="cache_folder cannot be used"):
        reason_of(model, x, cache=True)
    with pytest.raises(CompilationError, match="planted"):
        reason_of(model, x)
    assert "the cache of compiled code is off: the folder" in caplog.text


def test_the_command_line_tells_whether_the_cache_is_on(cli: Any, by_default: Path) -> None:
    """`opgraft cache info` has the folder, and the setting that turns the cache off."""
    assert json.loads(cli("cache", "info", "--json").stdout)["enabled"] is True
    told = cli("cache", "info", OPGRAFT_COMPILATION_CONFIG_CACHE="0").stdout
    assert str(by_default) in told
    assert "off: compilation_config.cache (OPGRAFT_COMPILATION_CONFIG_CACHE) is false" in told


def kept(model: nn.Module, folder: Path, x: Tensor) -> opgraft.Compiled:
    made = opgraft.compile(
        model, CompilationConfig(level=2, cache=True, cache_folder=str(folder)), args=(x,)
    )
    assert isinstance(made, opgraft.Compiled)
    return made


def test_a_folder_that_takes_no_lock_is_a_warning(
    x: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a full disk: the model is compiled, as far as it can be, and nothing is kept."""
    config = CompilationConfig(level=2, cache=True, cache_folder=str(tmp_path))
    for _ in range(2):
        with pytest.raises(CompilationError, match="planted"):
            opgraft.compile(Failing().eval(), config, args=(x,))
        (lock,) = tmp_path.glob("*.lock")
        if lock.is_file():
            assert "nothing is kept" not in caplog.text
            lock.unlink()
            lock.mkdir()
    assert (
        f"nothing is kept: CacheEntryError: the folder {tmp_path} takes no file: IsADirectoryError"
        in caplog.text
    )


CHILD = """
import sys, torch, opgraft
from pathlib import Path
from support.blocks import Block, WIDTH
from compilation.test_cache import kept
model = Block().eval().requires_grad_(False)
print(kept(model, Path(sys.argv[1]), torch.randn(3, 5, WIDTH)).decision.reason)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_what_a_process_has_compiled_another_one_loads(
    block: Block, x: Tensor, tmp_path: Path
) -> None:
    """A child that finds an entry compiles nothing, with no compiler even; here it computes what the model does."""
    first = kept(block, tmp_path / "cache", x)
    assert first.decision.candidates[-1].reason == "it had no such entry"
    environ = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PATH": "",
        "PYTHONHASHSEED": "7",
    }
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
    cache, there = (CompilationCache(tmp_path / name, 1 << 30) for name in ("cache", "there"))
    bundle = export_entries(cache, str(tmp_path / "bundle"))
    import_entries(there, bundle.file, sha256=bundle.sha256)
    assert "taken from the cache" in kept(block, there.folder, x).decision.reason
    for path in cache.folder.glob("*/entry.json"):
        if json.loads(path.read_text()):  # the first level
            path.write_text("{}")
    mended = kept(block, tmp_path / "cache", x)  # traced, and the code is there
    assert "entry.json of it is damaged" in mended.decision.candidates[-1].reason
    assert "taken from the cache" in kept(block, tmp_path / "cache", x).decision.reason


class Alone(nn.Module):
    """Tells whether somebody holds the lock of a key while it is computed, and not traced."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.__dict__["seen"], self.__dict__["folder"] = [], folder

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.seen.append(len(list(self.folder.glob("*.lock"))) - len(free_locks(self.folder)))
        return x * self.weight


def free_locks(folder: Path) -> list[Path]:
    free = []
    for path in folder.glob("*.lock"):
        with path.open() as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free.append(path)
    return free


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_no_lock_is_held_while_code_is_compared(x: Tensor, tmp_path: Path) -> None:
    """The ranks of a model wait for each other then. What was compared when it was made is not when it is loaded.
    Weights of another layout than the code has are an error."""
    folder = tmp_path / "cache"
    for cold in (True, False):
        model = Alone(folder).eval().requires_grad_(False)
        made = kept(model, folder, x)
        assert (made.graph is not None) == cold
        assert model.seen == [0] * cold
        torch.testing.assert_close(made(x), x * model.weight)
    model.weight.data = model.weight.data.clone()
    torch.testing.assert_close(made(x), x * model.weight)
    for other in (
        model.weight.data[:1].expand(WIDTH),
        model.weight.double(),
        torch.randn(2 * WIDTH)[::2],
    ):
        model.weight.data = other
        with pytest.raises(
            CompilationError,
            match=r"the tensor weight of the model was torch.float32 .*compile the model",
        ):
            made(x)


class Gated(nn.Module):
    """Computes with parameters and a buffer of one element each by themselves, and counts its calls in the buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.scalar, self.row = (
            nn.Parameter(torch.tensor(value)),
            nn.Parameter(torch.tensor([value])),
        )
        self.register_buffer("calls", torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.scalar.tanh() + self.row.exp() + self.calls


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_tensors_of_one_element_are_no_constants(x: Tensor, tmp_path: Path) -> None:
    """Code of a model serves others of its kind, whose gates, scales and counters have other values, and new ones."""
    for cold, value in ((True, 0.5), (False, 2.0)):
        model = Gated(value).eval().requires_grad_(False)
        other = copy.deepcopy(model)
        made = kept(model, tmp_path / "cache", x)
        assert (made.graph is not None) == cold
        for _ in range(3):
            torch.testing.assert_close(made(x), other(x))
            assert model.calls == other.calls
            for each in (*model.parameters(), *other.parameters()):
                each.mul_(0.5)


def test_what_is_raised_beside_temporary_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes through as it is, as of a model that reads a file, and no folder stays; without one, none are given."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="of the model"), temporary():
        raise FileNotFoundError("of the model")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with temporary() as packages:
        assert packages is None
