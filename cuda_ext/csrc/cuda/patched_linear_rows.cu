#include "patched_linear.h"
#include "raylm/cuda/integer_rows.cuh"

namespace raylm::cuda {
namespace {

constexpr int64_t kMostColumns = 1 << 17;  // whose products' sums integers of 32 bits hold; x of more is not rounded

template <typename T>
RoundedRows rounded(const PatchedProduct& p) {
  const int64_t across = p.across * kPatchColumns;
  const RoundedRows rows{torch::stable::new_empty(p.x, {p.rows, across}, ScalarType::Char),
                         torch::stable::new_empty(p.x, {p.rows}, ScalarType::Float)};
  const IntegerRowsParams<T> params{data<T>(p.x), p.x.stride(0), data<signed char>(rows.integers), data<float>(rows.scales),
                                    static_cast<int>(p.k), static_cast<int>(across)};
  launch_dependent(integer_rows_kernel<T>, dim3(p.rows), dim3(threads_for(across / 16, 1024)), current_stream(p.x), params);
  return rows;
}

}  // namespace

template <typename T>
Tensor rounded_product(const PatchedProduct& p) {
  if (p.rows <= kMostUnrounded || p.k > kMostColumns) return patched_product<T, Int8Codes<T>>(p);
  const Tensor out = torch::stable::new_empty(p.x, {p.rows, p.n});
  const RoundedRows rows = rounded<T>(p);
  if (!run_patched<T, Int8Rows<T>>(p, out, &rows)) return patched_product<T, Int8Codes<T>>(p);
  return out;
}

template Tensor rounded_product<__nv_bfloat16>(const PatchedProduct&);
template Tensor rounded_product<__half>(const PatchedProduct&);

}  // namespace raylm::cuda
