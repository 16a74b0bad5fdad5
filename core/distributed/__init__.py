"""Groups of ranks and their collectives."""

from opgraft.distributed.collectives import (
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
    tensor_model_parallel_gather,
    tensor_model_parallel_reduce_scatter,
)
from opgraft.distributed.communicator import Communicator
from opgraft.distributed.groups import (
    ParallelGroup,
    get_dp_group,
    get_ep_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    get_world_group,
)
from opgraft.distributed.layout import ParallelLayout
from opgraft.distributed.setup import destroy_distributed, init_distributed

__all__ = [
    "Communicator",
    "ParallelGroup",
    "ParallelLayout",
    "destroy_distributed",
    "get_dp_group",
    "get_ep_group",
    "get_pp_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_tp_group",
    "get_world_group",
    "init_distributed",
    "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce",
    "tensor_model_parallel_gather",
    "tensor_model_parallel_reduce_scatter",
]
