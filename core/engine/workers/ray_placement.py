"""Place workers by Ray: an actor for each rank, on few hosts, in the order of hosts and devices."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opgraft.base.log import logger
from opgraft.base.text import described, printable
from opgraft.config import OpgraftConfig
from opgraft.engine.workers.ray_worker import RayWorker, Where
from opgraft.errors import ConfigError, EngineError


@dataclass(frozen=True)
class PlacedActor:
    """An actor and its place."""

    actor: Any
    where: Where


class Placement:
    """An actor of Ray for each rank, with reserved resources.

    Args:
        ray: the module.
        opgraft_config: the settings of the engine, with which each actor loads plugins.
        size: the number of actors.
        needs: the resources of each actor, in Ray's units.
        environ: environment variables of each actor.
        seconds: the time limit for placing and starting all actors.
        replicas: the number of replicas with such a placement, with this one.

    Raises:
        ConfigError: Ray's hosts have no room for the actors.
        EngineError: an actor does not start.
    """

    def __init__(
        self,
        ray: Any,
        opgraft_config: OpgraftConfig,
        size: int,
        needs: Mapping[str, float],
        environ: Mapping[str, str],
        seconds: float,
        replicas: int = 1,
    ) -> None:
        self._ray = ray
        self._opgraft_config = opgraft_config
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
            resources = self._ray.cluster_resources()
            available = self._ray.available_resources()
            there = {name: resources.get(name, 0.0) for name in needs}
            free = {name: available.get(name, 0.0) for name in needs}
            self._ray.util.remove_placement_group(group)
            raise ConfigError(
                f"Ray has found no room for {size} workers of {_counted(needs)} each within "
                f"{seconds:g} s: its hosts have {_counted(there)} in all, and {_counted(free)} "
                "free. Add hosts, lower parallel.tensor, parallel.pipeline or parallel.ray_cpus, "
                "or end what else runs there"
            )
        return group

    def _actor(self, number: int, needs: Mapping[str, float], environ: Mapping[str, str]) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, number
        )
        # Ray has parameters for these two kinds.
        devices = {name: count for name, count in needs.items() if name not in ("CPU", "GPU")}
        actor_class = self._ray.remote(RayWorker).options(
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            resources=devices,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": dict(environ)},
        )
        return actor_class.remote()

    def _in_order(self, seconds: float) -> list[PlacedActor]:
        """Return the actors with their places in the order of ranks: see ``order_of``."""
        try:
            asked = [actor.where.remote(self._opgraft_config) for actor in self._actors]
            found = self._ray.get(asked, timeout=seconds)
        # Ray raises the error of the actor, of any class.
        except Exception as error:
            raise EngineError(
                f"an actor of Ray does not start: {printable(described(error))}. Its hosts need "
                "opgraft and ray, in the versions of this one"
            ) from error
        here = self._ray.get_runtime_context().get_node_id()
        places = []
        for actor, where in zip(self._actors, found, strict=True):
            places.append(PlacedActor(actor, Where(*where)))
        return sorted(places, key=lambda placed: order_of(placed.where, here))

    def end(self) -> None:
        """End the actors, and release the reserved resources. Further calls do nothing."""
        # At the interpreter's exit, Ray ends first, and has ended the actors.
        if self._ray.is_initialized():
            for actor in self._actors:
                kill(self._ray, actor)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
        self._actors = []
        self._group = None
        if self._entered:
            self._entered = False
            _MEMBERSHIP.leave(self._ray)


def kill(ray: Any, actor: Any) -> None:
    """End an actor at once. Ray cannot reach an actor on a lost host, which has ended."""
    if not ray.is_initialized():
        return
    try:
        ray.kill(actor)
    # Ray has many classes of errors.
    except Exception as error:
        logger.debug("an actor of Ray could not be ended: %s", printable(described(error)))


class Membership:
    """The membership of this process in a cluster of Ray.

    If the first placement has joined the cluster, the last placement leaves the cluster.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._joined = False

    def enter(self, ray: Any, processors: int) -> None:
        """Join a cluster of Ray, unless this process has joined one.

        The cluster has the address ``RAY_ADDRESS``, or ``ray start`` has started it on this host.
        Without such a cluster, a cluster of this host alone is started.

        Args:
            ray: the module.
            processors: processors of all workers of this process, for a cluster of this host.
        """
        with self._lock:
            if not ray.is_initialized():
                # A cluster of this host sends no statistics, and its workers have the usual
                # priority.
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                os.environ.setdefault("RAY_worker_niceness", "0")
                _join_ray(ray, processors)
                self._joined = True
            self._users += 1

    def leave(self, ray: Any) -> None:
        """Leave the cluster with the last placement."""
        with self._lock:
            self._users -= 1
            if self._joined and not self._users:
                self._joined = False
                ray.shutdown()


def _join_ray(ray: Any, processors: int) -> None:
    options: dict[str, Any] = {"logging_level": "WARNING", "log_to_driver": True}
    try:
        # On one host, workers may share processors, which Ray would refuse.
        ray.init(num_cpus=max(processors, os.cpu_count() or 1), **options)
    # Ray refuses a number for a cluster that runs already.
    except ValueError:
        ray.init(**options)


_MEMBERSHIP = Membership()


def order_of(where: Where, here: str) -> tuple[Any, ...]:
    """Return the sorting key of ranks: hosts by number, the engine's own first, then devices."""
    devices = [tuple(map(_number_first, ids)) for _, ids in sorted(where.devices.items())]
    return where.host_number, where.node != here, where.node, devices


def _number_first(device: str) -> tuple[int, str]:
    return (int(device), "") if device.isdecimal() else (-1, device)


def local_ranks(nodes: Sequence[str], replica: int = 0, replicas: int = 1) -> list[tuple[int, int]]:
    """Return the local rank of each rank, and the largest number of ranks on its host.

    Args:
        nodes: the host of each rank.
        replica: the number of the replica of these ranks.
        replicas: the number of replicas that Ray may place on the same hosts.
    """
    sizes = Counter(nodes)
    seen = Counter[str]()
    found = []
    for node in nodes:
        found.append((replica * sizes[node] + seen[node], replicas * sizes[node]))
        seen[node] += 1
    return found


def _counted(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} {printable(name)}" for name, count in resources.items())
