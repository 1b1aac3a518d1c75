// What a KV cache's elements are: of the queries' type, or codes.
#pragma once

#include "launch.h"
#include "raylm/cuda/tile/numbers.cuh"

namespace raylm::cuda {

// Calls body(C{}) with the type of the cache's elements; T is that of the queries.
template <typename T, typename Body>
void by_cache(const Tensor& cache, const Body& body) {
  if (cache.scalar_type() == ScalarType::Float8_e4m3fn) return body(Code{});
  body(T{});
}

}  // namespace raylm::cuda
