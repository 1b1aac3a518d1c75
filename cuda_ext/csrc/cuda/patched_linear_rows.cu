#include "patched_linear.h"

namespace raylm::cuda {

extern template Tensor patched_product<__nv_bfloat16, Fp8Codes<__nv_bfloat16>>(const PatchedProduct&);
extern template Tensor patched_product<__nv_bfloat16, Int8Codes<__nv_bfloat16>>(const PatchedProduct&);
extern template Tensor patched_product<__half, Int8Codes<__half>>(const PatchedProduct&);

namespace {

template <typename T, typename Form, typename Unrounded>
Tensor by_rounded(const PatchedProduct& p, int64_t most_unrounded) {
  if (p.rows <= most_unrounded) return patched_product<T, Unrounded>(p);
  const Tensor out = torch::stable::new_empty(p.x, {p.rows, p.columns});
  const RoundedRows rows = rounded_rows(p.x, Form::kScalesPatches, current_stream(p.x));
  return run_patched<T, Form>(p, out, &rows) ? out : patched_product<T, Unrounded>(p);
}

}  // namespace

template <typename T>
Tensor by_integers(const PatchedProduct& p) {
  return by_rounded<T, Int8Rows<T>, Int8Codes<T>>(p, p.k > kMostIntegers ? p.rows : kMostUnroundedByIntegers);
}

template Tensor by_integers<__nv_bfloat16>(const PatchedProduct&);
template Tensor by_integers<__half>(const PatchedProduct&);

Tensor by_floats(const PatchedProduct& p) {
  using T = __nv_bfloat16;
  return by_rounded<T, Fp8Rows<T>, Fp8Codes<T>>(p, kMostUnroundedByFloats);
}

}  // namespace raylm::cuda
