// Programmatic dependent launch: a kernel launched with it (launch.h: launch_dependent) may start while the one before it
// on the stream still runs, and must not read what that one writes, nor write anything, before it has waited for it.
// Each such kernel must wait, in every block, so that "the kernel before has ended" stays true of all before it as well.
#pragma once

#include <cstdint>

namespace raylm::cuda {

__device__ inline void wait_for_dependencies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel may start where there is room beside this one.
__device__ inline void start_dependents() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace raylm::cuda
