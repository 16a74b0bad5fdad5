"""The cost of choosing a step: scheduler and cache manager, without a model, in microseconds of CPU time."""

from __future__ import annotations

import statistics
import time

from opgraft import SamplingParams
from opgraft.config import SchedulerConfig
from opgraft.engine.kv_cache import KVCacheManager, LayerKind
from opgraft.engine.request import Request
from opgraft.engine.scheduler import Scheduler

STEPS = 600
PROMPT = 128


def microseconds(running: int, kinds: list[LayerKind]) -> tuple[float, float]:
    """Return the median and the mean of schedule and update, with ``running`` requests that all decode."""
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=1 << 20, chunked_prefill=True, policy="fcfs")
    blocks = running * len(kinds) * ((PROMPT + STEPS) // 32 + 3)
    scheduler = Scheduler(config, KVCacheManager(kinds, blocks, 32), 8192)
    params = SamplingParams(max_tokens=STEPS + 10, ignore_eos=True, temperature=0)
    for number in range(running):
        scheduler.add(Request(str(number), [number] * PROMPT, params, eos={2}))
    tokens = {str(number): 5 for number in range(running)}
    taken = []
    for _ in range(STEPS):
        start = time.thread_time()
        scheduler.update(scheduler.schedule(), tokens)
        taken.append((time.thread_time() - start) * 1e6)
    return statistics.median(taken[1:]), statistics.mean(taken[1:])


def main() -> None:
    """Print a row for each number of requests and set of kinds."""
    print("running  kinds                median µs    mean µs")
    for kinds in ([LayerKind()], [LayerKind(), LayerKind(128)]):
        for running in (1, 32, 256):
            median, mean = microseconds(running, kinds)
            names = ", ".join("full" if k.sliding_window is None else f"window {k.sliding_window}" for k in kinds)
            print(f"{running:7}  {names:18} {median:11.1f} {mean:10.1f}")


if __name__ == "__main__":
    main()
