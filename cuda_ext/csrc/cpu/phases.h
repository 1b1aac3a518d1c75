// Work that several threads do together, phase after phase.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace raylm {

// Phases made of pieces. The pieces of a phase are there to be taken when all phases before it are done. They lie in lanes,
// one for each thread that is expected: a thread takes those of its own lane, in order, so that it reads memory as a stream,
// and then what others have left in theirs. So any number of threads finishes the work, one that comes late joins at the
// phase where the others are, one that waits holds nothing up when it loses its core, and a change of phase costs some
// atomic additions, not a fork and a join.
class Phases {
 public:
  explicit Phases(int64_t lanes) : num_lanes_(lanes), lanes_(std::make_unique<Lane[]>(lanes)) {}

  // Before threads work: one phase more, of so many pieces; none is allowed.
  void add(int64_t pieces) { ends_.push_back((ends_.empty() ? 0 : ends_.back()) + pieces); }

  // Of a phase of so many pieces: the first one of a lane.
  int64_t first_of(int64_t lane, int64_t pieces) const { return (pieces * lane + num_lanes_ - 1) / num_lanes_; }

  // Calls body(phase, piece) until no pieces are left, and enter(phase, lane) with the thread's lane ahead of each phase,
  // before its pieces are there. Neither may throw: other threads would wait for ever.
  template <typename Enter, typename Body>
  void work(const Enter& enter, const Body& body) {
    const int64_t lane = joined_.fetch_add(1, std::memory_order_relaxed) % num_lanes_;
    for (size_t phase = 0; phase < ends_.size(); ++phase) {
      const int64_t first = phase == 0 ? 0 : ends_[phase - 1], pieces = ends_[phase] - first;
      if (are_done(ends_[phase])) continue;
      enter(phase, lane);
      wait(first);
      for (int64_t i = 0; i < num_lanes_; ++i) work_in_lane((lane + i) % num_lanes_, phase, pieces, body);
    }
  }

 private:
  static constexpr int kSpins = 2000;  // some ten microseconds: then another process may need the core

  // What was taken of a lane: 32 bits of the phase and one, then 32 bits of how many of its pieces.
  struct alignas(64) Lane {
    std::atomic<uint64_t> taken{0};
  };

  template <typename Body>
  void work_in_lane(int64_t lane, size_t phase, int64_t pieces, const Body& body) {
    const int64_t first = first_of(lane, pieces), count = first_of(lane + 1, pieces) - first;
    int64_t done = 0;
    for (int64_t next = take(lane, phase, count); next >= 0; next = take(lane, phase, count)) {
      body(phase, first + next);
      ++done;
    }
    if (done > 0) done_.fetch_add(done, std::memory_order_release);
  }

  // The number of the next piece of a lane; -1 where none is left, or the phase is over.
  int64_t take(int64_t lane, size_t phase, int64_t count) {
    if (count == 0) return -1;
    std::atomic<uint64_t>& taken = lanes_[lane].taken;
    const uint64_t now = phase + 1;
    for (uint64_t seen = taken.load(std::memory_order_relaxed);;) {
      const int64_t next = seen >> 32 == now ? static_cast<int64_t>(seen & UINT32_MAX) : 0;
      if (seen >> 32 > now || next >= count) return -1;
      const uint64_t after = now << 32 | static_cast<uint64_t>(next + 1);
      if (taken.compare_exchange_weak(seen, after, std::memory_order_relaxed)) return next;
    }
  }

  bool are_done(int64_t pieces) const { return done_.load(std::memory_order_acquire) >= pieces; }

  void wait(int64_t pieces) const {
    for (int spins = 0; !are_done(pieces); ++spins) {
      if (spins < kSpins) pause();
      else std::this_thread::yield();
    }
  }

  // Leaves the core's units to a thread beside this one.
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  const int64_t num_lanes_;
  std::unique_ptr<Lane[]> lanes_;
  std::vector<int64_t> ends_;  // of each phase: pieces up to its end
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int64_t> joined_{0};
};

}  // namespace raylm
