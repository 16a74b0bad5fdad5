"""``HeldAdapters``: the adapters that the workers of an engine hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from opgraft.config import OpgraftConfig
from opgraft.engine.lora.adapters import LoRAReport
from opgraft.engine.lora.request import LoRARequest
from opgraft.engine.request import Request
from opgraft.errors import RequestError

ADAPTER_UNUSABLE = "adapter_unusable"
"""The code of an error about the files of an adapter."""


class HeldAdapters:
    """Loads the adapters of new requests, and forgets those that nobody names any more.

    Args:
        opgraft_config: has the limits.
        call_all: calls a method of all workers, between two steps.
    """

    def __init__(self, opgraft_config: OpgraftConfig, call_all: Callable[..., Any]) -> None:
        self._limits = opgraft_config.lora
        self._call_all = call_all
        # The least recently named first, with the digest of each.
        self._held: OrderedDict[int, tuple[LoRARequest, str]] = OrderedDict()

    def forget_all(self) -> None:
        """Forget all adapters, as the workers are new."""
        self._held.clear()

    def prepare(self, request: Request, others: Iterable[Request]) -> None:
        """Load the adapter of a new request, unless the workers hold it.

        Args:
            request: a new one.
            others: running and waiting requests, whose adapters stay.

        Raises:
            RequestError: the adapter cannot be used.
        """
        if request.lora is None:
            return
        request.lora_digest = self.load(request.lora, others)

    def load(self, wanted: LoRARequest, others: Iterable[Request]) -> str:
        """Load an adapter, unless the workers hold it. Return the digest of its files.

        Raises:
            RequestError: the adapter cannot be used.
        """
        number = wanted.lora_int_id
        if not self._limits.enabled:
            raise RequestError(
                f"the adapter {wanted.lora_name!r:.80} is wanted, and lora.enabled is not set: "
                "set it (enable_lora=True)",
                "lora_request",
            )
        if number in self._held:
            held, digest = self._held[number]
            if held != wanted:
                raise RequestError(
                    f"the adapter {wanted.lora_name!r:.80} has the lora_int_id {number}, which is "
                    f"that of {held.lora_name!r:.80} in {held.lora_path!r:.200}: give each "
                    "adapter a number of its own",
                    "lora_request",
                )
            self._held.move_to_end(number)
            return digest
        self._make_room(others)
        reports: list[LoRAReport] = self._call_all("add_lora", wanted)
        fault = _fault_of(reports)
        if fault:
            self._call_all("remove_lora", number)
            raise RequestError(
                f"the adapter {wanted.lora_name!r:.80} cannot be used: {fault}",
                "lora_request",
                code=ADAPTER_UNUSABLE,
            )
        digest = reports[0].digest
        self._held[number] = wanted, digest
        return digest

    def remove(self, number: int, others: Iterable[Request]) -> None:
        """Forget an adapter of this number, or as soon as there is need if others name it."""
        if number not in self._held:
            return
        if any(each.lora_number == number for each in others):
            self._held.move_to_end(number, last=False)
        else:
            self._drop(number)

    def _drop(self, number: int) -> None:
        del self._held[number]
        self._call_all("remove_lora", number)

    def _make_room(self, others: Iterable[Request]) -> None:
        """Forget adapters that no request names, until there is room for one more."""
        most = self._limits.max_cpu_loras or self._limits.max_loras
        named = {each.lora_number for each in others}
        idle = [number for number in self._held if number not in named]
        excess = len(self._held) + 1 - most
        for number in idle[: max(excess, 0)]:
            self._drop(number)


def _fault_of(reports: list[LoRAReport]) -> str:
    """Return the reason against an adapter; empty if all ranks hold the same."""
    for report in reports:
        if report.error:
            return report.error
    if len({report.digest for report in reports}) > 1:
        return "ranks read different files under its path"
    # The stages of a pipeline have different layers.
    nowhere = frozenset.intersection(*(report.elsewhere for report in reports))
    if not nowhere:
        return ""
    listed = ", ".join(map(repr, sorted(nowhere)[:3]))
    return (
        f"it changes {len(nowhere)} modules to which the model has no layer that takes adapters, "
        f"such as {listed:.200}: it is for another model, changes other parts than linear layers "
        "and embeddings, or a plugin's class computes with these weights itself"
    )
