"""Blocks in a store are those of a later engine, and whatever happens to them, no token changes."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from opgraft.compilation.graph_pass import GraphPass, PassOutcome
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.runner import stored_blocks
from opgraft.engine.runner.model_runner import ModelRunner
from opgraft.engine.runner.stored_blocks import StoredBlocks
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.workers import worker
from opgraft.errors import ConfigError, EngineError
from safetensors.torch import load_file, save_file
from support.engines import BLOCK, prompts, recorded, replaced, serve, settings
from support.random_decoders import DECODERS, written
from torch import Tensor, fx, nn

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
    """An answer, how many of its tokens came from the store, the names of its blocks, and its first logits."""

    tokens: list[int]
    restored: int
    names: list[str]
    logits: Tensor


def engine_with(folder: Path, store: object, **sections: dict[str, Any]) -> EngineCore:
    cache = {"store": str(store), **sections.pop("cache", {})}
    return EngineCore(replaced(settings(folder), cache=cache, **sections))


def asked(core: EngineCore, prompt: Sequence[int], **options: Any) -> Asked:
    before = core.counters.restored_tokens
    given, recorder = recorded("a", prompt, 6)
    request = Request("a", prompt, given.params, **options)
    serve(core, [request])
    stored = store_of(core)
    stored.finish(60)
    names = [stored._name(digest) for digest in request.block_hashes]
    restored = core.counters.restored_tokens - before
    return Asked(request.output, restored, names, recorder.logits[()].float())


def expect_same(answer: Asked, other: Asked) -> None:
    assert answer.tokens == other.tokens
    torch.testing.assert_close(answer.logits, other.logits, rtol=0, atol=1e-4)


def store_of(core: EngineCore) -> StoredBlocks:
    found: StoredBlocks = core.executor.worker.store
    return found


def asked_anew(folder: Path, store: object, prompt: Sequence[int], **sections: Any) -> Asked:
    """Ask an engine of its own, and end it."""
    core = engine_with(folder, store, **sections)
    try:
        return asked(core, prompt)
    finally:
        core.shutdown()


def files_in(store: Path) -> list[Path]:
    return [each for each in store.rglob("*") if each.is_file()]


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
    expect_same(again, first)
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
            of_ranks = sorted(store.glob("*/*"))
            for folder_of_rank in of_ranks[:lost]:
                shutil.rmtree(folder_of_rank)
            core.cache.clear()
            before = core.counters.restored_tokens
            request = Request("a", prompt, params)
            core.add([request])
            while core.has_work:
                core.step()
            found.append((request.output, core.counters.restored_tokens - before))
            while len(files_in(store)) < 2 * (FULL // BLOCK + 1):
                time.sleep(0.01)
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
    expect_same(again, plain)


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
    "a pipe": lambda file, other: (file.unlink(), os.mkfifo(file)),
    "a huge file": lambda file, other: os.truncate(file, 1 << 40),
    "a link to a device": lambda file, other: (file.unlink(), file.symlink_to("/dev/zero")),
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
    expect_same(again, first)
    assert again.restored == place * BLOCK
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


class NoChange(GraphPass):
    """A pass of a user, which might change numbers."""

    name: ClassVar[str] = "no_change"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        return PassOutcome(0, 0)


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"dtype": "bfloat16"}},
        {"model": {"max_model_len": 60}},
        {"quantization": {"method": "int8"}},
        {"compilation_config": {"level": 1}},
        {"compilation_config": {"level": 1, "user_passes": [NoChange]}},
    ],
    ids=str,
)
def test_other_settings_have_other_blocks(folder: Path, store: Path, sections: Any) -> None:
    """Under other numbers, blocks of the same size are not found, though they are with the same settings again."""
    (prompt,) = prompts(LENGTH)
    of_codes = {"dtype": "int8"}
    asked_anew(folder, store, prompt, cache=of_codes)
    assert asked_anew(folder, store, prompt, cache=of_codes, **sections).restored == 0
    assert asked_anew(folder, store, prompt, cache=of_codes, **sections).restored == FULL


def test_an_edited_config_has_other_blocks(folder: Path, store: Path, tmp_path: Path) -> None:
    """Also if the checkpoint is named by its file of weights."""
    (prompt,) = prompts(LENGTH)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    weights = copy / "model.safetensors"
    asked_anew(weights, store, prompt)
    config = copy / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    assert asked_anew(weights, store, prompt).restored == 0


def test_blocks_of_an_update_that_failed_are_not_saved(
    folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a step without a token for a request, other tokens take its blocks, and are not stored as its own."""
    first, second = prompts(LENGTH, LENGTH)
    plain = asked_anew(folder, store.with_name("quiet"), first)
    core = engine_with(folder, store)
    run = core._run

    def without_a_token() -> Any:
        result = run()
        result.tokens.pop("b")
        return result

    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    core.add([Request("a", first, params), Request("b", second, params)])
    monkeypatch.setattr(core, "_run", without_a_token)
    while core.has_work:
        core.step()
    monkeypatch.setattr(core, "_run", run)
    asked(core, second)
    expect_same(asked_anew(folder, store, first), plain)


def test_foreign_numbers_would_change_the_answer(
    folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the other tests can fail: without signatures, the blocks of another prompt give other tokens."""
    first, second = prompts(LENGTH, LENGTH)
    core = engine_with(folder, store)
    names, others = asked(core, first).names, asked(core, second).names
    plain = asked(core, first)
    monkeypatch.setattr(stored_blocks.hmac, "compare_digest", lambda *given: True)
    for name, other in zip(names[: FULL // BLOCK], others, strict=False):
        shutil.copyfile(file_of(store, other), file_of(store, name))
    core.cache.clear()
    again = asked(core, first)
    assert again.restored == FULL
    with pytest.raises(AssertionError):
        expect_same(again, plain)


def test_as_many_blocks_are_saved_as_may_wait(
    folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt that is too long for the queue of the writer, the first blocks are saved."""
    (prompt,) = prompts(LENGTH)
    core = engine_with(folder, store)
    monkeypatch.setattr(stored_blocks, "_MOST_WAITING", 5 * store_of(core)._entry_bytes)
    names = asked(core, prompt).names
    saved = {each.name for each in files_in(store)}
    assert saved.issuperset(names[:5])
    assert not saved.intersection(names[5 : FULL // BLOCK])


def test_removed_blocks_are_written_again_at_once(folder: Path, store: Path) -> None:
    """One request is enough to fill a folder that was emptied."""
    (prompt,) = prompts(LENGTH)
    core = engine_with(folder, store)
    asked(core, prompt)
    for _ in range(2):
        shutil.rmtree(next(store.glob("*/*")))
        core.cache.clear()
        assert asked(core, prompt).restored == 0
    core.cache.clear()
    assert asked(core, prompt).restored == FULL


def test_workers_that_are_lost_stop_no_look(folder: Path, store: Path) -> None:
    """A failing call of the workers leaves a request to be computed, and takes no block of the pool."""
    (prompt,) = prompts(LENGTH)
    first = asked_anew(folder, store, prompt)
    core = engine_with(folder, store)
    call_all = core.stored._call_all

    def failing(method: str, *given: object) -> Any:
        if method == "load_blocks":
            raise EngineError("lost")
        return call_all(method, *given)

    core.stored._call_all = failing
    expect_same(asked(core, prompt), first)


def test_a_runner_with_a_cache_of_its_own_has_no_store(
    folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless its class says that blocks are in the caches."""

    class OwnCache(ModelRunner):
        def allocate_cache(self, num_blocks: int, num_states: int = 0) -> None:
            super().allocate_cache(num_blocks, num_states)

    monkeypatch.setattr(worker, "ModelRunner", OwnCache)
    with pytest.raises(ConfigError, match="OwnCache may keep blocks"):
        engine_with(folder, store)
    OwnCache.stores_blocks = True
    engine_with(folder, store)


def test_nobody_else_reads_the_folder(folder: Path, store: Path) -> None:
    """It is made for its user alone, and a folder that others may read is refused."""
    core = engine_with(folder, store)
    asked(core, prompts(LENGTH)[0])
    (own,) = store.iterdir()
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        engine_with(folder, store)


def test_passwords_are_not_told(folder: Path) -> None:
    """A URL may hold a name and a password."""
    with pytest.raises(ConfigError) as caught:
        engine_with(folder, "nonsense://me:secret@host/folder")
    assert "secret" not in str(caught.value)


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


@pytest.mark.parametrize("again", ["from the store", "from the cache"])
def test_the_least_recently_used_blocks_go_first(folder: Path, store: Path, again: str) -> None:
    """The folder stays within its limit. A prompt that was asked again stays in it, and files of others too."""
    first, second, third = prompts(LENGTH, LENGTH, LENGTH)
    foreign = [store / ("0" * 64), store / "models" / ("0" * 64)]
    for file in foreign:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(1 << 20))
        os.utime(file, (0, 0))
    core = engine_with(folder, store)
    names = asked(core, first).names
    size = file_of(store, names[0]).stat().st_size
    asked(core, second)
    if again == "from the store":
        core.cache.clear()
    assert asked(core, first).restored == (FULL if again == "from the store" else 0)
    core.shutdown()
    limit = size * 2 * len(names)
    core = engine_with(folder, store, cache={"store_bytes": limit})
    asked(core, third)
    assert all(each.exists() for each in foreign)
    assert sum(each.stat().st_size for each in files_in(store) if each not in foreign) <= limit
    core.cache.clear()
    assert asked(core, first).restored == FULL
    core.cache.clear()
    assert asked(core, second).restored < FULL


def test_a_use_is_later_than_a_writing_before_it(folder: Path, store: Path) -> None:
    """Files of one moment keep their order, though the system's time of files goes on in steps."""
    core = engine_with(folder, store)
    used, written = store / "used", store / "written"
    for each in (used, written):
        each.parent.mkdir(parents=True, exist_ok=True)
        each.touch()
    for _ in range(100):
        written.write_bytes(b"new")
        store_of(core)._touch(str(used))
        assert used.stat().st_mtime_ns > written.stat().st_mtime_ns


def test_a_store_in_memory(folder: Path) -> None:
    """A URL of fsspec serves as well: blocks outlive a cache that is too small for them."""
    (prompt,) = prompts(LENGTH)
    core = engine_with(folder, "memory://test-of-stored-blocks")
    first = asked(core, prompt)
    core.cache.clear()
    again = asked(core, prompt)
    expect_same(again, first)
    assert again.restored == FULL


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
    restored = [0, 0]
    ended = threading.Event()

    def remove() -> None:
        for turn in itertools.count():
            if ended.wait(0.02):
                return
            for file in files_in(store)[-1:]:
                with suppress(FileNotFoundError):
                    os.truncate(file, 99) if turn % 2 else file.unlink()

    def ask(number: int) -> None:
        for _ in range(3):
            engines[number].cache.clear()
            found[number] = [asked(engines[number], prompt).tokens for prompt in given]
            restored[number] = engines[number].counters.restored_tokens

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    remover = threading.Thread(target=remove)
    for thread in (*threads, remover):
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    remover.join()
    assert found == [expected, expected]
    assert sum(restored) > 0


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_numbers_that_are_not_finite_are_not_stored(folder: Path, store: Path, dtype: str) -> None:
    """A prompt whose keys are NaN fails, and its first chunks leave nothing in the store."""
    good, bad = prompts(LENGTH, LENGTH)
    core = engine_with(
        folder, store, scheduler={"max_num_batched_tokens": 16}, cache={"dtype": dtype}
    )
    asked(core, good)
    before = files_in(store)
    model = core.executor.worker.runner.model
    with torch.inference_mode():
        next(each for name, each in model.named_parameters() if "embed" in name).fill_(torch.nan)
    core.add([Request("a", bad, SamplingParams(temperature=0, max_tokens=6))])
    errors = []
    while core.has_work:
        errors += [output.error for output in core.step() if output.error]
    store_of(core).finish(60)
    assert errors
    assert files_in(store) == before != []


def test_windows_that_move_on_before_the_first_token(tmp_path: Path, store: Path) -> None:
    """In small chunks, blocks before the window serve other tokens soon, and keep their content in the store."""
    written("Mistral", tmp_path / "model", sliding_window=9, head_dim=16)
    long, other = prompts(45, 41)
    chunks = {"scheduler": {"max_num_batched_tokens": 8}, "cache": {"num_blocks": 12}}
    core = engine_with(tmp_path / "model", store, **chunks)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    serve(core, [Request("a", long, params), Request("b", other, params)])
    store_of(core).finish(60)
    for length in range(9, 45, 4):
        begun = [*long[:length], 5]
        plain = asked_anew(tmp_path / "model", tmp_path / f"other {length}", begun)
        again = asked_anew(tmp_path / "model", store, begun)
        assert again.restored > 0
        expect_same(again, plain)


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
    expect_same(asked(core, prompt), plain)
    assert asked(core, prompt[:20]).tokens
    told = [each.getMessage() for each in caplog.records if "No space left" in each.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize(("method", "restored"), [("_read", 2 * BLOCK), ("_count", 0)])
def test_a_folder_that_hangs_stops_no_request(
    folder: Path,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    restored: int,
) -> None:
    """Blocks that come too late are computed."""
    (prompt,) = prompts(LENGTH)
    plain = asked_anew(folder, store, prompt)
    late, is_over = plain.names[2], threading.Event()
    hanging = getattr(StoredBlocks, method)

    def hang(stored: StoredBlocks, given: Any) -> Any:
        if method == "_count" or given == late:
            is_over.wait()
        return hanging(stored, given)

    monkeypatch.setattr(StoredBlocks, method, hang)
    monkeypatch.setattr(stored_blocks, "_PATIENCE", 0.5)
    core = engine_with(folder, store)
    try:
        again = asked(core, prompt)
        core.cache.clear()
        begin = time.monotonic()
        once_more = asked(core, prompt)
        assert time.monotonic() - begin < 30
    finally:
        is_over.set()
        core.shutdown()
    expect_same(once_more, plain)
    # Nobody waits again for a folder that hangs.
    assert once_more.restored == 0
    expect_same(again, plain)
    assert again.restored == restored
    assert "reading takes more than 0.5 s" in caplog.text


def test_a_store_ends_with_its_engine(folder: Path, store: Path) -> None:
    """Neither a thread nor the memory of the cache is left."""
    (prompt,) = prompts(LENGTH)
    before = set(threading.enumerate())
    core = engine_with(folder, store)
    asked(core, prompt)
    stored = weakref.ref(store_of(core))
    threads = set(threading.enumerate()) - before
    assert {"opgraft-read-blocks", "opgraft-write-blocks"} <= {each.name for each in threads}
    core.shutdown()
    del core
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert stored() is None


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
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    load = ModelRunner.load_model

    def loading(runner: ModelRunner) -> None:
        load(runner)
        (copy / "model.safetensors").touch()

    monkeypatch.setattr(ModelRunner, "load_model", loading)
    with pytest.raises(ConfigError, match="changed while the model was loaded"):
        engine_with(copy, store)
