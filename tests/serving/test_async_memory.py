"""Thousands of requests of an event loop, many of them cancelled, leave nothing behind."""

from __future__ import annotations

import asyncio
import ctypes
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
from opgraft import SamplingParams
from opgraft.errors import RequestError
from opgraft.serving.async_llm import AsyncLLM
from support.engines import expect_empty
from support.held import ROUNDS, in_each, rounds
from support.random_decoders import written

SMALLEST = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "block_size": 4,
    "cache.num_blocks": 96,
    "load.progress": False,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 96,
}
READERS = 64
WORDS = (
    "the cat",
    "a dog sat on the mat",
    "the the the the the the the",
    "x" * 30,
    "ünïcödé 漢字",
    "",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, trained: Any) -> Path:
    """A decoder that is as small as may be, with a tokenizer."""
    folder = tmp_path_factory.mktemp("async memory") / "llama"
    written("Llama", folder, **SMALLEST, num_hidden_layers=2, head_dim=8, vocab_size=400)
    trained.save(str(folder / "tokenizer.json"))
    return folder


class Readers:
    """Tasks that ask for random answers, and read them to the end, leave early, or are cancelled."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.draw = random.Random(9)  # noqa: S311  # no secret
        self.numbers = iter(range(10**9))
        self.ways: Counter[str] = Counter()

    async def read(self, count: int) -> None:
        """Have that many requests made, some at a time, and wait until the engine holds nothing of them."""
        left = iter(range(count))
        await asyncio.gather(*(self._reader(left) for _ in range(READERS)))
        while self.llm.engine.has_work:
            await asyncio.sleep(0.001)
        await asyncio.wrap_future(
            self.llm.replicas.each[0].call(expect_empty, self.llm.engine.core)
        )
        assert not any(
            (
                self.llm.replicas.each[0]._streams,
                self.llm.engine._open,
                self.llm.engine._owner,
            )
        )

    async def _reader(self, left: Iterator[int]) -> None:
        for _ in left:
            way = self.draw.choice(("end", "end", "leave", "cancel", "abort"))
            try:
                await getattr(self, way)(str(next(self.numbers)), self._params())
            except RequestError:
                way = "refused"
            self.ways[way] += 1

    def _params(self) -> SamplingParams:
        draw = self.draw
        return SamplingParams(
            n=draw.choice((1, 1, 1, 3)), max_tokens=draw.randint(1, 8), logprobs=draw.choice((None, None, 2)),
            prompt_logprobs=draw.choice((None, None, None, 1)), stop=draw.choice(((), ("a",), ("the c", "q"))),
            seed=draw.randrange(99), structured_output=draw.choice((None,) * 5 + ({"choice": ["yes", "no"]},)),
            temperature=draw.choice((0, 1)), bad_words=draw.choice(((), ("cat",))),
        )  # fmt: skip

    def _stream(self, name: str, params: SamplingParams) -> Any:
        salt = self.draw.choice((None, None, name))
        return self.llm.generate(self.draw.choice(WORDS), params, request_id=name, cache_salt=salt)

    async def end(self, name: str, params: SamplingParams) -> None:
        *_, output = [each async for each in self._stream(name, params)]
        assert output.finished
        assert all(answer.error is None for answer in output.outputs)

    async def leave(self, name: str, params: SamplingParams) -> None:
        async with aclosing(self._stream(name, params)) as stream:
            await anext(stream)

    async def cancel(self, name: str, params: SamplingParams) -> None:
        task = asyncio.create_task(self.end(name, params))
        await asyncio.sleep(self.draw.choice((0, 0, 0.001, 0.01)))
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def abort(self, name: str, params: SamplingParams) -> None:
        async with aclosing(self._stream(name, params)) as stream:
            await anext(stream)
            with suppress(RequestError):  # it has ended
                await self.llm.abort(name)
            assert [each.finished async for each in stream][-1:] in ([], [True])


class MallocInfo(ctypes.Structure):
    """What ``mallinfo2`` of glibc tells, see its page of the manual."""

    _fields_ = [(f"earlier_{number}", ctypes.c_size_t) for number in range(4)]
    _fields_ += [
        ("hblkhd", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
    ]
    _fields_ += [
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def allocated_bytes() -> int:
    """Return the bytes that C code holds; resident pages say what other tests of the process have left behind."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


@pytest.mark.parametrize(
    ("requests", "few"), [(1_000, 500), pytest.param(10_000, 2_000, marks=pytest.mark.slow)]
)
def test_many_requests_leave_nothing(checkpoint: Path, requests: int, few: int) -> None:
    """Neither blocks nor rows nor streams nor objects nor memory of requests remain, however their readers left."""

    async def main() -> None:
        async with AsyncLLM(str(checkpoint), **SETTINGS) as llm:
            readers = Readers(llm)
            await readers.read(
                few
            )  # until what is kept on purpose is there: blocks, grammars, pools of memory
            allocated = allocated_bytes()
            growth: list[int] = []
            for _ in rounds(growth):
                await readers.read(requests // ROUNDS)
            assert in_each(growth) < requests // ROUNDS // 2, growth
            assert allocated_bytes() - allocated < 512 * few
            assert len(readers.ways) == 5
            assert min(readers.ways.values()) > requests // 25, readers.ways
            counted = llm.stats().counters.finished
            assert min(counted["abort"], counted["stop"], counted["length"]) > requests // 20, (
                counted
            )
            assert counted["error"] == 0

    others = set(threading.enumerate())  # tests before this one may still be ending theirs
    asyncio.run(asyncio.wait_for(main(), 600))
    for thread in set(threading.enumerate()) - others:
        thread.join(10)  # nobody waits for pools that have been told to end
        assert not thread.is_alive(), thread
