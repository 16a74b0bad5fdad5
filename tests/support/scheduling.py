"""Requests, and steps of a scheduler without a model."""

from __future__ import annotations

from typing import Any

from opgraft import LoRARequest, SamplingParams
from opgraft.engine.request import Request
from opgraft.engine.schedule.scheduler import Scheduler
from opgraft.engine.step import Step


def request(
    name: str, length: int = 4, *, priority: int = 0, token: int = 1, **params: Any
) -> Request:
    return Request(name, [token] * length, SamplingParams(**params), priority=priority)


def adapted(name: str, number: int, *, priority: int = 0, **params: Any) -> Request:
    """A request with the adapter of a number; 0 for none."""
    adapter = LoRARequest(str(number), number, "/adapter") if number else None
    sampling = SamplingParams(**params)
    return Request(name, [number + 1] * 4, sampling, priority=priority, lora=adapter)


def distinct(name: str, length: int, first: int, **params: Any) -> Request:
    return Request(name, range(first, first + length), SamplingParams(**params))


def step(scheduler: Scheduler, token: int = 5) -> Step:
    """Schedule a step, and answer it with one token for each that samples."""
    made = scheduler.schedule()
    scheduler.update(made, {s.request_id: token for s in made.sequences if s.samples})
    return made


def counts(made: Step) -> dict[str, int]:
    return {s.request_id: s.count for s in made.sequences}


def prioritised(name: str, length: int, first: int, priority: int, **params: Any) -> Request:
    made = distinct(name, length, first, **params)
    made.priority = priority
    return made
