// Stages that are filled and emptied in turn.
#pragma once

namespace raylm::cuda {

// The stage of a ring that comes next, and the parity of its barrier.
template <int Stages>
struct Ring {
  int stage = 0, parity = 0;
  __device__ void advance() {
    if (++stage == Stages) stage = 0, parity ^= 1;
  }
};

// The same for a number of stages that is known at run time.
struct SizedRing {
  int stages, stage = 0, parity = 0;
  __device__ void advance() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

}  // namespace raylm::cuda
