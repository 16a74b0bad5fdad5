"""More parts for authors of kernels.

Most kernels need ``opgraft``, ``opgraft.ops`` and ``opgraft.functional`` alone: a class of an op
with a method ``forward_<key>``, or with a table ``functional_<key>`` of functions. This package
has:

- the kernel that an op runs, and questions about a call. ``binding_of`` and ``Binding`` name the
  kernel and its provider. ``is_observed``, ``watched`` and ``requires_gradient`` find hooks,
  tracers and gradients, for a kernel that computes several ops at once;
- weights: methods that hold the weight of a layer, and ``WeightCache`` for other layouts;
- quantized weights: quantizers, codes packed in bytes or in tiles, and the methods of ``int4``,
  ``int8`` and GGUF files;
- attention: the base class for fixed shapes, caches of codes, and a whole decoder in one call;
- ``OpSpec``, ``Draw`` and ``Outside``, the proof of a functional form.

``docs/reference/kernels.md`` has a row for each name. The parts of the engine are in
``opgraft.kernels.engine``, and the parts of bridges to other hosts in ``opgraft.plugins.bridges``.
"""

from opgraft.base.installed import source_of
from opgraft.binding.functional import binding_of
from opgraft.binding.marks import gradient_required, requires_gradient
from opgraft.binding.rebinding import hidden_by
from opgraft.binding.specialisation import Binding
from opgraft.compat.hooks import hooks_on_every_module
from opgraft.ops.attention.codes import LARGEST_CODES, SCALE_BYTES, quantize_rows, row_size
from opgraft.ops.attention.node import AttentionNodes
from opgraft.ops.attention.padded import PaddedAttention
from opgraft.ops.composites.composite import is_observed
from opgraft.ops.decoder_plan import DecoderParts, DecoderPlan, HasParts
from opgraft.ops.embedding.ranges import (
    DEFAULT_VOCAB_PADDING_SIZE,
    get_masked_input_and_mask,
    pad_vocab_size,
)
from opgraft.ops.linear.lora.method import adapter_bounds
from opgraft.ops.linear.lossless.storage import LosslessWeight, from_12_bits, to_12_bits
from opgraft.ops.linear.methods import (
    LinearMethodBase,
    QuantizeMethodBase,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    form_called,
)
from opgraft.ops.linear.packed import compiled as compiled_packed_linear
from opgraft.ops.linear.packed import linear as packed_linear
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.linear.quantized.quantizers import quantize_int4, quantize_int8
from opgraft.ops.linear.quantized.storage import (
    TILE,
    in_tiles,
    pack_int4,
    rows_of_tiles,
    scales_in_tiles,
    scales_of_tiles,
    unpack_int4,
)
from opgraft.ops.linear.weight_cache import WeightCache, declaration, fits, watched
from opgraft.ops.moe.fused.methods import FusedMoEConfig, FusedMoEMethodBase
from opgraft.ops.quantization.functional import scale_shape
from opgraft.ops.spec import Draw, OpSpec, Outside
from opgraft.ops.weights import (
    default_weight_loader,
    process_weights_after_loading,
    set_weight_attrs,
)
from opgraft.quantization.gguf import GGUFLinearMethod
from opgraft.quantization.integers import Int4LinearMethod, Int8LinearMethod
from opgraft.quantization.lossless import Lossless12LinearMethod
from opgraft.quantization.online import put
from opgraft.quantization.registry import quantization_named

__all__ = [
    # The kernel that runs, and whoever looks on.
    "Binding",
    "binding_of",
    "hidden_by",
    "hooks_on_every_module",
    "is_observed",
    "gradient_required",
    "requires_gradient",
    "watched",
    "source_of",
    # Weights of linear layers.
    "WeightCache",
    "declaration",
    "fits",
    "form_called",
    "packed_linear",
    "compiled_packed_linear",
    "LinearMethodBase",
    "QuantizeMethodBase",
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
    "FusedMoEConfig",
    "FusedMoEMethodBase",
    "set_weight_attrs",
    "default_weight_loader",
    "process_weights_after_loading",
    "DEFAULT_VOCAB_PADDING_SIZE",
    "get_masked_input_and_mask",
    "pad_vocab_size",
    # Quantized weights.
    "QuantizationConfig",
    "quantization_named",
    "GGUFLinearMethod",
    "Int4LinearMethod",
    "Int8LinearMethod",
    "Lossless12LinearMethod",
    "put",
    "quantize_int4",
    "quantize_int8",
    "pack_int4",
    "unpack_int4",
    "LosslessWeight",
    "to_12_bits",
    "from_12_bits",
    "scale_shape",
    "TILE",
    "in_tiles",
    "rows_of_tiles",
    "scales_in_tiles",
    "scales_of_tiles",
    # Attention, and layers of a decoder.
    "AttentionNodes",
    "PaddedAttention",
    "LARGEST_CODES",
    "SCALE_BYTES",
    "quantize_rows",
    "row_size",
    "DecoderParts",
    "DecoderPlan",
    "HasParts",
    # Adapters of the rows of a call.
    "adapter_bounds",
    # Proof of a functional form.
    "Draw",
    "OpSpec",
    "Outside",
]
