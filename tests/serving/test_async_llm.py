"""Streams of many readers: right tokens, nobody waits for ever, and who leaves costs nothing any more."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft import SamplingParams
from opgraft.errors import ConfigError, EngineError, InputError, RequestError
from opgraft.serving.async_llm import AsyncLLM
from opgraft.serving.llm import LLM
from opgraft.serving.outputs import RequestOutput
from support.random_decoders import written

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "block_size": 4,
    "cache.num_blocks": 128,
    "load.progress": False,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
}
LONG = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
PATIENCE = 60
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, trained: Any) -> Path:
    """A decoder of random weights with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("async") / "llama"
    written("Llama", folder, vocab_size=400, num_hidden_layers=2)
    trained.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def opened(checkpoint: Path, **settings: Any) -> AsyncLLM:
    return AsyncLLM(str(checkpoint), **{**SETTINGS, **settings})


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return [
        torch.randint(3, 400, (1 + 5 * i % 13,), generator=generator).tolist() for i in range(count)
    ]


def run(checkpoint: Path, use: Callable[[AsyncLLM], Awaitable[None]], **settings: Any) -> None:
    """Use a model in an event loop of its own, in limited time, and see that every block of the cache is free."""

    async def main() -> None:
        async with opened(checkpoint, **settings) as llm:
            await asyncio.wait_for(use(llm), PATIENCE)
        state = llm.stats()
        assert (state.running, state.waiting, state.blocks_used) == (0, 0, 0)

    asyncio.run(main())


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    *_, output = [each async for each in stream]
    return output


async def until_idle(llm: AsyncLLM, steps: int) -> None:
    """See that nothing runs any more after at most so many further steps."""
    first = llm.stats().counters.steps
    while llm.stats().blocks_used or llm.stats().waiting:
        assert llm.stats().counters.steps <= first + steps
        await asyncio.sleep(0)


def test_many_streams_have_the_tokens_of_the_offline_model(checkpoint: Path) -> None:
    """Twenty-four streams at once, of more requests than run at once, give what LLM gives, text and reasons too."""
    given, params = prompts(24), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = LLM(str(checkpoint), **SETTINGS).generate(given, params)

    async def use(llm: AsyncLLM) -> None:
        found = await asyncio.gather(*(last(llm.generate(prompt, params)) for prompt in given))
        for output, wanted in zip(found, expected, strict=True):
            assert output.finished
            assert output.outputs == wanted.outputs
            assert output.prompt_token_ids == wanted.prompt_token_ids

    run(checkpoint, use)


def test_outputs_are_cumulative_and_do_not_change(checkpoint: Path) -> None:
    """Each output begins with the one before, and stays as it was when it was read."""

    async def use(llm: AsyncLLM) -> None:
        seen = []
        async for output in llm.generate("the cat", LONG):
            seen.append((output, list(output.outputs[0].token_ids), output.outputs[0].text))
        assert len(seen[-1][1]) == 50
        for (_, tokens, text), (_, more, longer) in itertools.pairwise(seen):
            assert more[: len(tokens)] == tokens
            assert len(more) > len(tokens)
            assert longer.startswith(text)
        assert all(output.outputs[0].token_ids == tokens for output, tokens, _ in seen)
        assert [output.finished for output, _, _ in seen] == [False] * (len(seen) - 1) + [True]

    run(checkpoint, use)


def test_a_slow_reader_gets_the_newest(checkpoint: Path) -> None:
    """Who reads once in a while gets the state of now, the end included, and holds up nobody else."""

    async def use(llm: AsyncLLM) -> None:
        slow = llm.generate([5, 6], LONG)
        first = await anext(slow)
        assert len(first.outputs[0].token_ids) < 50
        await last(llm.generate([7, 8], LONG))
        await until_idle(llm, 60)
        assert [len(output.outputs[0].token_ids) async for output in slow] == [50]

    run(checkpoint, use)


async def closed() -> None:
    """Give the event loop time to close a generator that nobody has: it makes a task of that, which then runs."""
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("way", ["break", "aclose", "cancel", "lost"])
def test_leaving_the_iterator_aborts(checkpoint: Path, way: str) -> None:
    """The request is gone two steps later, its blocks are free, and its neighbour goes on."""

    async def leave(llm: AsyncLLM) -> None:
        if way == "break":
            async for _ in llm.generate([5, 6], LONG):
                break
            await closed()
        elif way == "aclose":
            async with aclosing(llm.generate([5, 6], LONG)) as stream:
                await anext(stream)
        elif way == "lost":
            # Nobody has it from here on. A search for garbage would take longer than the answer.
            await anext(llm.generate([5, 6], LONG))
            await closed()
        else:
            task = asyncio.create_task(last(llm.generate([5, 6], LONG)))
            while not llm.stats().running:
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def use(llm: AsyncLLM) -> None:
        await leave(llm)
        await until_idle(llm, steps=2)
        assert llm.stats().counters.finished["abort"] == 1
        assert len((await last(llm.generate([7, 8], LONG))).outputs[0].token_ids) == 50

    run(checkpoint, use)


def test_cancelled_at_any_moment(checkpoint: Path) -> None:
    """Readers that are cancelled before they begin, in the queue, in the prompt and later leave nothing behind."""

    async def use(llm: AsyncLLM) -> None:
        draw = random.Random(3)  # noqa: S311
        tasks = [asyncio.create_task(last(llm.generate(prompt, LONG))) for prompt in prompts(60)]
        for task in draw.sample(tasks, 45):
            await asyncio.sleep(draw.choice((0, 0, 0.002)))
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, RequestOutput):
                assert len(result.outputs[0].token_ids) == 50
            else:
                assert isinstance(result, asyncio.CancelledError)
        await until_idle(llm, steps=2)

    run(checkpoint, use)


def test_abort_by_id(checkpoint: Path) -> None:
    """The iterator ends with what there is; an id that nobody has is an error."""

    async def use(llm: AsyncLLM) -> None:
        stream = llm.generate([5, 6], LONG, request_id="a")
        tokens = (await anext(stream)).outputs[0].token_ids
        await llm.abort("a")
        output = await last(stream)
        assert output.finished
        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids[: len(tokens)] == tokens
        for name in ("a", "b"):
            with pytest.raises(
                RequestError, match=f"'{name}' cannot be aborted, as none of that id"
            ):
                await llm.abort(name)

    run(checkpoint, use)


def test_a_request_that_cannot_be_taken_fails_alone(checkpoint: Path) -> None:
    """Bad prompts, and an id that is in use, raise in their own iterators; who has the id goes on."""

    async def use(llm: AsyncLLM) -> None:
        good = llm.generate([5, 6], LONG, request_id="a")
        await anext(good)
        for prompt, options, message in (
            ([], {}, "has no tokens"),
            ([400], {}, "the vocabulary has 400"),
            ([5] * 64, {}, "has 64 tokens"),
            ([5], {"request_id": "a"}, "one of that id runs"),
        ):
            with pytest.raises(RequestError, match=message):
                await last(llm.generate(prompt, LONG, **options))  # type: ignore[arg-type]
        output = await last(good)
        assert len(output.outputs[0].token_ids) == 50

    run(checkpoint, use)


def test_chat_is_the_template_and_the_prompt(checkpoint: Path) -> None:
    """A chat is answered as its rendered text is, without special tokens; a wrong role name raises there."""

    async def use(llm: AsyncLLM) -> None:
        chat = await last(llm.chat([{"role": "user", "content": "the cat"}], LONG))
        assert chat.prompt == "user: the cat\n"
        plain = await last(llm.generate({"prompt_token_ids": chat.prompt_token_ids}, LONG))
        assert chat.outputs == plain.outputs
        explained = await llm.explain()
        assert {row.op for row in explained.rows if row.runs} >= {"attention", "paged_attention"}
        assert {"executor", "worker", "sampler"} <= {row.name for row in explained.classes}

    run(checkpoint, use)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(
    checkpoint: Path, error: type[BaseException]
) -> None:
    """Readers of the step get the error, or the exit, as the reason of the end; later requests are answered."""

    async def use(llm: AsyncLLM) -> None:
        break_model(llm, after=5, error=error)
        found = await asyncio.gather(
            *(last(llm.generate([5, 6], LONG, request_id=name)) for name in "abc")
        )
        assert {output.outputs[0].finish_reason for output in found} == {"error"}
        assert all(repr(name) in str(found[0].outputs[0].error) for name in "abc")
        assert "kernel trouble" in str(found[0].outputs[0].error)
        await llm.check_health()
        assert len((await last(llm.generate([7, 8], LONG))).outputs[0].token_ids) == 50

    run(checkpoint, use)


def test_an_engine_that_stops_says_so(checkpoint: Path) -> None:
    """Under on_step_error=stop requests of the step end with the error, and later ones are refused."""

    async def use(llm: AsyncLLM) -> None:
        break_model(llm, after=3)
        output = await last(llm.generate([5, 6], LONG))
        assert "the engine stops" in str(output.outputs[0].error)
        with pytest.raises(EngineError, match=r"kernel trouble.*scheduler\.on_step_error is stop"):
            await last(llm.generate([5, 6], LONG))
        with pytest.raises(EngineError, match="kernel trouble"):
            await llm.check_health()

    run(checkpoint, use, **{"scheduler.on_step_error": "stop"})


def break_model(llm: AsyncLLM, after: int, error: type[BaseException] = RuntimeError) -> None:
    """Have the model raise in one step, ``after`` so many."""
    model = llm.engine.core.executor.worker.runner.model
    counted = iter(range(10**6))

    def fail(*_: object) -> None:
        if next(counted) == after:
            raise error("kernel trouble")

    model.register_forward_pre_hook(fail)


def test_an_engine_that_dies_raises_everywhere(checkpoint: Path) -> None:
    """Open iterators, in the queue too, calls under way and later ones raise, with the cause; nobody waits for ever."""

    async def use(llm: AsyncLLM) -> None:
        streams = [llm.generate(prompt, LONG) for prompt in prompts(20)]
        tasks = [asyncio.create_task(last(stream)) for stream in streams]
        while llm.stats().counters.steps < 3:
            await asyncio.sleep(0)
        llm.engine.core.scheduler.schedule = None  # type: ignore[assignment, method-assign]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        assert "TypeError" in str(results[0])
        assert isinstance(results[0].__cause__, TypeError)  # type: ignore[union-attr]
        for later in (
            last(llm.generate([5], LONG)),
            llm.abort("a"),
            llm.check_health(),
            llm.explain(),
        ):
            with pytest.raises(EngineError, match="thread of the engine has ended"):
                await later

    async def main() -> None:
        llm = opened(checkpoint)
        await asyncio.wait_for(use(llm), PATIENCE)
        llm.shutdown()

    asyncio.run(main())


def test_preparing_after_the_shutdown(checkpoint: Path) -> None:
    """Who still prepares a request gets the engine's own error, and before that runs in the caller's context."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")

    async def use(llm: AsyncLLM) -> None:
        variable.set("mine")
        assert await llm.prepare(variable.get) == "mine"
        llm.shutdown()
        with pytest.raises(EngineError, match="the engine was shut down: make a new one"):
            await llm.prepare(variable.get)

    asyncio.run(use(opened(checkpoint)))


def engines_beside(others: set[threading.Thread]) -> list[threading.Thread]:
    """Return the threads of engines that have started since."""
    new = set(threading.enumerate()) - others
    return [thread for thread in new if thread.name == "opgraft-engine"]


def test_shutdown_with_open_requests(checkpoint: Path) -> None:
    """Running and waiting requests end as aborted with what they have; later ones are refused; twice is once."""

    others = set(threading.enumerate())  # a test before may have left an engine

    async def main() -> None:
        llm = opened(checkpoint)
        tasks = [asyncio.create_task(last(llm.generate(prompt, LONG))) for prompt in prompts(20)]
        deadline = time.monotonic() + PATIENCE
        while (now := llm.stats()).counters.steps < 3 or now.running + now.waiting < len(tasks):
            assert time.monotonic() < deadline, now
            await asyncio.sleep(0)
        llm.shutdown()
        for output in await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE):
            assert output.finished
            assert output.outputs[0].finish_reason == "abort"
        assert llm.stats().blocks_used == 0
        with pytest.raises(EngineError, match="was shut down"):
            await last(llm.generate([5], LONG))
        llm.shutdown()
        assert not engines_beside(others)

    asyncio.run(main())


def test_idle_is_asleep(checkpoint: Path) -> None:
    """Without requests no step runs, and the process takes hardly any processor time."""

    async def use(llm: AsyncLLM) -> None:
        await last(llm.generate([5, 6], LONG))
        steps, used = llm.stats().counters.steps, time.process_time()
        await asyncio.sleep(0.5)
        assert llm.stats().counters.steps == steps
        assert time.process_time() - used < 0.25  # a loop that spins takes all of the half second

    run(checkpoint, use)


def test_loops_one_after_the_other(checkpoint: Path) -> None:
    """A model serves a second event loop after the first was closed with a request that nobody read to its end."""
    llm = opened(checkpoint)
    loop = asyncio.new_event_loop()
    abandoned = llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    loop.run_until_complete(anext(abandoned))
    loop.close()
    found = asyncio.run(last(llm.generate([7, 8], LONG)))
    assert len(found.outputs[0].token_ids) == 50
    assert llm.stats().counters.finished["abort"] == 1
    with suppress(StopIteration):
        abandoned.aclose().send(None)
    llm.shutdown()
    assert llm.stats().blocks_used == 0


def test_the_constructor_raises_what_the_engine_raises(checkpoint: Path, tmp_path: Path) -> None:
    """What fails in the engine's thread at the start is raised where the model is made, and the thread ends."""
    others = set(threading.enumerate())
    with pytest.raises(ConfigError, match="has room for 3 blocks"):
        opened(checkpoint, **{"cache.num_blocks": 3})
    with pytest.raises(ConfigError, match="LLM has no argument 'dtyp'"):
        opened(checkpoint, dtyp="float32")
    with pytest.raises(InputError, match="nowhere"):
        opened(tmp_path / "nowhere")
    assert not engines_beside(others)
