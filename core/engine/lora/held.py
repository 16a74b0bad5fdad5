"""``HeldAdapters``: the adapters that the workers of an engine hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from opgraft.config import OpgraftConfig
from opgraft.engine.lora.adapters import LoRAReport
from opgraft.engine.lora.request import NO_LORA, LoRARequest
from opgraft.engine.request import Request
from opgraft.errors import RequestError

ADAPTER_UNUSABLE = "adapter_unusable"
"""The code of an error about the files of an adapter."""

_CHANGED = (
    "its files have changed while requests name it: leave the files as they are until these "
    "requests have ended, and save other matrices in another folder, under another lora_int_id"
)


class HeldAdapters:
    """Loads adapters into the workers, and forgets adapters to keep to ``lora.max_cpu_loras``.

    Adapters of running requests stay. The adapter of a waiting request may be forgotten, and is
    loaded again before the request runs.

    Args:
        opgraft_config: has the limits.
        call_all: calls a method of all workers, between two steps.
        requests: returns all running and waiting ones.
    """

    def __init__(
        self,
        opgraft_config: OpgraftConfig,
        call_all: Callable[..., Any],
        requests: Callable[[], Sequence[Request]],
    ) -> None:
        self._limits = opgraft_config.lora
        self._call_all = call_all
        self._requests = requests
        # The least recently named first, with the digest of each.
        self._loaded: OrderedDict[int, tuple[LoRARequest, str]] = OrderedDict()
        # To be forgotten after the last request that names them.
        self._leaving: set[int] = set()

    def __contains__(self, number: object) -> bool:
        """Return True if the workers have the adapter of a number."""
        return number in self._loaded

    def forget_all(self) -> None:
        """Forget all adapters, as the workers are new."""
        self._loaded.clear()
        self._leaving.clear()

    def load_for(self, request: Request, keep: Collection[int] = ()) -> None:
        """Load the adapter of a request, and note the digest of its files in the request.

        Raises:
            RequestError: the adapter cannot be used, or its files were others before.
        """
        if request.lora is None:
            return
        digest = self.load(request.lora, keep)
        # The request comes from another engine.
        if request.lora_digest not in ("", digest):
            raise _unusable(request.lora, _CHANGED)
        request.lora_digest = digest

    def load(self, wanted: LoRARequest, keep: Collection[int] = ()) -> str:
        """Load an adapter, unless the workers have it. Return the digest of its files.

        Args:
            wanted: the adapter.
            keep: adapters of waiting requests that stay.

        Raises:
            RequestError: the adapter cannot be used, or requests name it with other files.
        """
        number = wanted.lora_int_id
        if not self._limits.enabled:
            raise RequestError(
                f"the adapter {wanted.lora_name!r:.80} is wanted, and lora.enabled is not set: "
                "set it (enable_lora=True)",
                "lora_request",
            )
        if number in self._loaded:
            loaded, digest = self._loaded[number]
            if loaded != wanted:
                raise RequestError(
                    f"the adapter {wanted.lora_name!r:.80} has the lora_int_id {number}, which is "
                    f"that of {loaded.lora_name!r:.80} in {loaded.lora_path!r:.200}: give each "
                    "adapter a number of its own",
                    "lora_request",
                )
            self._loaded.move_to_end(number)
            self._leaving.discard(number)
            return digest
        self._make_room(keep)
        reports: list[LoRAReport] = self._call_all("add_lora", wanted)
        digest = reports[0].digest
        fault = _fault_of(reports)
        # Tokens and blocks of these requests come from the former files.
        if not fault and any(each.lora_digest not in ("", digest) for each in self._naming(number)):
            fault = _CHANGED
        if fault:
            self._call_all("remove_lora", number)
            raise _unusable(wanted, fault)
        self._loaded[number] = wanted, digest
        return digest

    def load_again(
        self, running: Sequence[Request], waiting: Sequence[Request]
    ) -> Mapping[str, str]:
        """Load the forgotten adapters of the waiting requests that may run next.

        Args:
            running: all of them.
            waiting: those that the next step may admit, in the order of their service.

        Returns:
            The errors of requests whose adapters can no longer be used, by their ids.
        """
        if all(each.lora is None or each.lora_number in self._loaded for each in waiting):
            return {}
        busy = {each.lora_number for each in running}
        busy.discard(NO_LORA)
        # An urgent request takes a slot from another one if its adapter is loaded.
        free = max(self._limits.max_loras - len(busy), 1)
        errors = {}
        next_ones: set[int] = set()
        for request in waiting:
            number = request.lora_number
            if request.lora is None or number in busy or number in next_ones:
                continue
            if len(next_ones) == free:
                break
            next_ones.add(number)
            if number in self._loaded:
                continue
            try:
                self.load_for(request, next_ones)
            except RequestError as error:
                for each in self._naming(number):
                    errors[each.request_id] = str(error)
        return errors

    def remove(self, number: int) -> None:
        """Forget an adapter now, or after the last request that names it has ended."""
        if number in self._loaded:
            self._leaving.add(number)
            self.drop_leaving()

    def drop_leaving(self) -> None:
        """Forget the removed adapters that no request names any more."""
        if not self._leaving:
            return
        named = {each.lora_number for each in self._requests()}
        for number in self._leaving - named:
            self._drop(number)

    def _naming(self, number: int) -> list[Request]:
        """Return the requests with the adapter of a number."""
        return [each for each in self._requests() if each.lora_number == number]

    def _drop(self, number: int) -> None:
        self._leaving.discard(number)
        if self._loaded.pop(number, None) is not None:
            self._call_all("remove_lora", number)

    def _make_room(self, keep: Collection[int]) -> None:
        """Forget unnamed adapters, and then those of waiting requests, until one more has room."""
        self.drop_leaving()
        requests = self._requests()
        most = self._limits.max_cpu_loras or self._limits.max_loras
        running = {each.lora_number for each in requests if each.status == "running"}
        named = {each.lora_number for each in requests}
        unnamed = [each for each in self._loaded if each not in named]
        busy = running.union(keep)
        waiting = [each for each in self._loaded if each in named and each not in busy]
        excess = len(self._loaded) + 1 - most
        for each in [*unnamed, *waiting][: max(excess, 0)]:
            self._drop(each)


def _unusable(wanted: LoRARequest, fault: str) -> RequestError:
    return RequestError(
        f"the adapter {wanted.lora_name!r:.80} cannot be used: {fault}",
        "lora_request",
        code=ADAPTER_UNUSABLE,
    )


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
