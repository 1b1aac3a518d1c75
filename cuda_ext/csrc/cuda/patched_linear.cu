#include "patches.h"
#include "patched_linear.h"

namespace raylm::cuda {

extern template Tensor patched_product<__nv_bfloat16, Fp8Codes<__nv_bfloat16>>(const PatchedProduct&);
extern template Tensor patched_product<__nv_bfloat16, Mxfp4Codes<__nv_bfloat16>>(const PatchedProduct&);
extern template Tensor patched_product<__nv_bfloat16, Mxfp8Codes<__nv_bfloat16>>(const PatchedProduct&);
extern template Tensor patched_product<__nv_bfloat16, Nf4Codes<__nv_bfloat16>>(const PatchedProduct&);
extern template Tensor patched_product<__nv_bfloat16, Affine4Codes<__nv_bfloat16>>(const PatchedProduct&);
extern template Tensor patched_product<__nv_bfloat16, Affine8Codes<__nv_bfloat16>>(const PatchedProduct&);
extern template Tensor patched_product<__nv_bfloat16, Int8Codes<__nv_bfloat16>>(const PatchedProduct&);
extern template Tensor patched_product<__half, Int8Codes<__half>>(const PatchedProduct&);
extern template Tensor by_integers<__nv_bfloat16>(const PatchedProduct&);
extern template Tensor by_integers<__half>(const PatchedProduct&);
extern template Tensor patched_product<__nv_bfloat16, Int4Groups<__nv_bfloat16>>(const PatchedProduct&);
extern template Tensor patched_product<__half, Int4Groups<__half>>(const PatchedProduct&);
extern template Tensor patched_product<__nv_bfloat16, Int4LongGroups<__nv_bfloat16>>(const PatchedProduct&);
extern template Tensor patched_product<__half, Int4LongGroups<__half>>(const PatchedProduct&);

namespace {

void check(const char* op, const PatchedProduct& p, Numbers numbers) {
  constexpr int64_t kMost = 1 << 24;
  Arg(op, "x", p.x).dtype({ScalarType::BFloat16, ScalarType::Half}).dim(2).last_contiguous();
  Arg(op, "weight", p.weight).dtype({ScalarType::Byte}).dim(2).on_device_of(p.x).contiguous();
  const int64_t bytes = p.across * bytes_of_patch(bits_of(numbers), p.group_log2);
  Arg(op, "weight", p.weight).size(1, bytes, "the patches of x's columns");
  if (p.bias) Arg(op, "bias", *p.bias).dtype({p.x.scalar_type()}).dim(1).size(0, p.n, "the rows of weight");
  if (p.bias) Arg(op, "bias", *p.bias).on_device_of(p.x).contiguous();
  if (p.k % 64 != 0 || p.k == 0) fail(op, "x has ", p.k, " columns, must have a multiple of 64");
  if (p.n > kMost || p.k > kMost || p.rows > kMost) fail(op, "x or weight has more than ", kMost, " rows or columns");
  if (!is_aligned(p.x.data_ptr()) || p.x.stride(0) % 8 || !is_aligned(p.weight.data_ptr())) {
    fail(op, "rows of x or weight are not 16-byte aligned");
  }
  if (p.act != GateAct::kNone && p.n % (2 * kPatchRows) != 0) {
    fail(op, "weight has ", p.n, " rows, must have a multiple of ", 2 * kPatchRows, ", gate's and up's");
  }
  if (!kHopperKernels || compute_major(p.x.get_device_index()) != 9) fail(op, "has kernels for Hopper GPUs alone");
}

Tensor int4_product(const PatchedProduct& p, bool half) {
  if (p.group_log2 < 7) {
    return half ? patched_product<__half, Int4Groups<__half>>(p)
                : patched_product<__nv_bfloat16, Int4Groups<__nv_bfloat16>>(p);
  }
  return half ? patched_product<__half, Int4LongGroups<__half>>(p)
              : patched_product<__nv_bfloat16, Int4LongGroups<__nv_bfloat16>>(p);
}

Tensor run(const char* op, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, GateAct act,
           int64_t numbers, int64_t group, bool frozen) {
  const Numbers kind = numbers_of(op, numbers, x);
  Arg(op, "x", x).dim(2);
  Arg(op, "weight", weight).dim(2);
  const PatchedProduct product{x, weight, bias, act, group_log2_of(op, kind, group), frozen};
  check(op, product, kind);
  const Guard guard(x.get_device_index());
  const bool half = x.scalar_type() == ScalarType::Half;
  const auto product_of = [&] {
    switch (kind) {
      case Numbers::kInt4: return int4_product(product, half);
      case Numbers::kInt8:
        return half ? patched_product<__half, Int8Codes<__half>>(product)
                    : patched_product<__nv_bfloat16, Int8Codes<__nv_bfloat16>>(product);
      case Numbers::kInt8Rows:
        return half ? by_integers<__half>(product) : by_integers<__nv_bfloat16>(product);
      case Numbers::kFp8Rows: return by_floats(product);
      case Numbers::kAffine4: return patched_product<__nv_bfloat16, Affine4Codes<__nv_bfloat16>>(product);
      case Numbers::kAffine8: return patched_product<__nv_bfloat16, Affine8Codes<__nv_bfloat16>>(product);
      case Numbers::kMxfp8: return patched_product<__nv_bfloat16, Mxfp8Codes<__nv_bfloat16>>(product);
      case Numbers::kNf4: return patched_product<__nv_bfloat16, Nf4Codes<__nv_bfloat16>>(product);
      case Numbers::kMxfp4: return patched_product<__nv_bfloat16, Mxfp4Codes<__nv_bfloat16>>(product);
      default: return patched_product<__nv_bfloat16, Fp8Codes<__nv_bfloat16>>(product);
    }
  };
  const Tensor result = product_of();
  check_launch(op);
  return result;
}

Tensor patched_linear(Tensor x, Tensor weight, std::optional<Tensor> bias, int64_t numbers, int64_t group, bool frozen) {
  return run("patched_linear", x, weight, bias, GateAct::kNone, numbers, group, frozen);
}

Tensor patched_gated_linear(Tensor x, Tensor weight, std::optional<Tensor> bias, bool gelu_tanh, int64_t numbers,
                            int64_t group, bool frozen) {
  return run("patched_gated_linear", x, weight, bias, gelu_tanh ? GateAct::kGeluTanh : GateAct::kSilu, numbers, group,
             frozen);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("patched_linear", TORCH_BOX(&patched_linear));
  m.impl("patched_gated_linear", TORCH_BOX(&patched_gated_linear));
}

}  // namespace raylm::cuda
