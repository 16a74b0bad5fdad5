"""The key of the cache of compiled code: whatever decides on the code is in it."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import opgraft
import pytest
import torch
import torch._inductor.config as inductor
from compilation.test_cache import Failing
from opgraft import CompilationConfig, OpgraftConfig, set_config
from opgraft.compilation import key as keys
from opgraft.compilation import sources
from opgraft.compilation.example import Example
from opgraft.compilation.graph_pass import GraphPass, PassOutcome
from opgraft.compilation.sources import Sources
from opgraft.config import ShadowConfig
from opgraft.errors import CompilationError
from opgraft.ops import RMSNorm
from opgraft.plugins.selection import current_platform
from support.blocks import WIDTH, Block
from torch import Tensor, fx, nn
from torch.nn import functional as F

INDEX: list[Path] = []
"""The index with the digests of opgraft's sources, so that each key need not read all of them."""


@pytest.fixture(scope="module", autouse=True)
def index_of_sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    INDEX.append(tmp_path_factory.mktemp("sources") / "index.json")
    yield
    INDEX.clear()


def key_of(model: nn.Module, example: Example, settings: Any) -> keys.ModelKey:
    found = Sources(INDEX[0])
    key = keys.key_of(model.eval(), example, settings, found)
    found.keep()
    return key


def parts(model: nn.Module, *args: Any, shapes: Any = None, **fields: Any) -> dict[str, Any]:
    settings = (
        OpgraftConfig(compilation_config=CompilationConfig(**fields)).resolved().compilation_config
    )
    return dict(key_of(model, Example(args, {}, shapes), settings).parts)


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
    assert changed(before, parts(Block(), x, shapes=({0: torch.export.Dim("n", max=8)},))) == {
        "example"
    }


def test_changes_of_settings_and_machine_miss(
    block: Block, x: Tensor, before: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings, variables that compilers read, threads, precision, versions, platform and instruction sets are in the
    key."""
    for fields in (
        {"custom_ops": ["none"]},
        {"backend": "eager"},
        {"pass_config": {"copies": False}},
    ):
        assert changed(before, parts(block, x, **fields)) == {"settings"}
    for fields in (
        {"dump_graphs": "there"},
        {"cache": True},
        {"cache_folder": "there"},
        {"cache_bytes": 1},
    ):
        assert not changed(before, parts(block, x, **fields))
    for config in (
        OpgraftConfig(providers={"rms_norm": "opgraft"}),
        OpgraftConfig(check_values=True),
        OpgraftConfig(shadow=ShadowConfig(share=0.5)),
    ):
        with set_config(config):
            assert changed(before, parts(block, x)) == {"settings"}
    with monkeypatch.context() as patched:
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
        assert not changed(before, parts(block, x))
        patched.setenv("CXXFLAGS", "-O1")
        assert changed(before, parts(block, x)) == {"variables"}
    for change, value, as_it_was in (
        (torch.set_float32_matmul_precision, "high", "highest"),
        (torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
        (torch.set_default_dtype, torch.float64, torch.float32),
    ):
        change(value)
        try:
            assert changed(before, parts(block, x)) == {"threads"}
        finally:
            change(as_it_was)
    platform = current_platform()
    other = opgraft.DeviceCapability("other", platform.capability().dtypes, features=("t1",))
    for owner, name, value, part in (
        (keys, "__version__", "0.0.0", "versions"),
        (torch, "__version__", "0.0.0", "versions"),
        (torch.version, "git_version", "0.0.0", "versions"),
        (keys.sys, "version", "0.0.0", "versions"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "other", "platform"),
        (type(platform), "name", "other", "platform"),
        (type(platform), "capability", lambda self, device_id=0: other, "platform"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            assert changed(before, parts(block, x)) == {part}


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


class Holder(nn.Module):
    """Has something that its result depends on, and that is no tensor of it."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return self.held(x) if callable(self.held) else x


class Slots:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def with_default(factor: float) -> Callable[[Tensor], Tensor]:
    def scaled(x: Tensor, by: float = factor) -> Tensor:
        return x * by

    return scaled


def hooked(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda module, args, result: result * 2)
    return model


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.relu, torch.tanh),
        (
            functools.partial(F.gelu, approximate="tanh"),
            functools.partial(F.gelu, approximate="none"),
        ),
        (scaled(2.0), scaled(3.0)),
        (with_default(2.0), with_default(3.0)),
        (Slots(2.0), Slots(3.0)),
        (np.ones(3, dtype=np.float32), np.zeros(3, dtype=np.float32)),
        (np.float32(1), np.float32(2)),
        (torch.ones(3), torch.zeros(3)),
        ([nn.Linear(2, 2)], [nn.Linear(2, 2)]),
        (torch.Size([2]), torch.Size([3])),
        (Holder, Block),
        ({1: "a", "1": None}, {1: "b", "1": None}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_module_holds_is_in_the_key(one: Any, other: Any, x: Tensor) -> None:
    """Whatever it is: what differs in it is another key, and a copy of it is the same."""
    found = parts(Holder(one), x)
    assert changed(found, parts(Holder(other), x)) == {"model"}
    assert not changed(found, parts(Holder(copy.deepcopy(one)), x))


def test_what_generates_is_not_in_the_key(x: Tensor) -> None:
    """Of a model of transformers it has a hash that each process has another of, and no forward reads it."""
    models = [Holder(1), Holder(1)]
    for number, model in enumerate(models):
        model.generation_config = Slots(number)  # type: ignore[assignment]
    assert not changed(*(parts(model, x) for model in models))


@pytest.mark.filterwarnings("ignore:TF32")  # of the flags of mkldnn
def test_hooks_and_compilers_are_in_the_key(x: Tensor, block: Block) -> None:
    """A hook of a module, flags of torch, and settings of its compilers that code has changed."""
    assert changed(parts(Holder(1), x), parts(hooked(Holder(1)), x)) == {"model"}
    before = parts(block, x)
    with torch.backends.mkldnn.flags(enabled=False):
        assert changed(before, parts(block, x)) == {"compilers"}
    with inductor.patch(freezing=True):
        assert changed(before, parts(block, x)) == {"compilers"}
    torch.use_deterministic_algorithms(True)
    try:
        assert changed(before, parts(block, x)) == {"compilers"}
    finally:
        torch.use_deterministic_algorithms(False)


HELPER = "def act(x):\n    return x * {}\n"
USER = """
from {0}_helper import act
from torch import nn
class Mine(nn.Module):
    def forward(self, x):
        return act(x)
"""


IN_A_NOTEBOOK = """
from torch import nn
class Mine(nn.Module):
    def forward(self, x):
        return act(x)
"""


def test_modules_that_the_model_names_are_in_the_key(
    x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a helper of the model's module, and the functions of a module without a file."""
    name = "model_of_this_test"
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{name}.py").write_text(USER.format(name))
    helper = tmp_path / f"{name}_helper.py"
    helper.write_text(HELPER.format(2))
    model = importlib.import_module(name).Mine()
    before = parts(model, x)
    helper.write_text(HELPER.format(30))
    assert changed(before, parts(model, x)) == {"sources"}
    keys_of = []
    for factor in (2, 3, 3):
        notebook = types.ModuleType("notebook_of_this_test")
        monkeypatch.setitem(sys.modules, notebook.__name__, notebook)
        exec(HELPER.format(factor) + IN_A_NOTEBOOK, vars(notebook))  # noqa: S102
        keys_of.append(parts(notebook.Mine(), x))
    assert changed(*keys_of[:2]) == {"model", "sources"}
    assert not changed(*keys_of[1:])


SCALED = """
import torch
from torch import nn
import {0}_constants as constants
FACTOR = [2.0]
def scale(x):
    return x * FACTOR[0] * constants.OFFSET
class Mine(nn.Module):
    times = 3.0
    def forward(self, x):
        return scale(x) * self.times
"""


def test_what_code_reads_of_its_module_is_in_the_key(
    x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is now: constants, those of other modules of the user, attributes of classes, and methods that somebody
    has put in their place. What no code of the model reads, as a time that each process has another of, is not."""
    name = "scaling_of_this_test"
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{name}_constants.py").write_text("OFFSET = 1.0\nUNREAD = 1")
    (tmp_path / f"{name}.py").write_text(SCALED.format(name))
    module = importlib.import_module(name)
    before = parts(module.Mine(), x)
    module.STARTED = module.constants.UNREAD = 5
    assert not changed(before, parts(module.Mine(), x))
    for holder, attribute, value in (
        (module.FACTOR, 0, 4.0),
        (module.constants, "OFFSET", 4.0),
        (module.Mine, "times", 4.0),
        (module, "scale", torch.relu),
        (module.Mine, "forward", lambda self, x: x),
    ):
        was = holder[0] if attribute == 0 else getattr(holder, attribute)
        put = holder.__setitem__ if attribute == 0 else functools.partial(setattr, holder)
        put(attribute, value)
        assert "model" in changed(before, parts(module.Mine(), x))
        put(attribute, was)
        assert not changed(before, parts(module.Mine(), x))
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x)
    norm = parts(nn.LayerNorm(WIDTH), x)
    monkeypatch.undo()
    assert "model" in changed(norm, parts(nn.LayerNorm(WIDTH), x))


class Unpicklable:
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("planted")


@pytest.mark.parametrize(
    ("held", "unseen"),
    [
        (Unpicklable(), {"test_cache_key:Unpicklable"}),
        ([[Unpicklable()]], {"test_cache_key:Unpicklable"}),
        (torch.eye(3).to_sparse(), {"torch:Tensor"}),
        (list(map(str, range(1 << 17))), set()),
        ([[number] for number in range(1 << 17)], {"builtins:list"}),
        (functools.reduce(lambda inner, _: [inner], range(100), []), {"builtins:list"}),
        ([1, "a", torch.ones(2), {"a": scaled(2.0)}], set()),
    ],
)
def test_what_the_key_does_not_see_is_told(held: Any, unseen: set[str], x: Tensor) -> None:
    """Values that cannot be described, or that are too many or too deep: such a model is compared when it is loaded."""
    settings = OpgraftConfig().resolved().compilation_config
    key = key_of(Holder(held), Example((x,), {}), settings)
    assert {name.rpartition(".")[2] for name in key.unseen} == unseen


def test_what_holds_itself_is_in_the_key(x: Tensor) -> None:
    """Its description ends, and differs where something in it does."""
    held: list[Any] = [1]
    held.append(held)
    before = parts(Holder(held), x)
    assert not changed(before, parts(Holder(held), x))
    held[0] = 2
    assert changed(before, parts(Holder(held), x)) == {"model"}


def test_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index has the digests of files for other processes, until one changes; what is just new is read again."""
    folder, index = tmp_path / "package_of_this_test", tmp_path / "sources.json"
    (folder / "inner").mkdir(parents=True)
    files = [folder / "__init__.py", folder / "inner" / "a.py", folder / "notes.txt"]
    for file in files:
        file.write_text("1")
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module(folder.name)
    package.__path__.append(
        str(folder / "inner")
    )  # as that of opgraft, in which a file counts once

    def told() -> tuple[str, int]:
        found = Sources(index)
        digest = found.package(folder.name)
        found.keep()
        return digest, len(json.loads(index.read_text())) if index.exists() else 0

    before = told()
    assert before[1] == 0
    monkeypatch.setattr(sources, "_SETTLED", -(10**12))
    for harm in ("", "{", "[]", None):  # nothing, damaged, and as it was left
        if harm is not None:
            index.write_text(harm)
        assert told() == (before[0], 1)
    known = json.loads(index.read_text())
    index.write_text(json.dumps({path: [*state[:-1], "another"] for path, state in known.items()}))
    remembered = told()[0]
    assert remembered != before[0]
    files[2].write_text("2")
    assert told()[0] == remembered
    files[1].write_text("22")
    assert told()[0] not in (before[0], remembered)


PASSING = """
from opgraft import GraphPass
class Own(GraphPass):
    name = "own"
    def run(self, module, model):
        return {0}, {0}
"""


class Numbered(GraphPass):
    """A pass with a number of its own. It is never run here."""

    name: ClassVar[str] = "numbered"

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        raise NotImplementedError


def test_classes_and_objects_of_passes_are_in_the_key(x: Tensor, tmp_path: Path) -> None:
    """An object counts by its class and its state: each compilation asks for the lock of its key."""
    locks = []
    for given in (Numbered, Numbered(1), Numbered(2), Numbered(1)):
        config = CompilationConfig(
            level=2, cache=True, cache_folder=str(tmp_path), user_passes=[given]
        )
        with pytest.raises(CompilationError, match="planted"):
            opgraft.compile(Failing().eval(), config, args=(x,))
        locks.append(len(list(tmp_path.glob("*.lock"))))
    assert locks == [1, 2, 3, 3]


def test_passes_of_users_are_in_the_key(
    x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a process that has not imported them before: each run asks for the lock of another key."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name, folder = "pass_of_this_test", tmp_path / "cache"
    config = CompilationConfig(
        level=2, cache=True, cache_folder=str(folder), user_passes=[f"{name}:Own"]
    )
    for count in (1, 2):
        (tmp_path / f"{name}.py").write_text(PASSING.format(count))
        monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(CompilationError, match="planted"):
            opgraft.compile(Failing().eval(), config, args=(x,))
        assert len(list(folder.glob("*.lock"))) == count
