"""Placement of workers by Ray: an actor for each device, packed on few hosts, in the order of hosts and devices."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opgraft.base.text import described, printable
from opgraft.engine.workers.ray_worker import RayWorker, Where
from opgraft.errors import ConfigError, EngineError
from opgraft.logger import logger


@dataclass(frozen=True)
class Placed:
    """An actor, and where Ray has placed it."""

    actor: Any
    where: Where


class Placement:
    """Actors of Ray, one for each rank, and what they were reserved.

    Args:
        ray: the module.
        size: the number of actors.
        needs: of each, as Ray counts them.
        environ: variables of each.
        seconds: until all must have been placed and started.
        replicas: that are to be placed like this one, itself among them.

    Raises:
        ConfigError: Ray's hosts have no room for them.
        EngineError: an actor does not start.
    """

    def __init__(
        self,
        ray: Any,
        size: int,
        needs: Mapping[str, float],
        environ: Mapping[str, str],
        seconds: float,
        replicas: int = 1,
    ) -> None:
        self._ray = ray
        _MEMBERSHIP.enter(ray, int(replicas * size * needs["CPU"]))
        self._entered = True
        self._actors: list[Any] = []
        self._group: Any = None
        try:
            self._group = self._reserved(size, needs, seconds)
            self._actors = [self._actor(number, needs, environ) for number in range(size)]
            self.ranks = self._in_order(seconds)
        except BaseException:
            self.end()
            raise

    def _reserved(self, size: int, needs: Mapping[str, float], seconds: float) -> Any:
        group = self._ray.util.placement_group([dict(needs)] * size, strategy="PACK")
        if not group.wait(seconds):
            there = {name: self._ray.cluster_resources().get(name, 0.0) for name in needs}
            free = {name: self._ray.available_resources().get(name, 0.0) for name in needs}
            self._ray.util.remove_placement_group(group)
            raise ConfigError(
                f"Ray has found no room for {size} workers of {_counted(needs)} each within {seconds:g} s: its hosts "
                f"have {_counted(there)} in all, and {_counted(free)} free. Add hosts, lower parallel.tensor, "
                "parallel.pipeline or parallel.ray_cpus, or end what else runs there"
            )
        return group

    def _actor(self, number: int, needs: Mapping[str, float], environ: Mapping[str, str]) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, number
        )
        devices = {name: count for name, count in needs.items() if name not in ("CPU", "GPU")}
        return (
            self._ray.remote(RayWorker)
            .options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                resources=devices,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": dict(environ)},
            )
            .remote()
        )

    def _in_order(self, seconds: float) -> list[Placed]:
        """Ask the actors where they are, and put them in the order of ranks: those of the engine's host first."""
        try:
            found = self._ray.get([actor.where.remote() for actor in self._actors], timeout=seconds)
        except Exception as error:  # whatever Ray raises
            raise EngineError(
                f"an actor of Ray does not start: {printable(described(error))}. Its hosts need opgraft and ray, in "
                "the versions of this one"
            ) from error
        here = self._ray.get_runtime_context().get_node_id()
        places = [
            Placed(actor, Where(*where)) for actor, where in zip(self._actors, found, strict=True)
        ]
        return sorted(places, key=lambda placed: order_of(placed.where, here))

    def end(self) -> None:
        """End the actors, and give back what was reserved for them. Further calls do nothing."""
        # Else Ray, which ends first at the interpreter's exit, has ended them.
        if self._ray.is_initialized():
            for actor in self._actors:
                kill(self._ray, actor)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
        self._actors, self._group = [], None
        if self._entered:
            self._entered = False
            _MEMBERSHIP.leave(self._ray)


def kill(ray: Any, actor: Any) -> None:
    """End an actor at once, as far as Ray can; one whose host is lost has ended."""
    if not ray.is_initialized():
        return
    try:
        ray.kill(actor)
    except Exception as error:  # whatever Ray raises
        logger.debug("an actor of Ray could not be ended: %s", printable(described(error)))


class Membership:
    """The part of this process in a cluster of Ray, which it leaves with its last placement if it joined for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._joined = False

    def enter(self, ray: Any, processors: int) -> None:
        """Join the cluster of Ray that is there, or start one of this host alone, unless this process has joined one.

        The cluster is the one that ``RAY_ADDRESS`` names, or that ``ray start`` has started on this
        host.

        Args:
            ray: the module.
            processors: that all workers of this process reserve, for a cluster that is started
                here.
        """
        with self._lock:
            if not ray.is_initialized():
                # For a cluster that is started here: it tells nobody of it, and its workers do not stand behind all
                # else that runs.
                for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_worker_niceness", "0")):
                    os.environ.setdefault(name, value)
                _join(ray, processors)
                self._joined = True
            self._users += 1

    def leave(self, ray: Any) -> None:
        """Leave the cluster once nobody of those who entered needs it."""
        with self._lock:
            self._users -= 1
            if self._joined and not self._users:
                self._joined = False
                ray.shutdown()


def _join(ray: Any, processors: int) -> None:
    options: dict[str, Any] = {"logging_level": "WARNING", "log_to_driver": True}
    try:  # of one host, workers share the processors that there are, however many they are to have
        ray.init(num_cpus=max(processors, os.cpu_count() or 1), **options)
    except ValueError:  # there is a cluster, which has what it has
        ray.init(**options)


_MEMBERSHIP = Membership()


def order_of(where: Where, here: str) -> tuple[Any, ...]:
    """Return by what ranks are sorted: hosts, the engine's own first, then devices."""
    devices = [tuple(map(_number_first, ids)) for _, ids in sorted(where.devices.items())]
    return where.node != here, where.node, devices


def _number_first(device: str) -> tuple[int, str]:
    return (int(device), "") if device.isdecimal() else (-1, device)


def local_ranks(nodes: Sequence[str], replica: int = 0, replicas: int = 1) -> list[tuple[int, int]]:
    """Return the place of each rank among those of its host, and how many these are at most, replicas included.

    Args:
        nodes: the host of each rank.
        replica: that the ranks are of.
        replicas: that Ray may place on the same hosts.
    """
    sizes, seen = Counter(nodes), Counter[str]()
    found = []
    for node in nodes:
        found.append((replica * sizes[node] + seen[node], replicas * sizes[node]))
        seen[node] += 1
    return found


def _counted(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} {printable(name)}" for name, count in resources.items())
