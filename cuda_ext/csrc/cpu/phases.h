// Work that several threads do together, phase after phase.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace raylm {

// Phases made of pieces. Threads take the pieces one by one, in order; those of a phase are there to be taken when all
// phases before it are done. So any number of threads finishes the work, one that comes late joins at the phase where the
// others are, one that waits holds nothing up when it loses its core, and a change of phase costs some atomic additions,
// not a fork and a join.
class Phases {
 public:
  // Before threads work: one phase more, of so many pieces; none is allowed.
  void add(int64_t pieces) { ends_.push_back(all() + pieces); }

  // Calls body(phase, piece) until no pieces are left. Where the next piece is not there yet, ahead(phase, piece) is called
  // first. Neither may throw: other threads would wait for ever.
  template <typename Ahead, typename Body>
  void work(const Ahead& ahead, const Body& body) {
    size_t phase = 0;
    const auto first_of_phase = [&](int64_t piece) {
      while (piece >= ends_[phase]) ++phase;
      return phase == 0 ? 0 : ends_[phase - 1];
    };
    for (;;) {
      const int64_t seen = next_.load(std::memory_order_relaxed);
      if (seen >= all()) return;
      const int64_t before = first_of_phase(seen);
      if (!are_done(before)) {
        ahead(phase, seen - before);
        wait(before);
      }
      const int64_t taken = next_.fetch_add(1, std::memory_order_relaxed);
      if (taken >= all()) return;
      const int64_t first = first_of_phase(taken);
      if (!are_done(first)) wait(first);
      body(phase, taken - first);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

 private:
  static constexpr int kSpins = 2000;  // some ten microseconds: then another process may need the core

  int64_t all() const { return ends_.empty() ? 0 : ends_.back(); }
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

  std::vector<int64_t> ends_;  // of each phase: pieces up to its end
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace raylm
