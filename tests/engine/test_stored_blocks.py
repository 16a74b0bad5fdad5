"""Blocks in a store are those of a later engine, and whatever happens to them, no token changes."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.runner.stored_blocks import StoredBlocks
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import ConfigError
from safetensors.torch import load_file, save_file
from support.engines import BLOCK, prompts, replaced, serve, settings
from support.random_decoders import DECODERS, written

LENGTH = 33
"""Of a prompt: eight full blocks and a token."""

FULL = LENGTH // BLOCK * BLOCK


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored") / "llama"
    written("Llama", folder)
    return folder


@pytest.fixture(autouse=True)
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the key that signs the blocks of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "opgraft" / "blocks.key"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


class Asked(NamedTuple):
    """An answer, the number of its tokens that came from the store, and the names of its blocks."""

    tokens: list[int]
    restored: int
    names: list[str]


def engine_with(folder: Path, store: object, **sections: dict[str, Any]) -> EngineCore:
    cache = {"store": str(store), **sections.pop("cache", {})}
    return EngineCore(replaced(settings(folder), cache=cache, **sections))


def asked(core: EngineCore, prompt: Sequence[int], **options: Any) -> Asked:
    before = core.counters.restored_tokens
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    request = Request("a", prompt, params, **options)
    serve(core, [request])
    core.executor.call_all("finish_saving")
    names = [digest.hex() for digest in request.block_hashes]
    return Asked(request.output, core.counters.restored_tokens - before, names)


def asked_anew(folder: Path, store: object, prompt: Sequence[int], **sections: Any) -> Asked:
    """Ask an engine of its own, and end it."""
    core = engine_with(folder, store, **sections)
    try:
        return asked(core, prompt)
    finally:
        core.shutdown()


def file_of(store: Path, name: str) -> Path:
    (found,) = store.rglob(name)
    return found


@pytest.mark.parametrize(
    ("family", "cache"),
    [
        ("llama", {"dtype": "int8"}),
        ("mistral", {}),
        ("gemma3", {"block_size": 8}),
        ("deepseek v2", {}),
    ],
)
def test_a_later_engine_goes_on_where_the_first_one_was(
    tmp_path: Path, store: Path, family: str, cache: dict[str, Any]
) -> None:
    """With windows and without, the tokens are those of the first engine, and all full blocks come from the store."""
    name, values = DECODERS[family]
    written(name, tmp_path / "model", **values)
    (prompt,) = prompts(LENGTH)
    first = asked_anew(tmp_path / "model", store, prompt, cache=cache)
    again = asked_anew(tmp_path / "model", store, prompt, cache=cache)
    assert again.tokens == first.tokens
    assert first.restored == 0
    windows = [] if family in ("llama", "deepseek v2") else [values["sliding_window"]]
    seen = FULL if not windows or family == "gemma3" else windows[0] // BLOCK * BLOCK
    assert again.restored >= seen


def test_ranks_keep_their_own_parts(folder: Path, store: Path) -> None:
    """Two workers restore what both have stored, and a rank without an entry keeps the others from it."""
    (prompt,) = prompts(LENGTH)
    core = engine_with(folder, store, parallel={"tensor": 2})
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = []
    try:
        for lost in (0, 0, 1):
            of_ranks = sorted(each for each in store.iterdir() if each.is_dir())
            for folder_of_rank in of_ranks[:lost]:
                shutil.rmtree(folder_of_rank)
            core.cache.clear()
            before = core.counters.restored_tokens
            request = Request("a", prompt, params)
            core.add([request])
            while core.has_work:
                core.step()
            core.executor.call_all("finish_saving")
            found.append((request.output, core.counters.restored_tokens - before))
    finally:
        core.shutdown()
    tokens = found[0][0]
    assert len(of_ranks) == 2
    assert found == [(tokens, 0), (tokens, FULL), (tokens, 0)]


def test_an_answer_is_kept_too(folder: Path, store: Path) -> None:
    """The next turn of a chat begins with the former prompt and its answer."""
    (prompt,) = prompts(LENGTH)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    core = engine_with(folder, store)
    first = Request("a", prompt, params)
    serve(core, [first])
    core.shutdown()
    turn = [*prompt, *first.output, 7]
    plain = asked_anew(folder, store.with_name("other"), turn)
    again = asked_anew(folder, store, turn)
    # Nobody has computed the last token of the answer.
    assert again.restored == (len(turn) - 2) // BLOCK * BLOCK
    assert again.tokens == plain.tokens


def flipped(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "removed": lambda file, other: file.unlink(),
    "empty": lambda file, other: file.write_bytes(b""),
    "cut within the signature": lambda file, other: os.truncate(file, 9),
    "cut behind the signature": lambda file, other: os.truncate(file, 32),
    "cut in the middle": lambda file, other: os.truncate(file, file.stat().st_size // 2),
    "a byte less": lambda file, other: os.truncate(file, file.stat().st_size - 1),
    "a byte more": lambda file, other: file.write_bytes(file.read_bytes() + b"\0"),
    "twice": lambda file, other: file.write_bytes(2 * file.read_bytes()),
    "a bit of the signature": lambda file, other: flipped(file, 0),
    "the first bit of the content": lambda file, other: flipped(file, 32),
    "the last bit of the content": lambda file, other: flipped(file, -1),
    "zeros": lambda file, other: file.write_bytes(bytes(file.stat().st_size)),
    "another entry": lambda file, other: shutil.copyfile(other, file),
    "a link to another entry": lambda file, other: (file.unlink(), file.symlink_to(other)),
    "a folder": lambda file, other: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("place", [0, 3, FULL // BLOCK - 1])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_a_missing_one(
    folder: Path, store: Path, damage: str, place: int
) -> None:
    """The blocks before it are taken, the others are computed, and the tokens stay the same."""
    (prompt,) = prompts(LENGTH)
    core = engine_with(folder, store)
    first = asked(core, prompt)
    core.cache.clear()
    DAMAGE[damage](file_of(store, first.names[place]), file_of(store, first.names[1 - place]))
    again = asked(core, prompt)
    assert (again.tokens, again.restored) == (first.tokens, place * BLOCK)
    if damage != "a folder":
        core.cache.clear()
        assert asked(core, prompt).restored == FULL, "the computed block was not written again"


def changed_weight(folder: Path, target: Path) -> Path:
    """A copy of a checkpoint with one other number, and the same times and sizes of files."""
    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    state = file.stat()
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.k_proj.weight"][0, 0] += 1
    save_file(tensors, file, {"format": "pt"})
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    return target


def test_other_weights_have_other_blocks(folder: Path, store: Path, tmp_path: Path) -> None:
    """One other number of the weights is enough, under the same time of the file."""
    (prompt,) = prompts(LENGTH)
    asked_anew(folder, store, prompt)
    other = changed_weight(folder, tmp_path / "other")
    assert asked_anew(other, store, prompt).restored == 0
    assert asked_anew(folder, store, prompt).restored == FULL


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"dtype": "bfloat16"}},
        {"model": {"max_model_len": 60}},
        {"cache": {"dtype": "int8"}},
        {"cache": {"block_size": 8}},
        {"quantization": {"method": "int8"}},
        {"compilation_config": {"level": 1}},
    ],
    ids=str,
)
def test_other_settings_have_other_blocks(folder: Path, store: Path, sections: Any) -> None:
    """Blocks of other numbers, or of another size, are not found."""
    (prompt,) = prompts(LENGTH)
    asked_anew(folder, store, prompt)
    assert asked_anew(folder, store, prompt, **sections).restored == 0


def test_tenants_share_no_blocks(folder: Path, store: Path) -> None:
    """A request finds the blocks of its own salt alone."""
    (prompt,) = prompts(LENGTH)
    core = engine_with(folder, store)
    asked(core, prompt, cache_salt="one")
    core.cache.clear()
    assert asked(core, prompt, cache_salt="two").restored == 0
    core.cache.clear()
    assert asked(core, prompt).restored == 0
    core.cache.clear()
    assert asked(core, prompt, cache_salt="one").restored == FULL


def test_a_key_of_others_opens_nothing(folder: Path, store: Path, own_key: Path) -> None:
    """Entries that another key has signed are missing, and a key of the settings is the one that counts."""
    (prompt,) = prompts(LENGTH)
    asked_anew(folder, store, prompt)
    assert own_key.stat().st_mode & 0o777 == 0o600
    shared = own_key.with_name("shared.key")
    shared.write_bytes(bytes(range(32)))
    shared.chmod(0o600)
    with_key = {"cache": {"store_key": str(shared)}}
    assert asked_anew(folder, store, prompt, **with_key).restored == 0
    own_key.unlink()
    assert asked_anew(folder, store, prompt, **with_key).restored == FULL


def test_the_least_recently_used_blocks_go_first(folder: Path, store: Path) -> None:
    """The folder stays within its limit, and a prompt that was asked again stays in it."""
    first, second, third = prompts(LENGTH, LENGTH, LENGTH)
    core = engine_with(folder, store)
    names = asked(core, first).names
    size = file_of(store, names[0]).stat().st_size
    asked(core, second)
    core.cache.clear()
    assert asked(core, first).restored == FULL
    core.shutdown()
    limit = size * 2 * len(names)
    core = engine_with(folder, store, cache={"store_bytes": limit})
    asked(core, third)
    assert sum(each.stat().st_size for each in store.rglob("*") if each.is_file()) <= limit
    core.cache.clear()
    assert asked(core, first).restored == FULL
    core.cache.clear()
    assert asked(core, second).restored < FULL


def test_a_store_in_memory(folder: Path) -> None:
    """A URL of fsspec serves as well: blocks outlive a cache that is too small for them."""
    (prompt,) = prompts(LENGTH)
    core = engine_with(folder, "memory://test-of-stored-blocks")
    first = asked(core, prompt)
    core.cache.clear()
    again = asked(core, prompt)
    assert (again.tokens, again.restored) == (first.tokens, FULL)


def test_a_small_cache_takes_what_it_has_room_for(folder: Path, store: Path) -> None:
    """Restoring takes free blocks only, beside a request that runs."""
    long, other = prompts(LENGTH, LENGTH)
    first = asked_anew(folder, store, long)
    core = engine_with(folder, store, cache={"num_blocks": 16})
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    requests = [Request(name, prompt, params) for name, prompt in (("b", other), ("a", long))]
    serve(core, requests)
    assert requests[1].output == first.tokens
    assert 0 < core.counters.restored_tokens <= FULL


def test_engines_that_write_and_remove_at_once(folder: Path, store: Path) -> None:
    """Two engines serve the same prompts while entries vanish, and every answer is that of a quiet one."""
    given = prompts(LENGTH, 29, 21, LENGTH)
    expected = [asked_anew(folder, store.with_name("quiet"), prompt).tokens for prompt in given]
    engines = [engine_with(folder, store) for _ in range(2)]
    found: list[list[list[int]]] = [[], []]
    ended = threading.Event()

    def remove() -> None:
        while not ended.wait(0.001):
            for file in list(store.rglob("*"))[::5]:
                if file.is_file():
                    os.truncate(file, file.stat().st_size // 2) if len(
                        file.name
                    ) % 2 else file.unlink(missing_ok=True)

    def ask(number: int) -> None:
        for _ in range(3):
            engines[number].cache.clear()
            found[number] = [asked(engines[number], prompt).tokens for prompt in given]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    remover = threading.Thread(target=remove)
    for thread in (*threads, remover):
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    remover.join()
    assert found == [expected, expected]


def test_blocks_of_a_failed_request_do_not_stay(
    folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that gives NaN leaves nothing in the store that a later request would find."""
    (prompt,) = prompts(LENGTH)
    core = engine_with(folder, store, scheduler={"max_num_batched_tokens": 16})
    runner = core.executor.worker.runner
    logits = runner._logits
    monkeypatch.setattr(runner, "_logits", lambda *args: logits(*args) * float("nan"))
    core.add([Request("a", prompt, SamplingParams(temperature=0, max_tokens=6))])
    errors = []
    while core.has_work:
        errors += [output.error for output in core.step() if output.error]
    core.executor.call_all("finish_saving")
    assert errors
    assert not [each for each in store.rglob("*") if each.is_file()]


def test_a_folder_that_fails_stops_no_request(
    folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk is told once, and requests go on."""
    (prompt,) = prompts(LENGTH)
    plain = asked_anew(folder, store.with_name("other"), prompt)
    core = engine_with(folder, store)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StoredBlocks, "_write", full)
    assert asked(core, prompt).tokens == plain.tokens
    assert asked(core, prompt[:20]).tokens
    told = [each.getMessage() for each in caplog.records if "No space left" in each.getMessage()]
    assert len(told) == 1


def test_settings_that_cannot_be_kept(folder: Path, store: Path, tmp_path: Path) -> None:
    """Each says what is wrong, and what to do."""
    with pytest.raises(ConfigError, match="prefix_reuse is off"):
        engine_with(folder, store, cache={"prefix_reuse": False})
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(ConfigError, match="name a folder that this process may write to"):
        engine_with(folder, in_the_way / "store")
    with pytest.raises(ConfigError, match="expected 32 or more"):
        engine_with(folder, store, cache={"store_key": str(in_the_way)})


def test_a_model_with_states_has_no_store(tmp_path: Path, store: Path) -> None:
    """The state of a sequence is in no block."""
    written("Mamba2", tmp_path / "model", num_heads=6, head_dim=16, state_size=8, n_groups=1)
    with pytest.raises(ConfigError, match="keep a state of each sequence"):
        engine_with(tmp_path / "model", store)


def test_files_that_change_during_the_load_have_no_name(
    folder: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of which nobody knows from which files they are get no blocks."""
    from opgraft.engine.runner.model_runner import ModelRunner

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    load = ModelRunner.load_model

    def loading(runner: ModelRunner) -> None:
        load(runner)
        (copy / "model.safetensors").touch()

    monkeypatch.setattr(ModelRunner, "load_model", loading)
    with pytest.raises(ConfigError, match="changed while the model was loaded"):
        engine_with(copy, store)
