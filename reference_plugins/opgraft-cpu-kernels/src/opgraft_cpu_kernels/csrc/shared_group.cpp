// Collectives of ranks of one host, over memory that all of them have mapped. Waiting is brief spinning, then sleep on a
// futex, so that other work on the processors does not hold it up.

#include "shared_group.h"

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <optional>

#include "sleeping.h"

namespace opgraft_cpu_kernels {
namespace {

constexpr int64_t SLOT = int64_t(1) << 19;  // bytes
constexpr int64_t ROWS_AT_ONCE = SLOT / 4;  // bytes of rows that the second cache keeps beside those of another rank
constexpr int64_t HEAD = sizeof(Seat) * MOST_RANKS;
constexpr int64_t SHARED_SUM = int64_t(1) << 15;  // from so many bytes on each of several ranks sums a part for all
constexpr std::chrono::microseconds SPINNING(400);  // more than ranks with uneven shares of a layer are apart

bool reached(uint32_t arrived, uint32_t step) { return int32_t(arrived - step) >= 0; }  // modulo 2^32

bool has_ended(int64_t process) {
  pollfd watched{int(process), POLLIN, 0};
  return poll(&watched, 1, 0) > 0;
}

template <class X>
void sum_plain(const char* const* parts, int64_t ranks, char* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    X sum = reinterpret_cast<const X*>(parts[0])[i];
    for (int64_t p = 1; p < ranks; ++p) sum = X(sum + reinterpret_cast<const X*>(parts[p])[i]);
    reinterpret_cast<X*>(out)[i] = sum;
  }
}

// Sums in the order of the ranks, so that all of them have the same bits.
void sum(const char* const* parts, int64_t ranks, char* out, int64_t count, at::ScalarType dtype) {
  const auto by_path = [&](Dtype kind) {
    path().sum_vectors[kind](reinterpret_cast<const void* const*>(parts), ranks, out, count);
  };
  switch (dtype) {
    case at::kFloat:
      return by_path(FLOAT32);
    case at::kBFloat16:
      return by_path(BFLOAT16);
    case at::kHalf:
      return by_path(FLOAT16);
    case at::kDouble:
      return sum_plain<double>(parts, ranks, out, count);
    case at::kChar:
    case at::kByte:
      return sum_plain<uint8_t>(parts, ranks, out, count);
    case at::kShort:
      return sum_plain<uint16_t>(parts, ranks, out, count);
    case at::kInt:
      return sum_plain<uint32_t>(parts, ranks, out, count);
    case at::kLong:
      return sum_plain<uint64_t>(parts, ranks, out, count);
    default:
      TORCH_CHECK_TYPE(false, "sums over ranks: x has dtype ", dtype, ", expected a real number");
  }
}

Tensor plain(const Tensor& x) {
  return x.is_conj() || x.is_neg() ? x.resolve_conj().resolve_neg().contiguous() : x.contiguous();
}

const char* data_of(const Tensor& x) { return static_cast<const char*>(x.const_data_ptr()); }
char* written_data_of(const Tensor& x) { return static_cast<char*>(x.mutable_data_ptr()); }

// A tensor as parts of equal size along a dimension, one for each rank: bytes of a part lie in `outer` pieces of
// `inner` bytes, between which are those of the other parts.
struct Parts {
  int64_t outer = 1, inner, count;

  Parts(const Tensor& part, int64_t dim, int64_t count) : inner(part.element_size()), count(count) {
    for (int64_t d = 0; d < part.dim(); ++d) (d < dim ? outer : inner) *= part.size(d);
  }

  template <class Copy>
  void each(int64_t number, int64_t first, int64_t bytes, const Copy& copy) const {
    for (int64_t done = 0; done < bytes;) {
      const int64_t at = first + done, within = at % inner, size = std::min(inner - within, bytes - done);
      copy((at / inner * count + number) * inner + within, done, size);
      done += size;
    }
  }
};

c10::SmallVector<int64_t, 6> scaled(at::IntArrayRef sizes, int64_t dim, int64_t size) {
  c10::SmallVector<int64_t, 6> changed(sizes.begin(), sizes.end());
  changed[dim] = size;
  return changed;
}

int64_t wrapped(const char* op, const Tensor& x, int64_t dim) {
  TORCH_CHECK_INDEX(-x.dim() <= dim && dim < x.dim(), op, ": dim is ", dim, ", and x has shape ", x.sizes());
  return dim < 0 ? dim + x.dim() : dim;
}

}  // namespace

int64_t SharedGroup::bytes(int64_t ranks) { return HEAD + (2 * ranks + 1) * SLOT; }

SharedGroup::SharedGroup(int64_t file, int64_t rank, std::vector<int64_t> processes, double seconds, bool spins)
    : rank_(rank),
      ranks_(int64_t(processes.size())),
      processes_(std::move(processes)),
      seconds_(seconds),
      spins_(spins) {
  TORCH_CHECK_VALUE(1 < ranks_ && ranks_ <= MOST_RANKS && 0 <= rank && rank < ranks_, "shared group: rank ", rank,
                    " of ", ranks_, ", expected 2 to ", MOST_RANKS, " ranks");
  void* memory = mmap(nullptr, size_t(bytes(ranks_)), PROT_READ | PROT_WRITE, MAP_SHARED, int(file), 0);
  TORCH_CHECK(memory != MAP_FAILED, "shared group: its memory cannot be mapped, errno ", errno);
  memory_ = static_cast<char*>(memory);
  seats_ = reinterpret_cast<Seat*>(memory);
}

SharedGroup::~SharedGroup() {
  leave();
  munmap(memory_, size_t(bytes(ranks_)));
  for (int64_t process : processes_) close(int(process));
}

void SharedGroup::leave() {
  Seat& own = seats_[rank_];
  own.left.store(1);
  wake(own.arrived);
  if (failed_.empty()) failed_ = "this rank has left the group";
}

void SharedGroup::fail(const std::string& reason) {
  if (failed_.empty()) {
    failed_ = reason;
    leave();
  }
  C10_THROW_ERROR(DistBackendError, "a collective over shared memory failed on rank " + std::to_string(rank_) + " of " +
                                        std::to_string(ranks_) + ": " + failed_ + "; set the groups up again");
}

char* SharedGroup::slot(int64_t rank) const { return memory_ + HEAD + ((step_ & 1) * ranks_ + rank) * SLOT; }

void SharedGroup::begin() {
  if (!failed_.empty()) fail("");
  for (int64_t rank = 0; rank < ranks_; ++rank) wait_for(rank, step_);
  ++step_;
}

void SharedGroup::arrive() {
  Seat& own = seats_[rank_];
  own.arrived.store(step_);
  if (own.sleepers.load()) wake(own.arrived);
}

void SharedGroup::wait_for_all() {
  for (int64_t rank = 0; rank < ranks_; ++rank) wait_for(rank, step_);
}

void SharedGroup::wait_for(int64_t rank, uint32_t step) {
  if (reached(seats_[rank].arrived.load(std::memory_order_acquire), step)) return;
  const Clock::time_point start = Clock::now();
  if (!spins_ || !spin_for(seats_[rank], step, start)) sleep_for(rank, step, start);
  waited_ += seconds_since(start);
}

bool SharedGroup::spin_for(const Seat& seat, uint32_t step, Clock::time_point start) {
  while (Clock::now() - start < SPINNING) {
    for (int i = 0; i < 32; ++i, pause()) {
      if (reached(seat.arrived.load(std::memory_order_acquire), step)) return true;
    }
  }
  return false;
}

void SharedGroup::sleep_for(int64_t rank, uint32_t step, Clock::time_point start) {
  Seat& seat = seats_[rank];
  for (std::optional<Waiting> waiting;;) {
    // Either this rank sees that the other has arrived, or the other sees that this one sleeps.
    seat.sleepers.fetch_add(1);
    const uint32_t seen = seat.arrived.load();
    if (!reached(seen, step)) sleep_on(seat.arrived, seen);
    seat.sleepers.fetch_sub(1);
    if (reached(seat.arrived.load(), step)) return;
    if (!waiting && Clock::now() - start > NAP) waiting.emplace();
    const bool left = seat.left.load(), ended = has_ended(processes_[rank]);
    if (reached(seat.arrived.load(), step)) return;
    if (ended) fail("the process of rank " + std::to_string(rank) + " has ended");
    if (left) fail("rank " + std::to_string(rank) + " has left the group");
    if (seconds_since(start) > seconds_) {
      fail("rank " + std::to_string(rank) + " has not joined within " + std::to_string(int64_t(seconds_)) + " seconds");
    }
  }
}

int64_t SharedGroup::largest(int64_t own) {
  begin();
  std::memcpy(slot(rank_), &own, sizeof(own));
  arrive();
  wait_for_all();
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    int64_t other;
    std::memcpy(&other, slot(rank), sizeof(other));
    own = std::max(own, other);
  }
  return own;
}

void SharedGroup::sum_step(const char* x, char* out, int64_t count, at::ScalarType dtype) {
  const int64_t size = int64_t(c10::elementSize(dtype));
  begin();
  std::memcpy(slot(rank_), x, size_t(count * size));
  arrive();
  wait_for_all();
  const char* parts[MOST_RANKS];
  for (int64_t rank = 0; rank < ranks_; ++rank) parts[rank] = rank == rank_ ? x : slot(rank);
  if (ranks_ == 2 || count * size < SHARED_SUM) return sum(parts, ranks_, out, count, dtype);
  const auto bound = [&](int64_t rank) { return count * rank / ranks_ * size; };
  for (int64_t rank = 0; rank < ranks_; ++rank) parts[rank] += bound(rank_);
  char* const result = memory_ + HEAD + 2 * ranks_ * SLOT;
  sum(parts, ranks_, result + bound(rank_), (bound(rank_ + 1) - bound(rank_)) / size, dtype);
  begin();
  arrive();
  wait_for_all();
  std::memcpy(out, result, size_t(count * size));
}

void SharedGroup::all_reduce_to(const char* x, char* out, int64_t count, at::ScalarType dtype) {
  const Counted counted(*this, count * int64_t(c10::elementSize(dtype)));
  const int64_t size = int64_t(c10::elementSize(dtype)), most = SLOT / size;
  for (int64_t done = 0; done < count; done += most) {
    sum_step(x + done * size, out + done * size, std::min(most, count - done), dtype);
  }
}

Tensor SharedGroup::all_reduce(const Tensor& x) {
  const Tensor given = plain(x), out = fresh(x.sizes(), x.scalar_type());
  all_reduce_to(data_of(given), written_data_of(out), given.numel(), x.scalar_type());
  return out;
}

void SharedGroup::all_reduce_(const Tensor& x) {
  all_reduce_to(data_of(x), written_data_of(x), x.numel(), x.scalar_type());
}

void SharedGroup::all_reduce_rows(const Tensor& x, const Tensor& out, const RowsDone& done) {
  const Counted counted(*this, int64_t(x.nbytes()));
  const int64_t width = x.size(-1), row = width * int64_t(x.element_size());
  const int64_t rows = row ? int64_t(x.nbytes()) / row : 0;
  TORCH_CHECK_VALUE(row <= ROWS_AT_ONCE, "all_reduce_rows: a row has ", row, " bytes, expected at most ", ROWS_AT_ONCE);
  const int64_t together = row ? ROWS_AT_ONCE / row : 1;
  for (int64_t first = 0; first < rows; first += together) {
    const int64_t last = std::min(first + together, rows);
    sum_step(data_of(x) + first * row, written_data_of(out) + first * row, (last - first) * width, x.scalar_type());
    done(first, last);
  }
}

Tensor SharedGroup::gathered(const Tensor& x, int64_t dim, int64_t to) {
  const Counted counted(*this, int64_t(x.nbytes()));
  const Tensor given = plain(x);
  const bool reads = to < 0 || to == rank_;
  const Tensor out = reads ? fresh(scaled(x.sizes(), dim, x.size(dim) * ranks_), x.scalar_type()) : Tensor();
  const Parts parts(given, dim, ranks_);
  const int64_t bytes = int64_t(given.nbytes());
  for (int64_t first = 0; first < bytes; first += SLOT) {
    const int64_t size = std::min(SLOT, bytes - first);
    begin();
    if (to != rank_) std::memcpy(slot(rank_), data_of(given) + first, size_t(size));  // else nobody reads it
    arrive();
    for (int64_t rank = 0; reads && rank < ranks_; ++rank) {
      wait_for(rank, step_);
      const char* from = rank == rank_ ? data_of(given) + first : slot(rank);
      parts.each(rank, first, size, [&](int64_t at, int64_t done, int64_t count) {
        std::memcpy(written_data_of(out) + at, from + done, size_t(count));
      });
    }
  }
  return out;
}

Tensor SharedGroup::all_gather(const Tensor& x, int64_t dim) {
  return gathered(x, wrapped("all_gather", x, dim), -1);
}

OptionalTensor SharedGroup::gather(const Tensor& x, int64_t to, int64_t dim) {
  const Tensor out = gathered(x, wrapped("gather", x, dim), to);
  return out.defined() ? OptionalTensor(out) : std::nullopt;
}

Tensor SharedGroup::broadcast(const Tensor& x, int64_t from) {
  const Counted counted(*this, rank_ == from ? int64_t(x.nbytes()) : 0);
  const Tensor given = plain(x), out = fresh(x.sizes(), x.scalar_type());
  for (int64_t first = 0, bytes = int64_t(x.nbytes()); first < bytes; first += SLOT) {
    const size_t size = size_t(std::min(SLOT, bytes - first));
    begin();
    if (rank_ == from) std::memcpy(slot(rank_), data_of(given) + first, size);
    arrive();
    wait_for(from, step_);
    std::memcpy(written_data_of(out) + first, rank_ == from ? data_of(given) + first : slot(from), size);
  }
  return out;
}

void SharedGroup::exchange(int64_t bytes, const Piece& write, const Piece& read) {
  const int64_t piece = SLOT / ranks_ / 64 * 64;
  for (int64_t first = 0; first < bytes; first += piece) {
    const int64_t size = std::min(piece, bytes - first);
    begin();
    for (int64_t rank = 0; rank < ranks_; ++rank) write(rank, first, size, slot(rank_) + rank * piece);
    arrive();
    wait_for_all();
    for (int64_t rank = 0; rank < ranks_; ++rank) read(rank, first, size, slot(rank) + rank_ * piece);
  }
}

Tensor SharedGroup::reduce_scatter(const Tensor& x, int64_t dim) {
  const Counted counted(*this, int64_t(x.nbytes()));
  dim = wrapped("reduce_scatter", x, dim);
  TORCH_CHECK_VALUE(x.size(dim) % ranks_ == 0, "reduce_scatter: ", ranks_, " ranks do not divide dimension ", dim,
                    " of shape ", x.sizes());
  const Tensor given = plain(x), out = fresh(scaled(x.sizes(), dim, x.size(dim) / ranks_), x.scalar_type());
  const Parts parts(out, dim, ranks_);
  const char* pieces[MOST_RANKS];
  exchange(
      int64_t(out.nbytes()),
      [&](int64_t rank, int64_t first, int64_t size, char* memory) {
        parts.each(rank, first, size, [&](int64_t at, int64_t done, int64_t count) {
          std::memcpy(memory + done, data_of(given) + at, size_t(count));
        });
      },
      [&](int64_t rank, int64_t first, int64_t size, char* memory) {
        pieces[rank] = memory;
        if (rank == ranks_ - 1) {
          sum(pieces, ranks_, written_data_of(out) + first, size / int64_t(x.element_size()), x.scalar_type());
        }
      });
  return out;
}

Tensor SharedGroup::all_to_all(const Tensor& x, const std::vector<int64_t>& sent,
                               const std::vector<int64_t>& received) {
  const Counted counted(*this, int64_t(x.nbytes()));
  TORCH_CHECK_VALUE(x.dim() > 0 && int64_t(sent.size()) == ranks_ && int64_t(received.size()) == ranks_ &&
                        std::accumulate(sent.begin(), sent.end(), int64_t(0)) == x.size(0) &&
                        sent[rank_] == received[rank_],
                    "all_to_all: x has shape ", x.sizes(), ", and ", at::IntArrayRef(sent), " rows are sent and ",
                    at::IntArrayRef(received), " received, expected a number for each of ", ranks_, " ranks");
  const int64_t rows = std::accumulate(received.begin(), received.end(), int64_t(0));
  const Tensor given = plain(x), out = fresh(scaled(x.sizes(), 0, rows), x.scalar_type());
  int64_t row = int64_t(x.element_size()), most = 0;
  for (int64_t dim = 1; dim < x.dim(); ++dim) row *= x.size(dim);
  std::vector<int64_t> from(ranks_ + 1, 0), to(ranks_ + 1, 0);
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    from[rank + 1] = from[rank] + sent[rank] * row;
    to[rank + 1] = to[rank] + received[rank] * row;
    most = std::max({most, sent[rank] * row, received[rank] * row});
  }
  const auto within = [](const std::vector<int64_t>& bounds, int64_t rank, int64_t first, int64_t size) {
    return size_t(std::clamp<int64_t>(bounds[rank + 1] - bounds[rank] - first, 0, size));
  };
  exchange(
      largest(most),
      [&](int64_t rank, int64_t first, int64_t size, char* memory) {
        std::memcpy(memory, data_of(given) + from[rank] + first, within(from, rank, first, size));
      },
      [&](int64_t rank, int64_t first, int64_t size, char* memory) {
        std::memcpy(written_data_of(out) + to[rank] + first, memory, within(to, rank, first, size));
      });
  return out;
}

void define_shared_group(torch::Library& library) {
  library.def("shared_group_bytes(int ranks) -> int", &SharedGroup::bytes);
  library.class_<SharedGroup>("SharedGroup")
      .def(torch::init<int64_t, int64_t, std::vector<int64_t>, double, bool>())
      .def("all_reduce", &SharedGroup::all_reduce)
      .def("all_gather", &SharedGroup::all_gather)
      .def("gather", &SharedGroup::gather).def("reduce_scatter", &SharedGroup::reduce_scatter)
      .def("broadcast", &SharedGroup::broadcast)
      .def("all_to_all", &SharedGroup::all_to_all)
      .def("all_reduce_rms_norm", &all_reduce_rms_norm)
      .def("all_reduce_rms_norm_quant_fp8_static", &all_reduce_rms_norm_quant_fp8_static)
      .def("all_reduce_rms_norm_quant_fp8_dynamic", &all_reduce_rms_norm_quant_fp8_dynamic)
      .def("leave", &SharedGroup::leave).def("spins", &SharedGroup::spins).def("used", &SharedGroup::used);
}

}  // namespace opgraft_cpu_kernels
