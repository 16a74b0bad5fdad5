"""Place experts by the number of their tokens, and move from one placement to another.

The placement is the greedy one of DeepSeek-V3 (arXiv:2412.19437, section 3.4, and its load balancer
EPLB). Redundant places go one by one to the expert with the most tokens for each replica. Then each
replica, those with the most tokens first, goes to the rank with room and the fewest tokens (longest
processing time first: Graham, 1969).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

Move = tuple[int, int]
"""A place, and the next expert there."""


def place_by_load(loads: Sequence[float], places: int, ranks: int) -> list[list[int]]:
    """Return the experts of each rank.

    Args:
        loads: tokens of each expert.
        places: the places of all ranks, at least one for each expert; ``ranks`` divides the number.
        ranks: the number of ranks.
    """
    replicas = _replicas_by_load(loads, places, ranks)
    # The share of an expert's tokens that one replica computes.
    shares = [load / count for load, count in zip(loads, replicas, strict=True)]
    copies = [expert for expert, count in enumerate(replicas) for _ in range(count)]
    copies.sort(key=lambda expert: (-shares[expert], expert))

    placed: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for expert in copies:
        with_room = [rank for rank in range(ranks) if len(placed[rank]) < places // ranks]
        # A second replica on one rank spreads no tokens.
        rank = min(with_room, key=lambda rank: (expert in placed[rank], totals[rank], rank))
        placed[rank].append(expert)
        totals[rank] += shares[expert]
    return placed


def _replicas_by_load(loads: Sequence[float], places: int, ranks: int) -> list[int]:
    """Return the number of replicas of each expert."""
    replicas = [1] * len(loads)
    experts = range(len(loads))
    for _ in range(places - len(loads)):
        # With more replicas than ranks, one rank would have two.
        extensible = [expert for expert in experts if replicas[expert] < ranks]
        busiest = max(extensible or experts, key=lambda expert: loads[expert] / replicas[expert])
        replicas[busiest] += 1
    return replicas


def heaviest_rank(loads: Sequence[float], experts: Sequence[int], ranks: int) -> float:
    """Return the tokens of the busiest rank, with ``experts`` in the places of all ranks."""
    replicas = Counter(experts)
    per_rank = len(experts) // ranks
    shares = [loads[expert] / replicas[expert] for expert in experts]
    firsts = range(0, len(experts), per_rank)
    return max(sum(shares[first : first + per_rank]) for first in firsts)


def nearest(current: Sequence[int], placed: Sequence[Sequence[int]]) -> list[int]:
    """Return the expert in each place for a placement, arranged so that few experts move.

    Both the order of ranks and the order within a rank are free.

    Args:
        current: the expert in each place of all ranks.
        placed: the experts of each rank, in any order of ranks.
    """
    per_rank = len(current) // len(placed)
    unassigned = [Counter(experts) for experts in placed]
    target: list[int] = []
    for first in range(0, len(current), per_rank):
        held = current[first : first + per_rank]
        common = [(experts & Counter(held)).total() for experts in unassigned]
        chosen = unassigned.pop(common.index(max(common)))
        staying = chosen & Counter(held)
        arriving = list((chosen - staying).elements())
        for expert in held:
            staying[expert] -= 1
            target.append(expert if staying[expert] >= 0 else arriving.pop())
    return target


def moves(current: Sequence[int], target: Sequence[int]) -> Iterator[list[Move]]:
    """Yield one or two moves to be made together. After each step every expert has a place.

    An expert with more places than in the target gives up one. Without such an expert, two experts
    change places.
    """
    now = list(current)
    target = list(target)
    wanted = Counter(target)
    while now != target:
        made = _next_moves(now, target, wanted)
        for place, expert in made:
            now[place] = expert
        yield made


def _next_moves(now: Sequence[int], target: Sequence[int], wanted: Counter[int]) -> list[Move]:
    counts = Counter(now)
    wrong = [place for place, expert in enumerate(now) if expert != target[place]]
    for place in wrong:
        if counts[now[place]] > wanted[now[place]]:
            return [(place, target[place])]

    first = wrong[0]
    other = next(place for place in wrong if now[place] == target[first])
    return [(first, target[first]), (other, now[first])]
