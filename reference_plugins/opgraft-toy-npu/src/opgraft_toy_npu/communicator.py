"""Collectives of devices that are wired in a ring: each rank talks to its two neighbours only."""

from __future__ import annotations

import torch
from opgraft.distributed import Communicator
from torch import Tensor


class RingCommunicator(Communicator):
    """Sums and gathers around the ring. All other collectives are opgraft's."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, in the shape and dtype of ``x``."""
        # Every rank adds in the order of ranks, so that all ranks get the same bits.
        parts = torch.stack(self._gathered(x))
        return parts.sum(0, dtype=x.dtype)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the tensors of all ranks, joined along ``dim``. A scalar counts as one element."""
        if x.dim() == 0:
            x = x.reshape(1)
        return torch.cat(self._gathered(x), dim)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        """Return one tensor per rank, in the order of ranks.

        In each round every rank hands the last tensor on. After the first round rank 2 has the
        tensor of rank 1, after the second that of rank 0.
        """
        parts = [x] * self.world_size
        for distance in range(1, self.world_size):
            x = self._hand_on(x)
            # A negative index counts from the end, as the ring does.
            parts[self.rank - distance] = x
        return parts

    def _hand_on(self, x: Tensor) -> Tensor:
        """Send a tensor to the next rank, and return the tensor of the previous rank."""
        following = (self.rank + 1) % self.world_size
        previous = (self.rank - 1) % self.world_size
        # Rank 0 sends first. If all ranks received first, all would wait for each other.
        if self.rank == 0:
            self.send(x, following)
            return self.recv(x.shape, x.dtype, x.device, previous)

        received = self.recv(x.shape, x.dtype, x.device, previous)
        self.send(x, following)
        return received
