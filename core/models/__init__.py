"""Models from checkpoints: files that are checked, tensors that are read in pieces, weights that reach their layers."""

from opgraft.models.config import load_tokenizer, read_config
from opgraft.models.files import Weights, find_checkpoint, open_weights
from opgraft.models.lazy import LazyTensor, WeightSource
from opgraft.models.load import Loaded, default_weight_loader, load_weights
from opgraft.models.names import WeightsMapper

__all__ = [
    "LazyTensor",
    "Loaded",
    "WeightSource",
    "Weights",
    "WeightsMapper",
    "default_weight_loader",
    "find_checkpoint",
    "load_tokenizer",
    "load_weights",
    "open_weights",
    "read_config",
]
