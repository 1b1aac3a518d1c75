#include "patched_experts.h"

#include "patches.h"

namespace raylm::cuda {

extern template Tensor coded_experts<__nv_bfloat16, Fp8Codes>(const CodedCall&);
extern template Tensor coded_experts<__nv_bfloat16, Mxfp4Codes>(const CodedCall&);
extern template Tensor coded_experts<__nv_bfloat16, Mxfp8Codes>(const CodedCall&);
extern template Tensor coded_experts<__nv_bfloat16, Nf4Codes>(const CodedCall&);
extern template Tensor coded_experts<__nv_bfloat16, Affine4Codes>(const CodedCall&);
extern template Tensor coded_experts<__nv_bfloat16, Affine8Codes>(const CodedCall&);
extern template Tensor coded_experts<__nv_bfloat16, Fp8Rows>(const CodedCall&);
extern template Tensor coded_experts<__nv_bfloat16, Int8Rows>(const CodedCall&);
extern template Tensor coded_experts<__half, Int8Rows>(const CodedCall&);

namespace {

constexpr const char* kOp = kCodedExperts;

void check(const CodedCall& c) {
  Arg(kOp, "x", c.x).dtype({ScalarType::BFloat16, ScalarType::Half}).dim(2).last_contiguous();
  Arg(kOp, "gate_up", c.gate_up).dtype({ScalarType::Byte}).dim(3).on_device_of(c.x).contiguous();
  Arg(kOp, "down", c.down).dtype({ScalarType::Byte}).dim(3).on_device_of(c.x).contiguous();
  Arg(kOp, "gate_up", c.gate_up).size(0, c.down.size(0), "the experts of down");
  if (c.x.size(1) != c.down.size(1) * 16) fail(kOp, "x has ", c.x.size(1), " columns, must have the rows of down");
  if (c.gate_up.size(1) % 2) fail(kOp, "gate_up has ", c.gate_up.size(1), " rows of patches, must have as many of gate as of up");
  const auto bias = [&](const char* name, const std::optional<Tensor>& given, int64_t rows) {
    if (!given) return;
    Arg(kOp, name, *given).dtype({c.x.scalar_type()}).dim(2).size(0, c.down.size(0), "the experts").contiguous();
    Arg(kOp, name, *given).size(1, rows, "the rows of an expert's weight").on_device_of(c.x);
  };
  bias("gate_up_bias", c.gate_up_bias, 2 * c.size);
  bias("down_bias", c.down_bias, c.x.size(1));
  check_pairs(kOp, c.x, c.weights, c.chosen);
  if (!is_aligned(c.x.data_ptr()) || c.x.stride(0) % 8 || !is_aligned(c.gate_up.data_ptr()) || !is_aligned(c.down.data_ptr())) {
    fail(kOp, "rows of x or weights are not 16-byte aligned");
  }
  if (c.down.size(0) > kMostExperts) fail(kOp, "down has ", c.down.size(0), " experts, must have at most ", kMostExperts);
  if (!kHopperKernels || compute_major(c.x.get_device_index()) != 9) fail(kOp, "has kernels for Hopper GPUs alone");
}

Tensor patched_experts(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor chosen,
                       std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias, int64_t activation,
                       double limit, int64_t numbers, int64_t group) {
  const Numbers kind = numbers_of(kOp, numbers, x);
  const CodedCall call{x, gate_up, down, weights, chosen, gate_up_bias, down_bias, expert_gate(kOp, activation, limit),
                       group_log2_of(kOp, kind, group)};
  check(call);
  const bool half = x.scalar_type() == ScalarType::Half;
  switch (kind) {
    case Numbers::kInt4:
      return half ? coded_experts<__half, Int4Groups>(call) : coded_experts<__nv_bfloat16, Int4Groups>(call);
    case Numbers::kInt8Rows:
      if (x.size(0) > kMostUnroundedByIntegers && std::max(x.size(1), call.size) <= kMostIntegers) {
        return half ? coded_experts<__half, Int8Rows>(call) : coded_experts<__nv_bfloat16, Int8Rows>(call);
      }
      [[fallthrough]];
    case Numbers::kInt8:
      return half ? coded_experts<__half, Int8Codes>(call) : coded_experts<__nv_bfloat16, Int8Codes>(call);
    case Numbers::kAffine4: return coded_experts<__nv_bfloat16, Affine4Codes>(call);
    case Numbers::kAffine8: return coded_experts<__nv_bfloat16, Affine8Codes>(call);
    case Numbers::kNf4: return coded_experts<__nv_bfloat16, Nf4Codes>(call);
    case Numbers::kMxfp8: return coded_experts<__nv_bfloat16, Mxfp8Codes>(call);
    case Numbers::kMxfp4: return coded_experts<__nv_bfloat16, Mxfp4Codes>(call);
    case Numbers::kFp8Rows:
      if (x.size(0) > kMostUnroundedByFloats) return coded_experts<__nv_bfloat16, Fp8Rows>(call);
      [[fallthrough]];
    default: return coded_experts<__nv_bfloat16, Fp8Codes>(call);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("patched_experts", TORCH_BOX(&patched_experts)); }

}  // namespace raylm::cuda
