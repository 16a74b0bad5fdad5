// Attention layers as nodes of compiled graphs: a node finds its layer and the batch here, so that between two pieces of
// compiled code nothing of Python runs.

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/custom_class.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "ops.h"
#include "reuse.h"

namespace opgraft_cpu_kernels {
namespace {

struct LayerOfNode {
  int64_t head_size;
  double scale;
  std::optional<int64_t> window;
  std::optional<double> cap;
  OptionalTensor sinks;
  Tensor cache, slots, table;

  bool takes(const Tensor& query) const {
    const auto dtype = query.scalar_type(), kept = cache.scalar_type();
    const bool known = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
    return known && (kept == dtype || kept == at::kChar || kept == at::kByte) && slots.size(0) == query.size(0);
  }

  Tensor heads(const Tensor& x) const {
    return x.dim() == 2 ? x.reshape({x.size(0), x.size(1) / head_size, head_size}) : x;
  }
};

class AttentionNodes : public torch::CustomClassHolder {
 public:
  // Those whose layers the nodes of a graph that this thread runs are; null where Python has to be asked.
  static const AttentionNodes*& entered() {
    static thread_local const AttentionNodes* nodes = nullptr;
    return nodes;
  }

  void add_layer(const std::string& prefix, int64_t head_size, double scale, std::optional<int64_t> window,
                 std::optional<double> cap, const OptionalTensor& sinks, const Tensor& cache, const Tensor& slots,
                 const Tensor& table) {
    layers_.insert_or_assign(prefix, LayerOfNode{head_size, scale, window, cap, sinks, cache, slots, table});
  }

  void enter(const Tensor& query_start_loc, const Tensor& seq_lens) {
    starts_ = query_start_loc;
    lengths_ = seq_lens;
    entered() = this;
    reusing_.emplace();
  }

  void leave() {
    reusing_.reset();
    entered() = nullptr;
  }

  // Undefined where the layer is not one of these, or has to say what is wrong.
  Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, c10::string_view prefix) const {
    const auto found = layers_.find(std::string(prefix.data(), prefix.size()));
    if (found == layers_.end() || !found->second.takes(query)) return {};
    const at::AutoDispatchBelowADInplaceOrView as_it_is;
    const LayerOfNode& layer = found->second;
    return attend_pages(layer.heads(query), layer.heads(key), layer.heads(value), layer.cache, layer.slots, layer.table,
                        starts_, lengths_, layer.scale, layer.window, layer.cap, layer.sinks)
        .view(query.sizes());
  }

 private:
  std::unordered_map<std::string, LayerOfNode> layers_;
  Tensor starts_, lengths_;
  std::optional<Reusing> reusing_;  // by the kernels of a graph
};

Tensor attend_layer(const Tensor& query, const Tensor& key, const Tensor& value, c10::string_view prefix,
                    std::optional<c10::SymInt> width) {
  if (const AttentionNodes* nodes = AttentionNodes::entered(); nodes && !width) {
    if (const Tensor attended = nodes->attend(query, key, value, prefix); attended.defined()) return attended;
  }
  static const auto in_python = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("opgraft::attend_layer", "")
                                    .typed<Tensor(const Tensor&, const Tensor&, const Tensor&, c10::string_view,
                                                  std::optional<c10::SymInt>)>();
  return in_python.call(query, key, value, prefix, std::move(width));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def("attend_layer(Tensor query, Tensor key, Tensor value, str prefix, SymInt? width) -> Tensor");
  library.class_<AttentionNodes>("AttentionNodes")
      .def(torch::init<>())
      .def("add_layer", &AttentionNodes::add_layer)
      .def("enter", &AttentionNodes::enter)
      .def("leave", &AttentionNodes::leave);
}

#define NODES(apply) apply(attend_layer)

IMPLEMENT(NODES)

}  // namespace opgraft_cpu_kernels
