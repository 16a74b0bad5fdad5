"""Placements of experts by the tokens that they compute, and the moves from one placement to another.

The placement is the greedy one of DeepSeek-V3 (arXiv:2412.19437, section 3.4, and its load balancer EPLB): redundant
places go one by one to the expert with the most tokens for each of its replicas; then replicas, those with the most
tokens first, go to the rank with the fewest tokens that has room (longest processing time first: Graham, 1969).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

Move = tuple[int, int]
"""A place and the expert that is to stand there."""


def place_by_load(loads: Sequence[float], places: int, ranks: int) -> list[list[int]]:
    """Return the experts of each rank.

    Args:
        loads: tokens of each expert.
        places: of all ranks, at least one for each expert, which ranks divide.
        ranks: how many there are.
    """
    replicas = [1] * len(loads)
    for _ in range(places - len(loads)):
        # Else two are on one rank.
        fewer = [expert for expert in range(len(loads)) if replicas[expert] < ranks]
        replicas[
            max(fewer or range(len(loads)), key=lambda expert: loads[expert] / replicas[expert])
        ] += 1
    shares = [
        (loads[expert] / count, expert)
        for expert, count in enumerate(replicas)
        for _ in range(count)
    ]
    placed: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for share, expert in sorted(shares, key=lambda each: (-each[0], each[1])):
        room = [rank for rank in range(ranks) if len(placed[rank]) < places // ranks]
        rank = min(room, key=lambda rank: (expert in placed[rank], totals[rank], rank))
        placed[rank].append(expert)
        totals[rank] += share
    return placed


def heaviest_rank(loads: Sequence[float], experts: Sequence[int], ranks: int) -> float:
    """Return the most tokens that a rank computes, with ``experts`` in the places of all ranks."""
    replicas, per_rank = Counter(experts), len(experts) // ranks
    shares = [loads[expert] / replicas[expert] for expert in experts]
    return max(sum(shares[first : first + per_rank]) for first in range(0, len(experts), per_rank))


def nearest(current: Sequence[int], placed: Sequence[Sequence[int]]) -> list[int]:
    """Return the places of a placement, for ranks and in an order that leave many experts where they are.

    Args:
        current: the expert in each place of all ranks.
        placed: the experts of each rank, in any order of ranks.
    """
    per_rank = len(current) // len(placed)
    left = [Counter(experts) for experts in placed]
    target: list[int] = []
    for first in range(0, len(current), per_rank):
        here = Counter(current[first : first + per_rank])
        common = [(experts & here).total() for experts in left]
        chosen = left.pop(common.index(max(common)))
        staying, arriving = chosen & here, list((chosen - here).elements())
        for expert in current[first : first + per_rank]:
            staying[expert] -= 1
            target.append(expert if staying[expert] >= 0 else arriving.pop())
    return target


def moves(current: Sequence[int], target: Sequence[int]) -> Iterator[list[Move]]:
    """Yield moves to be made together, one or two, behind each of which every expert stands in a place at least.

    An expert that has more places than it is to have gives one up, else two experts change places.
    """
    now, wanted = list(current), Counter(target)
    while now != list(target):
        counts = Counter(now)
        wrong = [place for place, expert in enumerate(now) if expert != target[place]]
        free = next((place for place in wrong if counts[now[place]] > wanted[now[place]]), None)
        if free is not None:
            made = [(free, target[free])]
        else:
            place = wrong[0]
            other = next(each for each in wrong if now[each] == target[place])
            made = [(place, target[place]), (other, now[place])]
        for place, expert in made:
            now[place] = expert
        yield made
