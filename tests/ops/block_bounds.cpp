// Runs every reader of quantised blocks over heap buffers of exactly the size that it may read and write, filled with
// random bytes. With the number of a kind and "read" or "product" the reader of this kind gets blocks without their
// last byte. Compiled with the address sanitizer by test_block_bounds.py.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#if defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "raylm/cpu/block_kinds.h"
#include "raylm/cpu/block_linear.h"

namespace {

uint32_t state = 1;

uint8_t next_byte() {
  state = state * 1664525u + 1013904223u;
  return static_cast<uint8_t>(state >> 24);
}

std::vector<uint8_t> random_bytes(int64_t count) {
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = next_byte();
  return bytes;
}

template <typename Kind>
void read(int64_t bytes) {
  const std::vector<uint8_t> block = random_bytes(bytes);
  std::vector<float> values(Kind::kValues);
  Kind::read(block.data(), values.data());
}

template <typename Kind>
void multiply(int64_t out_size, int64_t num_blocks, int64_t rows, int64_t missing) {
  const int64_t size = num_blocks * Kind::kValues, stride = num_blocks * Kind::kBytes;
  const std::vector<uint8_t> blocks = random_bytes(out_size * stride - missing);
  std::vector<float> x(rows * size), out(rows * out_size), bias(out_size);
  std::vector<raylm::RowScales> scales(rows * size / raylm::kQuantised);
  for (float& value : x) value = static_cast<float>(next_byte()) - 100.0f;
  std::vector<uint8_t> codes(rows * size * raylm::kCodeBytes);
  const raylm::QuantisedRows quantised{codes.data(), scales.data(), size};
  raylm::quantise<float>({raylm::DType::kFloat32, x.data(), size, quantised}, 0, rows);
  raylm::BlockLinearArgs args{};
  args.x = quantised;
  args.num_rows = rows;
  args.out = out.data();
  args.out_stride = args.out_size = out_size;
  for (int weight = 0; weight < 2; ++weight) {
    args.kinds[weight] = Kind::kNumber;
    args.blocks[weight] = blocks.data();
    args.blocks_stride[weight] = stride;
    args.bias[weight] = bias.data();
  }
  raylm::block_linear<float>(args, 0, out_size);
  raylm::block_gated<float>(args, 0, out_size);
}

}  // namespace

int main(int argc, char** argv) {
#if defined(__AMX_INT8__)
  if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 1;  // as csrc/cpu/dispatch.cpp asks for tiles
#endif
  int kinds = 0;
  for (int number = 0; number < 256; ++number) {
    kinds += raylm::with_kind(number, [&](auto kind) {
      using Kind = decltype(kind);
      if (argc > 2 && number != std::atoi(argv[1])) return;
      if (argc > 2 && argv[2] == std::string("read")) return read<Kind>(Kind::kBytes - 1);
      if (argc > 2) return multiply<Kind>(17, 3, 5, 1);
      read<Kind>(Kind::kBytes);
      for (const int64_t out_size : {1, 3, 17}) {
        for (const int64_t num_blocks : {1, 3, 17}) {
          for (const int64_t rows : {1, 5, 13, 21}) multiply<Kind>(out_size, num_blocks, rows, 0);
        }
      }
    });
  }
  std::printf("%d kinds\n", kinds);
}
