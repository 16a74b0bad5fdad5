"""Collectives of devices that are wired in a ring: each talks to its neighbours only."""

from __future__ import annotations

import torch
from opgraft.distributed import Communicator


class RingCommunicator(Communicator):
    """Hands tensors on around the ring; what is not here stays as opgraft computes it."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        # In the order of ranks: all have the same bits.
        return torch.stack(self._gathered(x)).sum(0, dtype=x.dtype)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._gathered(x if x.dim() else x.reshape(1)), dim)

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return what each rank has: in every round each hands on what came last."""
        parts = [x] * self.world_size
        for distance in range(1, self.world_size):
            x = parts[self.rank - distance] = self._handed_on(x)
        return parts

    def _handed_on(self, x: torch.Tensor) -> torch.Tensor:
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        if self.rank == 0:  # one sends first, or all would wait for each other
            self.send(x, after)
            return self.recv(x.shape, x.dtype, x.device, before)
        came = self.recv(x.shape, x.dtype, x.device, before)
        self.send(x, after)
        return came
