#include "common.h"
#include "shapes.h"

namespace raylm {
namespace {

void rotary(Tensor q, Tensor k, Tensor positions, Tensor cos_sin) {
  const char* op = "rotary";
  check_rotary(q, k, positions, cos_sin);
  Arg(op, "q", q).on_cpu();
  Arg(op, "k", k).on_cpu();
  Arg(op, "positions", positions).on_cpu();
  Arg(op, "cos_sin", cos_sin).on_cpu();
  RotaryArgs args{};
  args.dtype = dtype_of(q);
  args.positions = checked_indices(op, "positions", positions, cos_sin.size(0));
  args.cos_sin = cos_sin.const_data_ptr<float>();
  args.rotary_dim = cos_sin.size(1);
  const Tensor* sides[2] = {&q, &k};
  for (int side = 0; side < 2; ++side) {
    args.x[side] = sides[side]->mutable_data_ptr();
    args.token_stride[side] = sides[side]->stride(0);
    args.head_stride[side] = sides[side]->stride(1);
    args.num_heads[side] = sides[side]->size(1);
  }
  const int64_t cost = (q.size(1) + k.size(1)) * args.rotary_dim;
  for_range(q.size(0), cost, [&](int64_t begin, int64_t end) { cpu_kernels().rotary(args, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CPU, m) { m.impl("rotary", TORCH_BOX(&rotary)); }

}  // namespace raylm
