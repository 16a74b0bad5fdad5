"""``HandoverEngine``: long prompts are computed by a second process, beside the engine's steps.

A request with a long prompt is held: it waits, and holds up no other. The second process computes
the prompt and stores its full blocks (``StoredBlocks``). Then the request is released, finds these
blocks, and computes the tokens behind them.

Whatever happens to the second process, the request is released: after an error at once, otherwise
after ``handover.seconds``. Then the engine computes the blocks that it does not find.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from opgraft.base.log import logger
from opgraft.base.timeline import phase
from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig
from opgraft.engine.request import Request
from opgraft.errors import EngineError
from opgraft.serving.handover_folder import handover_folder
from opgraft.serving.open_request import OpenRequest
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.prefill_process import PrefillProcess, config_of_prefill
from opgraft.serving.text_engine import TextEngine

_END_SECONDS = 1.0
"""Seconds for the second process to end by itself, and again after it was ended."""


@dataclass
class _Handover:
    """A prompt that the second process computes.

    Attributes:
        end: the time of the release, in seconds of ``time.monotonic``.
        requests: held requests with this prompt.
    """

    end: float
    requests: list[Request] = field(default_factory=list)


class HandoverEngine(TextEngine):
    """An engine whose long prompts are computed by a second process.

    Args:
        opgraft_config: with ``handover.tokens``.
        *arguments, **options: as for ``TextEngine``.

    Attributes:
        prefill: the second process.

    Raises:
        ConfigError, EngineError: as ``TextEngine``; also if the second process cannot start.
    """

    def __init__(self, opgraft_config: OpgraftConfig, *arguments: Any, **options: Any) -> None:
        config = opgraft_config.resolved()
        self._least = config.handover.tokens or 0
        self._seconds = config.handover.seconds
        self._names = count()
        self._under_way: dict[str, _Handover] = {}
        self._of_prompt: dict[bytes, str] = {}
        self._done: deque[tuple[str, str]] = deque()
        self._fault = ""
        with ExitStack() as undo:
            part = ""
            # A store of the user's own serves the handover, too.
            if config.cache.store is None:
                cache = undo.enter_context(handover_folder(config.cache))
                config = replace(config, cache=cache)
                part = "takes"
            own = replace(config, handover=replace(config.handover, part=part))
            super().__init__(own, *arguments, **options)
            undo.callback(super().shutdown)
            with phase("start the process for prompts"):
                self.prefill = PrefillProcess(config_of_prefill(config), self._note)
            self._undo = undo.pop_all()

    def _note(self, name: str, error: str) -> None:
        """Note the end of a prompt. Any thread calls this."""
        self._done.append((name, error))
        self.wake()

    @property
    def has_work(self) -> bool:
        # Held requests alone are no work: a step would compute nothing.
        return self._has_news() or not self.core.scheduler.only_holds

    def _has_news(self) -> bool:
        return bool(self._done) or self.waiting_seconds == 0

    @property
    def waiting_seconds(self) -> float | None:
        """The seconds to the next release of a request without its blocks."""
        first = min((each.end for each in self._under_way.values()), default=None)
        return None if first is None else max(0.0, first - time.monotonic())

    def submit(self, prepared: OpenRequest) -> RequestOutput:
        output = super().submit(prepared)
        requests = [answer.request for answer in prepared.growing.values()]
        if requests and len(requests[0].prompt) >= self._least:
            self._hand_over(requests)
        return output

    def _hand_over(self, requests: list[Request]) -> None:
        """Let the second process compute the common prompt of requests, if it is worth it."""
        first = requests[0]
        stored = self.core.stored
        missing = 0 if stored is None else stored.missing(first)
        # The second process hands over full blocks.
        if missing < self._least or missing <= self.core.cache.block_size:
            return
        handovers = self.core.counters.handovers
        # Blocks have keys and values, and no log-probabilities.
        if any(each.params.prompt_logprobs is not None for each in requests):
            handovers["prompt_logprobs"] += 1
            return
        # The second process has no adapters.
        if first.lora is not None:
            handovers["lora"] += 1
            return
        name = self._asked(first)
        if name is None:
            handovers["unavailable"] += 1
            return
        for request in requests:
            self.core.scheduler.hold(request)
        self._under_way[name].requests += requests

    def _asked(self, request: Request) -> str | None:
        """Return the name of the handover of a prompt; ``None`` without the second process."""
        prompt = self._key(request)
        name = self._of_prompt.get(prompt)
        if name is not None:
            return name
        name = f"prompt-{next(self._names)}"
        fault = self.prefill.fault()
        if not fault:
            try:
                self.prefill.ask(name, request)
            except EngineError as error:
                fault = str(error)
        # Once for each change, not for each prompt.
        if fault != self._fault:
            logger.warning(
                "prompts are %s the second process%s",
                "computed without" if fault else "handed over by",
                f": {fault}" if fault else " again",
            )
        self._fault = fault
        if fault:
            return None
        self._of_prompt[prompt] = name
        if not self._under_way:
            self._share_host(True)
        end = time.monotonic() + self._seconds
        self._under_way[name] = _Handover(end)
        return name

    def _share_host(self, shared: bool) -> None:
        """Let the workers leave threads to the second process, or take them back."""
        # The next step tells that workers are lost.
        with suppress(EngineError):
            self.core.executor.call_all("share_host", shared)

    def _key(self, request: Request) -> bytes:
        """Return the hash of the last full block of a prompt, short of the last token."""
        cache = self.core.cache
        # The engine itself computes the last token: its logits choose the first one of the answer.
        full_blocks = (len(request.prompt) - 1) // cache.block_size
        return cache.hashes(request, full_blocks)[-1]

    def step(self) -> list[RequestOutput]:
        self._release_all()
        if self.core.scheduler.only_holds:
            return []
        outputs = super().step()
        self._drop_ended()
        return outputs

    def _release_all(self) -> None:
        """Release the requests whose prompts have ended, or which have waited long enough."""
        while self._done:
            name, error = self._done.popleft()
            self._release(name, error)
        self._drop_ended()
        now = time.monotonic()
        for name, handover in list(self._under_way.items()):
            if handover.end <= now:
                self._release(name, late=True)

    def _drop_ended(self) -> None:
        """Forget the prompts that nobody waits for any more."""
        for name, handover in list(self._under_way.items()):
            if all(each.status == "finished" for each in handover.requests):
                self._drop(name)

    def _release(self, name: str, error: str = "", *, late: bool = False) -> None:
        """Let the engine compute the tokens of a prompt that are not stored."""
        handover = self._drop(name)
        if handover is None:
            return
        left = [each for each in handover.requests if each.status != "finished"]
        if not left:
            return
        stored = self.core.stored
        missing = 0 if stored is None else stored.missing(left[0])
        if late:
            outcome = "late"
        elif error:
            outcome = "failed"
        # The last block is not full, and always left to the engine.
        elif missing > self.core.cache.block_size:
            outcome = "not_stored"
        else:
            outcome = "computed"
        self.core.counters.handovers[outcome] += 1
        if outcome != "computed":
            logger.warning(
                "the engine computes %d of %d tokens of a prompt itself (%s)%s",
                missing,
                len(left[0].prompt),
                outcome,
                f": {error}" if error else "",
            )
        for request in left:
            self.core.scheduler.release(request)
        # A lost process starts again.
        if error:
            self.prefill.fault()

    def _drop(self, name: str) -> _Handover | None:
        """Forget a handover, and let the second process forget the prompt."""
        handover = self._under_way.pop(name, None)
        if handover is None:
            return None
        self._of_prompt = {key: each for key, each in self._of_prompt.items() if each != name}
        self.prefill.forget(name)
        if not self._under_way:
            self._share_host(False)
        return handover

    def explain(self) -> Explanation:
        executor = self.prefill.thread.engine.executor
        return super().explain().within(**{"handover.executor": executor})

    def abort(self, request_id: str) -> RequestOutput:
        output = super().abort(request_id)
        self._release_all()
        return output

    def surrender(self) -> list[OpenRequest]:
        for name in list(self._under_way):
            self._drop(name)
        return super().surrender()

    def shutdown(self) -> None:
        # First the process that writes to the folder, which the second line removes.
        self.prefill.shutdown(_END_SECONDS)
        self._undo.close()
