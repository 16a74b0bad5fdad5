"""Parts of the engine for devices.

A device replaces a part by ``opgraft.PluggableClass.register_oot(name="worker")`` and so on.
``Worker``, ``ModelRunner`` and ``Sampler`` compute a step: ``Step`` and ``StepResult``.
"""

from opgraft.compilation.static_graph import StaticGraph
from opgraft.engine.drafting.proposer import Proposer
from opgraft.engine.runner.expert_balancer import ExpertBalancer
from opgraft.engine.runner.memory_query import MemoryQuery
from opgraft.engine.runner.model_runner import ModelRunner
from opgraft.engine.runner.step_program import StepGraph
from opgraft.engine.sampling import Sampler, SamplingBatch
from opgraft.engine.schedule.kv_cache import KVCacheManager
from opgraft.engine.schedule.scheduler import Scheduler
from opgraft.engine.step import Step, StepResult
from opgraft.engine.workers.executor import Executor
from opgraft.engine.workers.in_process_executor import InProcessExecutor
from opgraft.engine.workers.worker import Worker

__all__ = [
    "Executor",
    "ExpertBalancer",
    "InProcessExecutor",
    "KVCacheManager",
    "MemoryQuery",
    "ModelRunner",
    "Proposer",
    "Sampler",
    "SamplingBatch",
    "Scheduler",
    "StaticGraph",
    "Step",
    "StepGraph",
    "StepResult",
    "Worker",
]
