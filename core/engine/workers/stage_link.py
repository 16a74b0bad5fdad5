"""``StageLink``: passes hidden states from one stage of a pipeline to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.base.text import described
from opgraft.distributed import ParallelGroup, get_pp_group
from opgraft.engine.step import StepResult
from opgraft.errors import StageError
from torch import Tensor

_TEXT_BYTES = 1024
"""Bytes of the message with the error of a stage."""


class StageLink:
    """Passes the hidden states of a step on to the next stage: each tensor rank to its counterpart.

    Both ends know the size from the step. The last number of a message is 1 if the stage before has
    failed, and the error follows as text. No stage therefore waits for a message that does not
    come, and the last stage raises the error.

    Args:
        group: the pipeline, of at least two ranks.
        model: the model of this stage.
        device: the device of the model.
    """

    def __init__(self, group: ParallelGroup, model: Any, device: torch.device) -> None:
        self.group = group
        self.dtype = model.dtype
        self.shape = model.stage_streams, -1, model.config.get_text_config().hidden_size
        self.device = device
        self._place = group.rank_in_group
        self._size = 0
        self._message: Tensor | None = None
        # The message of the stage before is still to come.
        self._due = False
        # The message for the next stage is still to be sent.
        self._owed = False

    @classmethod
    def of(cls, model: Any, device: torch.device) -> StageLink | None:
        """Return the link of this rank; ``None`` for a rank with all layers."""
        group = get_pp_group()
        return cls(group, model, device) if group.world_size > 1 else None

    def begin(self, tokens: int) -> None:
        """Begin a step with a number of tokens."""
        streams, _, hidden_size = self.shape
        # One more number for the failure.
        self._size = streams * tokens * hidden_size + 1
        self._message = None
        self._due = not self.group.is_first_rank
        self._owed = not self.group.is_last_rank

    def empty(self, tokens: int) -> Sequence[Tensor]:
        """Return the input of a later stage as zeros; nothing on the first stage."""
        if self.group.is_first_rank:
            return ()
        streams, _, hidden_size = self.shape
        return (torch.zeros(streams, tokens, hidden_size, dtype=self.dtype, device=self.device),)

    def receive(self) -> Tensor | None:
        """Return the output of the stage before, ``[streams, tokens, hidden_size]``.

        ``None`` on the first stage.
        """
        if not self._due:
            return None
        self._due = False
        self._message = self.group.recv((self._size,), self.dtype, self.device, self._place - 1)
        return self._message[:-1].view(self.shape)

    def _expect_computed(self) -> None:
        """Raise the error of the stage before, if it has failed.

        Call this after the model: on a device, reading the number waits for the message.

        Raises:
            StageError: the stage before has failed.
        """
        if self._message is not None and self._message[-1].item():
            self._message = None
            text = self.group.recv((_TEXT_BYTES,), torch.uint8, self.device, self._place - 1)
            written = bytes(text.tolist()).rstrip(b"\0")
            raise StageError(written.decode(errors="replace"))

    def pass_on(self, hidden_states: Tensor) -> None:
        """Pass ``[streams, tokens, hidden_size]`` on to the next stage, if there is one.

        Raises:
            StageError: the stage before has failed.
        """
        self._expect_computed()
        if not self._owed:
            return
        message = hidden_states.new_zeros(self._size)
        message[:-1] = hidden_states.flatten()
        self._owed = False
        self.group.send(message, self._place + 1)

    def fail(self, error: Exception) -> None:
        """Tell the next stage about the error of this stage, unless its message was sent.

        An error of the stage before replaces ``error``.
        """
        # The message of the stage before must be taken, or the next step would receive it.
        try:
            self.receive()
            self._expect_computed()
        except StageError as earlier:
            error = earlier
        if not self._owed:
            return
        self._owed = False
        # An error of an earlier stage names that stage already.
        words = str(error)
        if not isinstance(error, StageError):
            words = f"{described(error)} (in stage {self._place})"
        text = words.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        following = self._place + 1
        self.group.send(torch.ones(self._size, dtype=self.dtype, device=self.device), following)
        self.group.send(torch.tensor(list(text), dtype=torch.uint8, device=self.device), following)


def of_last_stage(compute: Callable[[], StepResult]) -> StepResult:
    """Compute on all ranks of the pipeline, and return the result of the last stage on each rank.

    Raises:
        Exception: the last stage has failed.
    """
    group = get_pp_group()
    if group.world_size == 1:
        return compute()
    result: StepResult | None = None
    failure: Exception | None = None
    try:
        result = compute()
    except Exception as error:
        failure = error
    words = None if failure is None else described(failure)
    last = group.world_size - 1
    shared: tuple[StepResult, str | None] = group.broadcast_object((result, words), last)
    result_of_last, failure_of_last = shared
    if failure_of_last is not None:
        raise failure or StageError(failure_of_last)
    return result_of_last
