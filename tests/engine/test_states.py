"""Models whose layers carry a state: the right tokens, whatever else is in the batch, and slots that are clean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.engine.core import EngineCore
from opgraft.engine.runner.model_runner import ModelRunner
from opgraft.engine.schedule.state_slots import StateSlots
from opgraft.engine.step import Step
from opgraft.errors import ConfigError, LayerError, RequestError
from opgraft.models import load_model
from opgraft.ops.attention import AttentionBatch, attending
from opgraft.ops.attention.decoder import attention_layers
from opgraft.ops.state_space.layer import state_layers
from support import engines
from support.engines import engine, expect_right, news, plain_logits, prompts, recorded, serve
from support.random_decoders import HYBRIDS, hybrid


@pytest.fixture(params=list(HYBRIDS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A small model of transformers whose checkpoint is in the folder."""
    return hybrid(request.param, tmp_path)


def test_tokens_are_right_beside_others(model: Any, tmp_path: Path) -> None:
    """Prompts of several lengths, more than run at once and in chunks, have the tokens that transformers finds."""
    given = [
        recorded(f"r{number}", prompt) for number, prompt in enumerate(prompts(5, 1, 17, 9, 30, 3))
    ]
    core = engine(tmp_path, max_num_batched_tokens=11)
    serve(core, [request for request, _ in given])
    for request, recorder in given:
        expect_right(model, request, recorder)
    expect_states_free(core)


def test_logits_are_those_of_transformers(model: Any, tmp_path: Path) -> None:
    """Alone and behind another one, a prompt has the logits within 1e-5."""
    ours = load_model(engines.settings(tmp_path))
    first, second = prompts(23, 7)
    expected = plain_logits(model, first[:1], [*first[1:], 0])
    blocks = torch.arange(4).reshape(2, 2)
    device = next(ours.parameters()).device
    caches = {
        name: torch.zeros(layer.kv_cache_shape(4, 16), device=device)
        for name, layer in attention_layers(ours).items()
    }
    batch = AttentionBatch.of_sequences([7, 23], block_table=blocks, caches=caches, device=device)
    with torch.inference_mode():
        ids = torch.tensor([*second, *first], device=device)
        positions = torch.cat([torch.arange(7), torch.arange(23)]).to(device)
        with attending(batch):
            beside = ours.compute_logits(ours(ids, positions))[7:]
        alone = ours.compute_logits(ours(ids[7:], positions[7:]))
    for found in (alone, beside):
        torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_a_prefix_is_found_with_its_state(model: Any, tmp_path: Path) -> None:
    """A prompt that begins as another did goes on from the state at the end of a block, and none is found elsewhere."""
    core = engine(tmp_path)
    long, more = prompts(18, 9)
    given = [
        recorded("a", long),
        recorded("b", [*long[:17], *more]),
        recorded("c", [*long[:9], *more]),
    ]
    for request, recorder in given:
        serve(core, [request])
        expect_right(model, request, recorder)
    assert [request.num_cached for request, _ in given] == [0, 16, 0]
    expect_states_free(core)


@pytest.mark.parametrize("kept", [True, False])
def test_a_slot_is_zeroed_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """A sequence in a slot that another had gets its own tokens; a runner that does not zero it is found out."""
    model = hybrid("mamba2", tmp_path)
    if kept:
        monkeypatch.setattr(ModelRunner, "_move_states", lambda self, step: None)
    core = engine(tmp_path, max_num_seqs=1)
    given = [recorded(f"r{number}", prompt) for number, prompt in enumerate(prompts(9, 2, 1, 3))]
    for request, _ in given:
        serve(core, [request])
    wrong = 0
    for request, recorder in given:
        try:
            expect_right(model, request, recorder)
        except AssertionError:
            wrong += 1
    assert bool(wrong) is kept


def test_requests_wait_for_states(model: Any, tmp_path: Path) -> None:
    """With fewer slots than may run at once, the others wait, and all have their tokens."""
    core = stateful(tmp_path, num_states=2)
    given = [recorded(f"r{number}", prompt) for number, prompt in enumerate(prompts(6, 9, 13, 4))]
    core.add(request for request, _ in given)
    most = 0
    for output in news(core):
        assert output.error is None
        most = max(most, len(core.scheduler.running))
    assert most == 2
    for request, recorder in given:
        expect_right(model, request, recorder)


@pytest.mark.parametrize("name", ["lfm2", "bamba", "plamo2"])
def test_a_preempted_sequence_begins_with_its_own_state(name: str, tmp_path: Path) -> None:
    """Where blocks run out, sequences give theirs and their states back, and have the right tokens in the end."""
    model = hybrid(name, tmp_path)
    core = engine(tmp_path, num_blocks=20, max_model_len=40)
    given = [recorded(f"r{number}", prompt, 30) for number, prompt in enumerate(prompts(9, 8, 7))]
    serve(core, [request for request, _ in given])
    assert core.counters.preemptions
    for request, recorder in given:
        expect_right(model, request, recorder)


@pytest.mark.parametrize("length", [9, 10, 11])
def test_a_preempted_sequence_goes_on_where_it_was(model: Any, tmp_path: Path, length: int) -> None:
    """Preempted by another one that takes little room, a sequence computes nothing of what it had computed again."""
    given = engines.settings(tmp_path, max_num_seqs=1, policy="priority")
    core = EngineCore(engines.replaced(given, cache={"num_states": 6}))
    first, second = prompts(length, 5)
    low, of_low = recorded("low", first, 20)
    high, of_high = recorded("high", second, 6)
    low.priority = 1
    core.add([low])
    for _ in range(8):
        core.step()
    done = low.num_computed
    steps: list[tuple[int, int]] = []
    schedule = core.scheduler.schedule

    def noting() -> Step:
        step = schedule()
        steps.extend(
            (each.start, each.count) for each in step.sequences if each.request_id == "low"
        )
        return step

    core.scheduler.schedule = noting
    serve(core, [high])
    assert core.counters.preemptions == 1
    assert steps[0] == (done, 1)
    for request, recorder in ((low, of_low), (high, of_high)):
        expect_right(model, request, recorder)


def test_a_failed_step_leaves_no_state_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step was to copy is not found after it failed: the next request computes its prompt itself."""
    model = hybrid("mamba", tmp_path)
    core = engine(tmp_path, max_num_batched_tokens=8)
    [prompt] = prompts(21)
    execute = ModelRunner.execute

    def failing(self: ModelRunner, step: Step) -> Any:
        if any(source is not None for source, _ in step.states):
            raise RuntimeError("the device is gone")
        return execute(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "execute", failing)
        core.add([recorded("a", prompt)[0]])
        assert [output.error is None for output in news(core)] == [False]
    request, recorder = recorded("b", prompt)
    serve(core, [request])
    assert request.num_cached == 0
    expect_right(model, request, recorder)


def test_a_sequence_that_is_not_a_number(model: Any, tmp_path: Path) -> None:
    """It fails alone: those in its batch, and the next in its slot, have their tokens."""
    core = engine(tmp_path)
    sick, *well = prompts(22, 28, 9, 17)
    core.executor.worker.runner.model.get_submodule("model.embed_tokens").register_forward_hook(
        lambda module, given, found: found.masked_fill((given[0] == 98)[:, None], torch.nan)
    )
    given = [
        recorded(f"r{number}", [each for each in prompt if each != 98])
        for number, prompt in enumerate(well)
    ]
    core.add(
        [recorded("sick", [*sick[:5], 98, *sick[5:]])[0], *(request for request, _ in given[:2])]
    )
    assert [output.request_id for output in news(core) if output.error] == ["sick"]
    serve(core, [given[2][0]])
    for request, recorder in given:
        expect_right(model, request, recorder)


def test_no_room_for_one_state(tmp_path: Path) -> None:
    """A cache that has no room for a state is refused, in numbers."""
    hybrid("mamba2", tmp_path)
    given = engines.settings(tmp_path)
    given = engines.replaced(given, cache={"num_blocks": None, "memory_bytes": 1000})
    with pytest.raises(
        ConfigError, match=r"has 1000 bytes for states of sequences, and one takes \d+: raise"
    ):
        EngineCore(given)


def test_copies_make_room_for_sequences() -> None:
    """A copy is found until a sequence needs its slot, and what it held is copied before it is given away."""
    slots = StateSlots(2)
    slots.open("a", None)
    slots.keep("a", "key")
    assert slots.find("key") == 1
    slots.close("a")
    slots.open("b", slots.find("key"))
    assert slots.take_moves() == ((None, 0), (0, 1), (1, 0))
    slots.open("c", slots.find("key"))
    assert slots.find("key") is None
    assert slots.take_moves() == ()
    assert not slots.num_free
    with pytest.raises(RequestError, match="0 of 2 are free"):
        slots.open("d", None)


def test_a_batch_without_the_layers_states(tmp_path: Path) -> None:
    """A layer says so if the batch has states, and none or other ones for it."""
    hybrid("lfm2", tmp_path)
    core = engine(tmp_path)
    runner = core.executor.worker.runner
    layers = state_layers(runner.model)
    name, layer = next(iter(layers.items()))
    core.add([recorded("a", [5, 6, 7])[0]])
    runner.batch.states.pop(name)
    [failed] = [output for output in core.step() if output.error]
    assert f"layer {name!r} keeps a state" in str(failed.error)
    layer.prefix = next(iter(list(layers)[1:]))
    with pytest.raises(LayerError, match="as another one of the model that keeps a state"):
        state_layers(runner.model)


def stateful(folder: Path, **cache: Any) -> EngineCore:
    """An engine with settings of its cache."""
    return EngineCore(engines.replaced(engines.settings(folder), cache=cache))


def expect_states_free(core: EngineCore) -> None:
    states = core.cache.states
    assert states.num_free == states.pool.num_blocks == 2 * core.scheduler.config.max_num_seqs
    assert not states._slots
