#include "rounded_rows.h"

#include "raylm/cuda/rounded_rows.cuh"
#include "raylm/cuda/tile/patches.cuh"

namespace raylm::cuda {
namespace {

template <typename T>
void launch(const Tensor& x, const RoundedRows& to, bool floats, cudaStream_t stream, const int* places, int64_t each) {
  const int64_t rows = x.size(0), across = to.bytes.size(1);
  const RoundedRowsParams<T> params{data<T>(x),
                                    x.stride(0),
                                    data<unsigned char>(to.bytes),
                                    data<float>(to.scales),
                                    places,
                                    static_cast<int>(rows),
                                    static_cast<int>(each),
                                    static_cast<int>(x.size(1)),
                                    static_cast<int>(across)};
  // Of many rows, short ones share a block, and threads ask for more bytes at a time.
  const bool many = rows >= 512;
  const unsigned threads = threads_for(divide_up(across / 16, many ? 2 : 1), 1024);
  const unsigned together = threads >= 256 || !many ? 1 : 256 / threads;
  const Launch launch{dim3(divide_up(rows, together)), dim3(threads, together), stream};
  const auto as = [&](auto byte) {
    using Byte = decltype(byte);
    if (places) {
      many ? launch_dependent(rounded_rows_kernel<T, Byte, 2, true>, launch, params)
           : launch_dependent(rounded_rows_kernel<T, Byte, 1, true>, launch, params);
    } else {
      many ? launch_dependent(rounded_rows_kernel<T, Byte, 2, false>, launch, params)
           : launch_dependent(rounded_rows_kernel<T, Byte, 1, false>, launch, params);
    }
  };
  using Integer = signed char;
  floats ? as(Code{}) : as(Integer{});
}

}  // namespace

RoundedRows rounded_rows(const Tensor& x, bool floats, cudaStream_t stream, const int* places, int64_t each) {
  const int64_t across = divide_up(x.size(1), kPatchColumns) * kPatchColumns;
  const RoundedRows to{torch::stable::new_empty(x, {x.size(0) * each, across}, ScalarType::Byte),
                       torch::stable::new_empty(x, {x.size(0) * each}, ScalarType::Float)};
  x.scalar_type() == ScalarType::Half ? launch<__half>(x, to, floats, stream, places, each)
                                      : launch<__nv_bfloat16>(x, to, floats, stream, places, each);
  return to;
}

}  // namespace raylm::cuda
