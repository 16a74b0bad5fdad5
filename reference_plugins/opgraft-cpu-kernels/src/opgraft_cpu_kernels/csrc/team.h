// Threads that take the pieces of one kernel after another. Kernels of a layer follow one another so soon that to wake
// OpenMP's threads for each takes as long as a small kernel. And where another process runs on a processor, OpenMP
// waits for the thread there, which has a part of fixed size and must come to the end of each region.
//
// Here a piece belongs to whoever comes first. Each thread has a part of the rows, takes its pieces from the front, so
// that it reads memory in sequence, and then those of others from the back. A thread that does not run has no piece, or
// one that is waited for. Where the pieces end depends on the number of threads, and no row on where they do.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/FunctionRef.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <exception>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "sleeping.h"

namespace opgraft_cpu_kernels {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Nanoseconds of a clock.
inline int64_t time_of(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

// The time in which this thread wanted to run, and another one ran in its place.
class Displaced {
 public:
  Displaced() : wall_(time_of(CLOCK_MONOTONIC)), own_(time_of(CLOCK_THREAD_CPUTIME_ID)) {}
  int64_t elapsed() const { return time_of(CLOCK_MONOTONIC) - wall_; }
  int64_t lost() const { return elapsed() - (time_of(CLOCK_THREAD_CPUTIME_ID) - own_); }

 private:
  int64_t wall_, own_;
};

class Team {
 public:
  using Work = c10::function_ref<void(int64_t begin, int64_t end)>;

  explicit Team(int threads) : parts_(size_t(threads)), forks_(forks()) {
    for (int thread = 1; thread < threads; ++thread) others_.emplace_back([this, thread] { serve(thread); });
  }

  ~Team() {
    tell(END);
    for (std::thread& each : others_) each.join();
  }

  // The team that takes the pieces of this thread's kernels. Null if OpenMP's threads do.
  static Team* led() {
    Team* const team = of_thread().get();
    return team && team->is_in_charge_ ? usable() : nullptr;
  }

  // Calls a function whose kernels a team computes, which goes on with those that this thread calls after it. `reads`:
  // it does little but read memory, which one thread does almost as fast as one and a part of another.
  template <class Body>
  static void lead(bool reads, const Body& body) {
    Team* const team = gathered();
    if (!team) return body();
    team->is_in_charge_ = true;
    team->begin(reads);
    body();
    team->end();
  }

  // Leaves the kernels that this thread calls next to OpenMP's threads, as products of torch among them need those.
  static void dismiss() {
    if (Team* const team = of_thread().get()) team->is_in_charge_ = false;
  }

  // Divides rows among the threads, a number of them at least for each piece.
  void share(int64_t rows, int64_t least, Work work) {
    if (is_alone_) return work(0, rows);
    const int64_t threads = int64_t(parts_.size());
    rows_ = rows;
    pieces_ = std::max<int64_t>(1, std::min(threads * PIECES, rows / std::max<int64_t>(1, least)));
    unit_ = rows < 48 * pieces_ ? 1 : rows < 96 * pieces_ ? 16 : 32;
    work_ = &work;
    left_.store(uint32_t(pieces_), std::memory_order_relaxed);
    if (++number_ == END) number_ = 1;
    for (int64_t i = 0; i < threads; ++i) {
      const State state{number_, uint16_t(pieces_ * i / threads), uint16_t(pieces_ * (i + 1) / threads)};
      parts_[size_t(i)].state.store(state, std::memory_order_release);
    }
    tell(number_);
    take_pieces(0, number_);
    wait_for_rest();
    if (has_raised_.exchange(false)) std::rethrow_exception(std::exchange(raised_, nullptr));
  }

 private:
  // The pieces of a part that nobody has taken, and the number of the kernel that they belong to.
  struct State {
    uint32_t number;
    uint16_t first, last;
  };
  struct alignas(64) Part {
    std::atomic<State> state{State{0, 0, 0}};
  };

  static constexpr uint32_t END = UINT32_MAX;
  static constexpr int64_t PIECES = 4;  // of a part
  static constexpr int64_t MICROSECOND = 1000, MILLISECOND = 1000 * MICROSECOND;
  static constexpr int64_t PATIENCE = 1 * MILLISECOND;           // of a thread that waits for the next kernel
  static constexpr int64_t PATIENCE_BESIDE = 30 * MICROSECOND;   // where another process wants the processor
  static constexpr int64_t PATIENCE_AT_END = 50 * MICROSECOND;   // of the one that waits for the last piece
  static constexpr int64_t TURN = 3 * MILLISECOND / 2;           // after which a thread offers its processor to others,
                                                                 // before it would lose it with a piece in hand
  static constexpr int64_t WINDOW = 20 * MILLISECOND;            // in which lost time is counted
  static constexpr int64_t LOST_OF_WINDOW = 8;                   // the share that says that another process runs
  static constexpr int64_t LEAST_ALONE = 40 * MILLISECOND;       // before the team is tried again
  static constexpr int64_t MOST_ALONE = 320 * MILLISECOND;

  static std::unique_ptr<Team>& of_thread() {
    static thread_local std::unique_ptr<Team> team;
    return team;
  }

  // Forks of this process that it descends from. The threads of a team are not in the new process.
  static const std::atomic<int>& forks() {
    static std::atomic<int> number{0};
    static const int registered = pthread_atfork(nullptr, nullptr, [] { ++number; });
    (void)registered;
    return number;
  }

  // This thread's team, if its threads are there and as many as torch's are to be.
  static Team* usable() {
    std::unique_ptr<Team>& team = of_thread();
    if (team && team->forks_ != forks()) (void)team.release();
    if (team && int(team->parts_.size()) != at::get_num_threads()) team.reset();
    return team.get();
  }

  static Team* gathered() {
    const int threads = at::get_num_threads();
    if (!usable() && threads > 1 && !at::in_parallel_region()) of_thread() = std::make_unique<Team>(threads);
    return usable();
  }

  void begin(bool reads) {
    const bool was_alone = std::exchange(is_alone_, reads && time_of(CLOCK_MONOTONIC) < alone_until_);
    if (is_alone_ != was_alone || !reads) elapsed_ = lost_ = calls_ = 0;
    is_measured_ = reads;
    slept_ = 0;
    since_ = Displaced();
  }

  // Compares what a call takes one thread and what it takes the team, where the threads lose much time to others.
  void end() {
    const int64_t lost = since_.lost() - slept_ + lost_by_others_.exchange(0, std::memory_order_relaxed);
    if (!is_measured_) return;
    elapsed_ += since_.elapsed();
    lost_ += lost;
    ++calls_;
    if (elapsed_ >= WINDOW) decide(elapsed_ / calls_, lost_ * LOST_OF_WINDOW > elapsed_, time_of(CLOCK_MONOTONIC));
  }

  // `taken`: by a call in the window that ends. `beside`: whether others took much of it.
  void decide(int64_t taken, bool beside, int64_t now) {
    elapsed_ = lost_ = calls_ = 0;
    if (is_alone_) {
      taken_alone_ = taken;
      if (pays()) return;
      alone_until_ = 0;
      together_until_ = now + MOST_ALONE;
      return;
    }
    taken_together_ = taken;
    is_beside_.store(beside, std::memory_order_relaxed);
    if (!beside) {
      taken_alone_ = 0;
      alone_for_ = LEAST_ALONE;
    } else if (now >= together_until_ && (!taken_alone_ || pays())) {
      alone_until_ = now + alone_for_;
      alone_for_ = std::min(MOST_ALONE, 2 * alone_for_);
    }
  }

  bool pays() const { return taken_alone_ * 20 < taken_together_ * 19; }

  void tell(uint32_t number) {
    told_.store(number);
    if (has_sleepers_.load() && has_sleepers_.exchange(false)) wake(told_);
  }

  void serve(int thread) {
    Displaced since;
    const auto note = [&] {
      lost_by_others_.fetch_add(since.lost(), std::memory_order_relaxed);
      since = Displaced();
    };
    for (uint32_t seen = 0; (seen = next(seen, since, note)) != END;) {
      take_pieces(thread, seen);
      if (since.elapsed() < TURN) continue;
      std::this_thread::yield();
      note();
    }
  }

  // Waits for another number than the one that was seen.
  template <class Note>
  uint32_t next(uint32_t seen, Displaced& since, const Note& note) {
    for (;;) {
      const int64_t patience = is_beside_.load(std::memory_order_relaxed) ? PATIENCE_BESIDE : PATIENCE;
      if (spin(patience, [&] { return told_.load(std::memory_order_acquire) != seen; }))
        return told_.load(std::memory_order_acquire);
      note();
      has_sleepers_.store(true);
      if (told_.load() == seen) sleep_on(told_, seen);
      since = Displaced();
    }
  }

  // Returns whether a condition held in time.
  template <class Condition>
  static bool spin(int64_t patience, const Condition& holds) {
    constexpr int TURNS = 64;  // between looks at the clock, which take as long as some
    int64_t end = 0;
    for (;;) {
      for (int turn = 0; turn < TURNS; ++turn) {
        if (holds()) return true;
        pause();
      }
      const int64_t time = time_of(CLOCK_MONOTONIC);
      if (!end) end = time + patience;
      if (time >= end) return false;
    }
  }

  void take_pieces(int thread, uint32_t number) {
    const size_t count = parts_.size();
    for (size_t i = 0; i < count; ++i) {
      std::atomic<State>& part = parts_[(size_t(thread) + i) % count].state;
      State state = part.load(std::memory_order_acquire);
      while (state.number == number && state.first < state.last) {
        const bool own = i == 0;
        const State rest{number, uint16_t(state.first + own), uint16_t(state.last - !own)};
        if (!part.compare_exchange_weak(state, rest, std::memory_order_acq_rel)) continue;
        take_piece(own ? state.first : rest.last);
        if (left_.fetch_sub(1) == 1 && thread && is_waiting_.load()) wake(left_);
        state = part.load(std::memory_order_acquire);
      }
    }
  }

  void take_piece(int64_t piece) {
    try {
      (*work_)(edge(piece), edge(piece + 1));
    } catch (...) {
      if (!has_raised_.exchange(true)) raised_ = std::current_exception();
    }
  }

  // The first row of a piece. Large pieces begin where kernels that take several columns at once do.
  int64_t edge(int64_t piece) const {
    return piece == pieces_ ? rows_ : rows_ * piece / pieces_ / unit_ * unit_;
  }

  void wait_for_rest() {
    while (!spin(PATIENCE_AT_END, [&] { return left_.load(std::memory_order_acquire) == 0; })) {
      const int64_t start = time_of(CLOCK_MONOTONIC);
      is_waiting_.store(true);
      if (const uint32_t left = left_.load()) sleep_on(left_, left);
      is_waiting_.store(false);
      slept_ += time_of(CLOCK_MONOTONIC) - start;
    }
  }

  int64_t rows_ = 0, pieces_ = 0, unit_ = 1;
  uint32_t number_ = 0;  // of the kernel
  const Work* work_ = nullptr;
  std::exception_ptr raised_;  // the first
  std::atomic<bool> has_raised_{false};

  bool is_in_charge_ = false, is_alone_ = false, is_measured_ = false;
  Displaced since_;
  int64_t slept_ = 0, elapsed_ = 0, lost_ = 0, calls_ = 0;  // of a window
  int64_t taken_alone_ = 0, taken_together_ = 0, alone_until_ = 0, together_until_ = 0, alone_for_ = LEAST_ALONE;
  std::atomic<int64_t> lost_by_others_{0};
  std::atomic<bool> is_beside_{false};

  alignas(64) std::atomic<uint32_t> told_{0};  // the number of the kernel that there are pieces of
  std::atomic<bool> has_sleepers_{false};
  alignas(64) std::atomic<uint32_t> left_{0};  // pieces that are not finished
  std::atomic<bool> is_waiting_{false};
  std::vector<Part> parts_;
  const int forks_;
  std::vector<std::thread> others_;
};

}  // namespace opgraft_cpu_kernels
