"""Forms in which a simulated device is tested, and tests that 'make test-simulated' leaves out, with the reasons."""

from __future__ import annotations

import pytest

TWO_WORKERS, COMPILED = ("--parallel.tensor", "2"), ("-O2",)

RECORDED = (*COMPILED, "--compilation-config", '{"graph_mode": "full"}')

FORMS = ((), TWO_WORKERS, (*TWO_WORKERS, *COMPILED), COMPILED, RECORDED)
"""Options of ``run`` and ``serve``."""

_OF_CPU = "changes what the CPU platform says of its memory"

_OF_DYNAMO = "has torch.compile trace tensors, and Dynamo follows none of a device in Python"

_OF_PLANS = "plans for devices that are not there, by their figures, and computes on none"

UNFIT: dict[str, str] = {
    "engine/planning/test_plan_command.py": _OF_PLANS,
    "engine/planning/test_shards.py": "counts bytes and collectives of ranks, which no device changes",
    "engine/test_compiled_step.py::test_the_tokens_are_those_of_the_modules": _OF_DYNAMO,
    "engine/test_compiled_step.py::test_strict_mode_compiles_nothing_while_requests_run": _OF_DYNAMO,
    "engine/test_compiled_step.py::test_without_a_compiler": _OF_DYNAMO,
    "engine/test_compiled_step.py::test_whole_steps_need_a_platform_that_records": (
        "is of a platform without graphs, and this one has some"
    ),
    "engine/test_input_batch.py::test_without_an_accelerator_nothing_is_pinned": (
        "is of a machine without an accelerator, and torch counts this device as one"
    ),
    "engine/test_part_contracts.py::test_memory_and_graphs_are_replaced_by_name": (
        "counts with the CPU's share of free memory, which is not the device's"
    ),
    "engine/test_stats.py::test_compiled_code_is_not_timed": _OF_DYNAMO,
    "serving/test_llm.py::test_the_cache_takes_a_share_of_what_is_free": _OF_CPU,
    "serving/test_llm.py::test_the_memory_is_that_of_the_device": _OF_CPU,
    "serving/test_llm.py::test_memory_that_nobody_knows": _OF_CPU,
}
"""By a file or a test: why the simulated device is nothing for it."""


def skip_unfit(items: list[pytest.Item]) -> None:
    """Skip the tests of ``UNFIT``."""
    for item in items:
        path = str(item.path).rpartition("/tests/")[2]
        test = f"{path}::{item.nodeid.partition('::')[2].partition('[')[0]}"
        reason = UNFIT.get(path) or UNFIT.get(test)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
