"""``StageLink``: the way of hidden states from one stage of a pipeline to the next."""

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
"""Of the message that says why a stage has failed."""


class StageLink:
    """Passes what the stage before has computed in a step on to the next; each tensor rank to its counterpart.

    Both ends know the size from the step. One more number tells whether the stage before has
    failed, after which its error follows as text. So no stage waits for what does not come, and the
    last one raises the error.

    Args:
        group: the pipeline, of at least two ranks.
        model: of this stage.
        device: where it is.
    """

    def __init__(self, group: ParallelGroup, model: Any, device: torch.device) -> None:
        self.group = group
        self.dtype = model.dtype
        self.shape = model.stage_streams, -1, model.config.get_text_config().hidden_size
        self.device = device
        self._place = group.rank_in_group
        self._size = 0
        self._message: Tensor | None = None
        self._due = self._owed = False

    @classmethod
    def of(cls, model: Any, device: torch.device) -> StageLink | None:
        """Return the link of this rank; ``None`` where it has all layers."""
        group = get_pp_group()
        return cls(group, model, device) if group.world_size > 1 else None

    def begin(self, tokens: int) -> None:
        """Begin with a step of so many tokens."""
        self._size = self.shape[0] * tokens * self.shape[2] + 1
        self._message = None
        self._due, self._owed = not self.group.is_first_rank, not self.group.is_last_rank

    def empty(self, tokens: int) -> Sequence[Tensor]:
        """Return what a later stage receives for so many tokens, as zeros; nothing on the first."""
        if self.group.is_first_rank:
            return ()
        return (
            torch.zeros(self.shape[0], tokens, self.shape[2], dtype=self.dtype, device=self.device),
        )

    def receive(self) -> Tensor | None:
        """Return what the stage before passes on, ``[streams, tokens, hidden_size]``; ``None`` on the first."""
        if not self._due:
            return None
        self._due = False
        self._message = self.group.recv((self._size,), self.dtype, self.device, self._place - 1)
        return self._message[:-1].view(self.shape)

    def _expect_computed(self) -> None:
        """Raise where the stage before has failed. On a device this waits, so it comes after the call of the model.

        Raises:
            StageError: it has; the message is that of its error.
        """
        if self._message is not None and self._message[-1].item():
            self._message = None
            text = self.group.recv((_TEXT_BYTES,), torch.uint8, self.device, self._place - 1)
            raise StageError(bytes(text.tolist()).rstrip(b"\0").decode(errors="replace"))

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
        """Take what is still to come, and tell the next stage that this one has failed, unless it has its input."""
        try:
            self.receive()
            self._expect_computed()
        except StageError as earlier:
            error = earlier
        if not self._owed:
            return
        self._owed = False
        said = (
            str(error)
            if isinstance(error, StageError)
            else f"{described(error)} (in stage {self._place})"
        )
        text = said.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        self.group.send(
            torch.ones(self._size, dtype=self.dtype, device=self.device), self._place + 1
        )
        self.group.send(
            torch.tensor(list(text), dtype=torch.uint8, device=self.device), self._place + 1
        )


def of_last_stage(compute: Callable[[], StepResult]) -> StepResult:
    """Return the result of the last stage on all ranks of the pipeline, each of which computes, or raise its error."""
    group = get_pp_group()
    if group.world_size == 1:
        return compute()
    result, failed = None, None
    try:
        result = compute()
    except Exception as error:
        failed = error
    said = None if failed is None else described(failed)
    shared: tuple[StepResult, str | None] = group.broadcast_object(
        (result, said), group.world_size - 1
    )
    if shared[1] is not None:
        raise failed or StageError(shared[1])
    return shared[0]
