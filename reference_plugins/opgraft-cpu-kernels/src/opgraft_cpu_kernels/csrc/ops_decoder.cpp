// The layers of a decoder as one call: between its kernels nothing of Python runs, which for a single row takes as long
// as a third of the weights do to be read.

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/custom_class.h>

#include "ops.h"
#include "shared_group.h"

namespace opgraft_cpu_kernels {
namespace {

// A linear layer: the op that computes it, by name, and its tensors after x, of which the last is the bias.
struct Map {
  enum Form { LINEAR, QUANTIZED_LINEAR, INT8_DYNAMIC_LINEAR, LOSSLESS_LINEAR } form;
  std::vector<OptionalTensor> tensors;

  Map(const std::string& name, const std::vector<OptionalTensor>& given) : tensors(given) {
    constexpr const char* names[] = {"linear", "quantized_linear", "int8_dynamic_linear", "lossless_linear"};
    constexpr size_t counts[] = {2, 4, 3, 5};
    const auto found = std::find(std::begin(names), std::end(names), name) - std::begin(names);
    TORCH_CHECK_VALUE(size_t(found) < std::size(names) && given.size() == counts[found], "decoder: a linear layer by ",
                      name, " with ", given.size(), " tensors, expected linear, quantized_linear, ",
                      "int8_dynamic_linear or lossless_linear with their tensors after x");
    form = Form(found);
    for (size_t i = 0; i + 1 < given.size(); ++i)
      TORCH_CHECK_VALUE(given[i] || (form == QUANTIZED_LINEAR && i == 2), "decoder: tensor ", i, " of ", name,
                        " is None");
  }

  Tensor operator()(const Tensor& x) const {
    const OptionalTensor& bias = tensors.back();
    switch (form) {
      case LINEAR:
        return linear(x, *tensors[0], bias, "none", {});
      case QUANTIZED_LINEAR:
        return quantized_linear(x, *tensors[0], *tensors[1], tensors[2], bias);
      case INT8_DYNAMIC_LINEAR:
        return int8_dynamic_linear(x, *tensors[0], *tensors[1], bias);
      default:
        // The caller has found the rows few enough.
        return lossless_linear(x, *tensors[0], *tensors[1], *tensors[2], *tensors[3], bias,
                               std::numeric_limits<int64_t>::max());
    }
  }
};

struct Layer {
  Tensor before_attention, before_mlp;
  double attention_eps, mlp_eps;
  Map qkv, output, gate_up, down;
  int64_t heads, kv_heads, head_size;
  double scale;
  std::optional<int64_t> window;
  std::optional<double> cap;
  OptionalTensor sinks;
  bool neox, shared;
};

// The matrices of adapters for the maps of a layer, two for each; none without adapters.
struct Adapters {
  const OptionalTensor* matrices = nullptr;
  const OptionalTensor& bounds;

  // The result of a map with the additions of adapters; its outputs are divided into parts by their `shares`.
  Tensor operator()(const Map& map, int place, const Tensor& x, at::IntArrayRef shares) const {
    const Tensor y = map(x);
    if (!bounds || !matrices[2 * place]) return y;
    int64_t whole = 0;
    for (const int64_t share : shares) whole += share;
    c10::SmallVector<int64_t, 3> sizes;
    for (const int64_t share : shares) sizes.push_back(y.size(1) * share / whole);
    // The caller has found the tokens few enough for the maps, and so they are for the adapters.
    constexpr int64_t any = std::numeric_limits<int64_t>::max();
    add_lora_(y, x, *matrices[2 * place], *matrices[2 * place + 1], *bounds, sizes, any);
    return y;
  }
};

// Tokens for which the library multiplies weights in codes itself.
constexpr int64_t FEW = 8;

class Decoder : public torch::CustomClassHolder {
 public:
  // `maps`: of query, key and value in one; of attention's output; of gate and up in one; down. `shared`: ranks have
  // parts of these.
  void add_layer(const Tensor& before_attention, double attention_eps, const Tensor& before_mlp, double mlp_eps,
                 const std::vector<std::tuple<std::string, std::vector<OptionalTensor>>>& maps,
                 const std::vector<int64_t>& sizes, double scale, std::optional<int64_t> window,
                 std::optional<double> cap, const OptionalTensor& sinks, bool neox, bool shared) {
    TORCH_CHECK_VALUE(maps.size() == 4 && sizes.size() == 3, "decoder: a layer has ", maps.size(), " maps and ",
                      sizes.size(), " sizes, expected 4 and heads, kv_heads and head_size");
    const auto map = [&](size_t i) { return Map(std::get<0>(maps[i]), std::get<1>(maps[i])); };
    layers.push_back({before_attention, before_mlp, attention_eps, mlp_eps, map(0), map(1), map(2), map(3), sizes[0],
                      sizes[1], sizes[2], scale, window, cap, sinks, neox, shared});
    for (const Map& each : {layers.back().qkv, layers.back().output, layers.back().gate_up, layers.back().down})
      plain = plain && each.form != Map::QUANTIZED_LINEAR;
  }

  // The sum of the last layer's output and of the residual stream is left to the norm that follows: both are returned.
  // For each layer a table of its rope, its cache, its slots and its table of blocks. `group`: of the ranks that share
  // layers. `adapters`: two matrices for each map of each layer, read if there are bounds.
  std::tuple<Tensor, Tensor> run(const Tensor& positions, const Tensor& input, const std::vector<Tensor>& ropes,
                                 const std::vector<Tensor>& caches, const std::vector<Tensor>& slots,
                                 const std::vector<Tensor>& tables, const Tensor& query_start_loc,
                                 const Tensor& seq_lens,
                                 const std::optional<c10::intrusive_ptr<SharedGroup>>& group,
                                 const std::vector<OptionalTensor>& adapters, const OptionalTensor& bounds) {
    const at::AutoDispatchBelowADInplaceOrView as_it_is;
    TORCH_CHECK_VALUE(input.dim() == 2 && ropes.size() == layers.size() && caches.size() == layers.size() &&
                          slots.size() == layers.size() && tables.size() == layers.size() &&
                          adapters.size() == (bounds ? MATRICES * layers.size() : 0),
                      "decoder: hidden_states has shape ", input.sizes(), " and ", caches.size(),
                      " layers have caches, expected [tokens, hidden_size] and ", layers.size());
    Tensor x = input, sum;
    const auto compute = [&] {
      Reusing reusing;
      for (size_t i = 0; i < layers.size(); ++i) {
        const Adapters of_layer{adapters.data() + (bounds ? MATRICES * i : 0), bounds};
        run_layer(layers[i], of_layer, positions, ropes[i], caches[i], slots[i], tables[i], query_start_loc, seq_lens,
                  group, x, sum);
      }
      reusing.give_away(x, sum);
    };
    if (plain || x.size(0) <= FEW) {
      Team::lead(x.size(0) <= FEWEST && !group, compute);
    } else {
      Team::dismiss();
      compute();
    }
    return {x, sum};
  }

 private:
  // x: the output of the layer before, and then of this one; sum: the residual stream that it is to be added to.
  static void run_layer(const Layer& layer, const Adapters& adapted, const Tensor& positions, const Tensor& rope,
                        const Tensor& cache, const Tensor& slots, const Tensor& table, const Tensor& query_start_loc,
                        const Tensor& seq_lens, const std::optional<c10::intrusive_ptr<SharedGroup>>& group, Tensor& x,
                        Tensor& sum) {
    std::tie(x, sum) = added(x, sum, layer.before_attention, layer.attention_eps);
    const int64_t tokens = x.size(0), size = layer.head_size, heads = layer.heads, kv_heads = layer.kv_heads;
    const Tensor merged = adapted(layer.qkv, 0, x, {heads, kv_heads, kv_heads});
    TORCH_CHECK_VALUE(merged.size(1) == (heads + 2 * kv_heads) * size, "decoder: query, key and value have ",
                      merged.size(1), " elements, expected ", (heads + 2 * kv_heads) * size);
    const auto part = [&](int64_t first, int64_t count) {
      return merged.as_strided({tokens, count, size}, {merged.size(1), size, 1}, first * size);
    };
    const auto [query, key] =
        rotary_embedding(positions, part(0, heads), part(heads, kv_heads), size, rope, layer.neox);
    const Tensor attended = attend_pages(query, key, part(heads + kv_heads, kv_heads), cache, slots, table,
                                         query_start_loc, seq_lens, layer.scale, layer.window, layer.cap, layer.sinks);
    const Tensor values = attended.view({tokens, heads * size});
    const Tensor output = reduced(layer, group, adapted(layer.output, 1, values, {1}));
    std::tie(x, sum) = added(output, sum, layer.before_mlp, layer.mlp_eps);
    const Tensor product = silu_and_mul(adapted(layer.gate_up, 2, x, {1, 1}));
    x = reduced(layer, group, adapted(layer.down, 3, product, {1}));
  }

  // What all ranks have, added.
  static Tensor reduced(const Layer& layer, const std::optional<c10::intrusive_ptr<SharedGroup>>& group, Tensor x) {
    if (layer.shared) {
      TORCH_CHECK_VALUE(group, "decoder: ranks share a layer, and no group of them is given");
      (*group)->all_reduce_(x);
    }
    return x;
  }

  static std::tuple<Tensor, Tensor> added(const Tensor& x, const Tensor& sum, const Tensor& weight, double eps) {
    if (!sum.defined()) return {rms_norm(x, weight, eps, {}), x};
    return fused_add_rms_norm(x, sum, weight, eps, {});
  }

  static constexpr size_t MATRICES = 8;  // of adapters for a layer

  std::vector<Layer> layers;
  static constexpr int64_t FEWEST = 4;  // rows for which reading the weights takes all the time
  bool plain = true;  // no quantized_linear, of whose rows torch multiplies many, and needs the threads itself for it
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  define_shared_group(library);
  library.class_<Decoder>("Decoder")
      .def(torch::init<>())
      .def("add_layer", &Decoder::add_layer)
      .def("run", &Decoder::run);
}

}  // namespace opgraft_cpu_kernels
