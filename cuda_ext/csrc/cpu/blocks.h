// The checks of operators on quantised GGUF weights.
#pragma once

#include "checks.h"
#include "raylm/cpu/block_kinds.h"

namespace raylm {

struct BlockSize {
  const char* name;
  int64_t values, bytes;
};

inline BlockSize block_size(const char* op, int64_t number) {
  BlockSize size{};
  const bool known = with_kind(number, [&](auto kind) { size = {kind.kName, kind.kValues, kind.kBytes}; });
  if (!known) fail(op, "kind ", number, " has no kernel; block_kernels says which have one");
  return size;
}

}  // namespace raylm
