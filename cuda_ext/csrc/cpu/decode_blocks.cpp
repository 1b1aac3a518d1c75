#include "blocks.h"
#include "common.h"

namespace raylm {
namespace {

Tensor decode_blocks(Tensor blocks, int64_t number) {
  const char* op = "decode_blocks";
  Arg(op, "blocks", blocks).dtype({ScalarType::Byte}).dim(2).last_contiguous().on_cpu();
  const BlockSize block = block_size(op, number);
  if (blocks.size(1) % block.bytes != 0) {
    fail(op, "blocks has rows of ", blocks.size(1), " bytes, must be a multiple of the ", block.bytes, " of a ",
         block.name, " block");
  }
  const int64_t rows = blocks.size(0), count = blocks.size(1) / block.bytes, values = count * block.values;
  const int64_t shape[2] = {rows, values};
  Tensor out = torch::stable::new_empty(blocks, torch::headeronly::IntHeaderOnlyArrayRef(shape, 2), ScalarType::Float);
  const uint8_t* from = blocks.const_data_ptr<uint8_t>();
  const int64_t stride = blocks.stride(0);
  float* to = out.mutable_data_ptr<float>();
  with_kind(number, [&](auto kind) {
    for_range(rows, values, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t b = 0; b < count; ++b) {
          kind.read(from + row * stride + b * kind.kBytes, to + row * values + b * kind.kValues);
        }
      }
    });
  });
  return out;
}

bool block_kernels(Tensor /*like*/, int64_t number) {
  return with_kind(number, [](auto) {});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CPU, m) {
  m.impl("decode_blocks", TORCH_BOX(&decode_blocks));
  m.impl("block_kernels", TORCH_BOX(&block_kernels));
}

}  // namespace raylm
