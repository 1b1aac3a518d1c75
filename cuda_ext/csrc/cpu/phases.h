// Work that several threads do together, phase after phase.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace raylm {

// Phases made of pieces. Threads take the pieces one by one, in order, and wait until all phases before a piece's own are
// done. So any number of threads finishes the work, one that comes late joins at the phase where the others are, and
// a change of phase costs two atomic additions, not a fork and a join.
class Phases {
 public:
  // Before threads work: one phase more, of so many pieces; none is allowed.
  void add(int64_t pieces) { ends_.push_back((ends_.empty() ? 0 : ends_.back()) + pieces); }

  // Calls body(phase, piece) until no pieces are left. Where a piece has to wait, ahead(phase, piece) is called first.
  // Neither may throw: other threads would wait for ever.
  template <typename Ahead, typename Body>
  void work(const Ahead& ahead, const Body& body) {
    const int64_t all = ends_.empty() ? 0 : ends_.back();
    size_t phase = 0;
    for (int64_t next = next_.fetch_add(1, kRelaxed); next < all; next = next_.fetch_add(1, kRelaxed)) {
      while (next >= ends_[phase]) ++phase;
      const int64_t first = phase == 0 ? 0 : ends_[phase - 1];
      if (done_.load(std::memory_order_acquire) < first) {
        ahead(phase, next - first);
        wait(first);
      }
      body(phase, next - first);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

 private:
  static constexpr std::memory_order kRelaxed = std::memory_order_relaxed;
  static constexpr int kSpins = 2000;  // some ten microseconds: then another process may need the core

  void wait(int64_t pieces) const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < pieces; ++spins) {
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
