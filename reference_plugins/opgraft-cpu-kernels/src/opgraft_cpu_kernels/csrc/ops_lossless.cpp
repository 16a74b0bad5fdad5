// Linear layers over bfloat16 weights in 12 bits as torch ops, and the making of such weights.

#include <array>
#include <mutex>

#include "ops.h"

namespace opgraft_cpu_kernels {
namespace {

// The tensors of a weight, and where they are.
struct Stored {
  Tensor codes, exponents, places, plain;
  LosslessWeight weight;

  Stored(const char* op, const Tensor& given, const Tensor& given_exponents, const Tensor& given_places,
         const Tensor& units, int64_t in_features)
      : codes(given.contiguous()),
        exponents(given_exponents.contiguous()),
        places(given_places.contiguous()),
        plain(units.contiguous()) {
    TORCH_CHECK_VALUE(in_features >= 0, op, ": in_features is ", in_features, ", expected 0 or more");
    weight.in_features = in_features;
    TORCH_CHECK_VALUE(codes.dim() == 2 && codes.size(1) == weight.row_bytes() && codes.scalar_type() == at::kByte, op,
                      ": weight has shape ", codes.sizes(), " and dtype ", codes.scalar_type(),
                      ", expected [out_features, ", weight.row_bytes(), "] of dtype uint8 for ", in_features,
                      " inputs");
    TORCH_CHECK_VALUE(exponents.sizes() == at::IntArrayRef({LosslessWeight::EXPONENTS}) &&
                          exponents.scalar_type() == at::kByte,
                      op, ": exponents have shape ", exponents.sizes(), " and dtype ", exponents.scalar_type(),
                      ", expected [16] of dtype uint8");
    TORCH_CHECK_VALUE(places.dim() == 1 && places.size(0) > 0 && places.scalar_type() == at::kInt &&
                          plain.sizes() == at::IntArrayRef({places.size(0), LosslessWeight::UNIT}) &&
                          plain.scalar_type() == at::kShort,
                      op, ": places have shape ", places.sizes(), " and dtype ", places.scalar_type(),
                      ", units have shape ", plain.sizes(), " and dtype ", plain.scalar_type(),
                      ", expected [count] of dtype int32 and [count, 64] of dtype int16");
    weight.count = places.size(0) - 1;
    weight.places = places.const_data_ptr<int32_t>();
    TORCH_CHECK_VALUE(weight.places[weight.count] == LosslessWeight::END &&
                          codes.size(0) * weight.units() < LosslessWeight::END,
                      op, ": places end with ", weight.places[weight.count], ", expected 2^31 - 1, and fewer units");
    weight.codes = codes.const_data_ptr<uint8_t>();
    weight.exponents = exponents.const_data_ptr<uint8_t>();
    weight.plain = static_cast<const uint16_t*>(plain.const_data_ptr());
  }

  int64_t rows() const { return codes.size(0); }

  Tensor expanded() const {
    const Tensor made = fresh({rows(), weight.in_features}, at::kBFloat16);
    char* const to = static_cast<char*>(made.mutable_data_ptr());
    const int64_t row_bytes = weight.in_features * 2;
    share(rows(), weight.in_features,
          [&](int64_t begin, int64_t end) { path().expand_rows(weight, begin, end, to + begin * row_bytes); });
    return made;
  }
};

Tensor by_plain_weight(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  static const auto many = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("opgraft_cpu_kernels::linear_of_many_rows", "")
                               .typed<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view,
                                             const OptionalTensor&)>();
  return many.call(x, weight, bias, "none", {});
}

}  // namespace

// More rows than `few` go to the kernel of linear.py, over the plain weight.
Tensor lossless_linear(const Tensor& x, const Tensor& weight, const Tensor& exponents, const Tensor& places,
                       const Tensor& units, const OptionalTensor& bias, int64_t few) {
  const char* op = "lossless_linear";
  const Tensor& added = defined(bias);
  refuse_gradient(op, x, added);
  TORCH_CHECK_VALUE(x.scalar_type() == at::kBFloat16, op, ": x has dtype ", x.scalar_type(), ", expected bfloat16");
  const Matrix rows(op, x);
  const Stored stored(op, weight, exponents, places, units, rows.width);
  TORCH_CHECK_VALUE(!added.defined() || (added.dim() == 1 && added.size(0) == stored.rows() &&
                                         added.scalar_type() == at::kBFloat16),
                    op, ": bias has shape ", added.sizes(), ", expected [", stored.rows(), "] of dtype bfloat16");
  if (!rows.width || rows.rows > few) return by_plain_weight(x, stored.expanded(), bias);
  c10::SmallVector<int64_t, 6> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = stored.rows();
  const Tensor out = fresh(sizes, at::kBFloat16);
  const Tensor contiguous = added.defined() ? added.contiguous() : added;
  Linear linear;
  linear.x = rows.view();
  linear.bias = added.defined() ? contiguous.const_data_ptr() : nullptr;
  linear.out = rows_of(out, stored.rows());
  linear.rows = rows.rows;
  linear.in_features = rows.width;
  linear.out_features = stored.rows();
  linear.call = number_of_call();
  share(linear.rows ? linear.out_features : 0, linear.in_features * linear.rows, [&](int64_t begin, int64_t end) {
    path().lossless_linear(linear, stored.weight, begin, end);
  });
  return out;
}

namespace {

// Rows of a weight as plain numbers, as an embedding looks them up.
Tensor lossless_rows(const Tensor& weight, const Tensor& exponents, const Tensor& places, const Tensor& units,
                     int64_t in_features, const Tensor& rows) {
  const char* op = "lossless_rows";
  const Stored stored(op, weight, exponents, places, units, in_features);
  TORCH_CHECK_VALUE(rows.scalar_type() == at::kLong, op, ": rows have dtype ", rows.scalar_type(), ", expected int64");
  const Tensor numbers = rows.contiguous();
  const int64_t* const row = numbers.const_data_ptr<int64_t>();
  const int64_t count = numbers.numel();
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK_INDEX(row[i] >= 0 && row[i] < stored.rows(), op, ": row ", row[i], " of ", stored.rows());
  c10::SmallVector<int64_t, 6> sizes(rows.sizes().begin(), rows.sizes().end());
  sizes.push_back(in_features);
  const Tensor out = fresh(sizes, at::kBFloat16);
  char* const to = static_cast<char*>(out.mutable_data_ptr());
  share(count, in_features, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      path().expand_rows(stored.weight, row[i], row[i] + 1, to + i * in_features * 2);
  });
  return out;
}

using Counts = std::array<int64_t, 256>;
constexpr uint8_t NO_PLACE = LosslessWeight::EXPONENTS;

// How often each exponent is there.
Counts count_exponents(const uint16_t* words, int64_t rows, int64_t width) {
  Counts counts{};
  std::mutex mutex;
  share(rows, width, [&](int64_t begin, int64_t end) {
    constexpr int64_t TABLES = 4;  // so that an addition need not wait for the one before
    std::array<Counts, TABLES> own{};
    for (int64_t i = begin * width; i < end * width; ++i) ++own[size_t(i % TABLES)][words[i] >> 7 & 0xff];
    const std::lock_guard<std::mutex> lock(mutex);
    for (const Counts& table : own)
      for (size_t i = 0; i < counts.size(); ++i) counts[i] += table[i];
  });
  return counts;
}

// The most frequent exponents in ascending order; of equals, the smaller ones.
std::array<uint8_t, LosslessWeight::EXPONENTS> most_frequent(const Counts& counts) {
  std::array<uint8_t, 256> order;
  for (size_t i = 0; i < order.size(); ++i) order[i] = uint8_t(i);
  std::stable_sort(order.begin(), order.end(), [&](uint8_t a, uint8_t b) { return counts[a] > counts[b]; });
  std::array<uint8_t, LosslessWeight::EXPONENTS> chosen;
  std::copy_n(order.begin(), chosen.size(), chosen.begin());
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

// Writes the codes of a unit, and returns whether an exponent has no place.
bool pack_unit(const uint16_t* words, const std::array<uint8_t, 256>& place_of, uint8_t* to) {
  constexpr int64_t HALF = LosslessWeight::UNIT / 2;
  uint8_t all = 0;
  for (int64_t k = 0; k < HALF; ++k) {
    const uint32_t low = words[k], high = words[HALF + k];
    const uint8_t low_place = place_of[low >> 7 & 0xff], high_place = place_of[high >> 7 & 0xff];
    all |= low_place | high_place;
    const uint32_t pair = (low & 0x807f) | (high & 0x7f) << 8 | high >> 15 << 7;
    to[2 * k] = uint8_t(pair);
    to[2 * k + 1] = uint8_t(pair >> 8);
    to[2 * HALF + k] = uint8_t((low_place & 15) | high_place << 4);
  }
  return all & NO_PLACE;
}

// What opgraft.ops.linear.lossless.storage.to_12_bits makes.
std::tuple<Tensor, Tensor, Tensor, Tensor> to_12_bits(const Tensor& given) {
  LosslessWeight made;
  made.in_features = given.dim() == 2 ? given.size(1) : 0;
  TORCH_CHECK_VALUE(given.dim() == 2 && given.scalar_type() == at::kBFloat16 &&
                        given.size(0) * made.units() < LosslessWeight::END,
                    "to_12_bits: weight has shape ", given.sizes(), " and dtype ", given.scalar_type(),
                    ", expected [out_features, in_features] of dtype bfloat16");
  const Tensor weight = given.contiguous();
  const auto* const words = static_cast<const uint16_t*>(weight.const_data_ptr());
  const int64_t rows = weight.size(0), width = made.in_features, units = made.units(), row_bytes = made.row_bytes();
  const auto chosen = most_frequent(count_exponents(words, rows, width));
  std::array<uint8_t, 256> place_of;
  place_of.fill(NO_PLACE);
  for (size_t i = 0; i < chosen.size(); ++i) place_of[chosen[i]] = uint8_t(i);

  const Tensor codes = fresh({rows, row_bytes}, at::kByte);
  uint8_t* const to = codes.mutable_data_ptr<uint8_t>();
  std::vector<uint8_t> others(size_t(rows * units));
  share(rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint16_t* from = words + row * width;
      uint8_t* unit_to = to + row * row_bytes;
      for (int64_t unit = 0; unit < units; ++unit, from += made.UNIT, unit_to += made.UNIT_BYTES)
        others[size_t(row * units + unit)] = pack_unit(from, place_of, unit_to);
      std::memcpy(unit_to, from, size_t(width % made.UNIT) * 2);
    }
  });

  std::vector<int32_t> places;
  for (size_t unit = 0; unit < others.size(); ++unit) {
    if (others[unit]) places.push_back(int32_t(unit));
  }
  const int64_t count = int64_t(places.size());
  const Tensor exponents = fresh({made.EXPONENTS}, at::kByte), plain = fresh({count + 1, made.UNIT}, at::kShort);
  std::copy(chosen.begin(), chosen.end(), exponents.mutable_data_ptr<uint8_t>());
  auto* const plain_to = static_cast<uint16_t*>(plain.mutable_data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = places[size_t(i)] / units, unit = places[size_t(i)] % units;
    std::memcpy(plain_to + i * made.UNIT, words + row * width + unit * made.UNIT, made.UNIT * 2);
  }
  std::memset(plain_to + count * made.UNIT, 0, made.UNIT * 2);
  places.push_back(made.END);
  const Tensor numbers = fresh({count + 1}, at::kInt);
  std::copy(places.begin(), places.end(), numbers.mutable_data_ptr<int32_t>());
  return {codes, exponents, numbers, plain};
}

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def(
      "lossless_linear(Tensor x, Tensor weight, Tensor exponents, Tensor places, Tensor units, Tensor? bias, int few) "
      "-> Tensor");
  library.def(
      "lossless_rows(Tensor weight, Tensor exponents, Tensor places, Tensor units, int in_features, Tensor rows) -> "
      "Tensor");
  library.def("to_12_bits(Tensor weight) -> (Tensor, Tensor, Tensor, Tensor)");
}

}  // namespace

#define LOSSLESS(apply) apply(lossless_linear) apply(lossless_rows) apply(to_12_bits)

IMPLEMENT(LOSSLESS)

}  // namespace opgraft_cpu_kernels
