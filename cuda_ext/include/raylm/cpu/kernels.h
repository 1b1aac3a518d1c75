// The CPU kernels as a table of functions on raw pointers, one table per instruction set; torch is not known here.
// Strides count elements. A function works on a part of its range, so that the caller may spread it over threads.
#pragma once

#include <cstdint>

namespace raylm {

enum class DType { kFloat32, kBFloat16, kFloat16 };

struct NormArgs {
  DType dtype;
  const void* x;  // row r starts at (r / inner) * outer_stride + (r % inner) * inner_stride
  int64_t inner, outer_stride, inner_stride;
  void* residual;  // null: plain norm; else x is added to it first
  int64_t residual_stride;
  const void* weight;
  void* out;  // contiguous rows
  int64_t hidden;
  float eps;
};

struct RotaryArgs {
  DType dtype;
  void* x[2];  // q and k
  int64_t token_stride[2], head_stride[2], num_heads[2];
  const int64_t* positions;
  const float* cos_sin;
  int64_t rotary_dim;
};

struct StoreArgs {
  const void* src[2];  // k and v
  void* cache[2];
  int64_t token_stride[2], head_stride[2];
  int64_t block_stride[2], slot_stride[2], cache_head_stride[2];
  const int64_t* slots;
  int64_t num_heads, block_size, row_bytes, element_bytes;
};

// Of gated products, by their numbers in raylm::block_experts.
enum class Activation { kSilu, kGeluTanh, kClampedSwiglu };

struct GatedArgs {
  DType dtype;
  Activation activation;
  const void* x;
  int64_t x_stride;
  void* out;  // contiguous rows
  int64_t width;
};

struct LinearArgs {
  DType dtype;  // of the weight
  const float* x;
  int64_t x_stride;
  const void* weight;
  int64_t weight_stride;
  const float* bias;  // may be null
  float* out;         // contiguous rows
  int64_t num_rows, in_size, out_size;
};

// What turns the codes of kQuantised values of x into numbers: a code times `scale` is one.
struct RowScales {
  float scale;
  float sums[3];       // `scale` times the sum of the codes, and times that of each half of them
  int32_t high_bytes;  // their sum times 2^15, where the table reads bytes
};

// Rows of x in 16 bits: codes of -32767 to 32767.
struct QuantisedRows {
  // [rows, size], kCodeBytes a value, as the table's products read them: codes, of each four values in the order 0 2 1 3;
  // or of each kQuantised values the codes' low bytes, then their high ones, in the order of values.
  uint8_t* codes;
  RowScales* scales;  // [rows, size / kQuantised]
  int64_t size;       // of a row
};

struct QuantiseArgs {
  DType dtype;
  const void* x;
  int64_t x_stride;
  QuantisedRows out;
};

// One or two quantised weights of a product. Two are gate and up: the result is act(gate) * up.
struct BlockLinearArgs {
  DType dtype;  // of bias and out
  QuantisedRows x;
  int64_t num_rows;
  int kinds[2];
  const uint8_t* blocks[2];
  int64_t blocks_stride[2];  // bytes
  const void* bias[2];       // may be null
  Activation activation;     // of two weights
  float limit;               // of kClampedSwiglu
  void* out;
  int64_t out_stride;
  int64_t out_size;  // rows of a weight
};

// Rows of out: sums of `per_row` rows of parts, each times its weight.
struct CombineArgs {
  DType dtype;  // of parts and out
  const void* parts;
  const int64_t* places;  // [rows, per_row]: rows of parts
  const float* weights;   // [rows, per_row]
  void* out;
  int64_t per_row, width;
};

struct AttentionArgs {
  DType dtype;
  const void* q;
  int64_t q_token_stride, q_head_stride;
  const void* k_cache;
  const void* v_cache;
  int64_t k_block_stride, k_slot_stride, k_head_stride;
  int64_t v_block_stride, v_slot_stride, v_head_stride;
  const int32_t* block_table;
  int64_t block_table_stride;
  void* out;  // contiguous [T, Hq, D]
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  float scale;
  int64_t window;
  float soft_cap;
  const float* alibi_slopes;  // [num_heads], may be null
  const float* sinks;         // [num_heads], may be null: a logit of the softmax that has no value
};

// Some queries of one sequence, the query heads of one kv head, and the keys [key_begin, key_end).
struct AttentionUnit {
  int64_t sequence, kv_head;
  int64_t first_token, num_queries;  // rows of q
  int64_t first_position;            // position of the first of them
  int64_t key_begin, key_end;
  float* partial;  // null: the unit sees all keys and writes `out`; else rows of head_dim + 2 floats
};

constexpr int64_t kLinearColumns = 16;  // columns that linear computes together: a group
constexpr int64_t kQuantised = 32;      // values of x that share a scale in block_linear
constexpr int64_t kCodeBytes = 2;       // of one of these
constexpr int64_t kAttentionRows = 48;  // queries times heads of a group in one unit, unless one query has more heads
constexpr int64_t kAttentionKeys = 64;  // keys at a time

constexpr int64_t linear_groups(int64_t columns) { return (columns + kLinearColumns - 1) / kLinearColumns; }

// Floats of scratch memory that attention needs for a unit with that many rows.
constexpr int64_t attention_scratch(int64_t rows, int64_t head_dim) {
  return rows * (2 * head_dim + kAttentionKeys + 2);
}

struct CpuKernels {
  const char* isa;
  void (*rms_norm)(const NormArgs&, int64_t begin, int64_t end);                           // rows
  void (*rotary)(const RotaryArgs&, int64_t begin, int64_t end);                           // tokens
  void (*store_kv)(const StoreArgs&, int64_t begin, int64_t end);                          // tokens
  void (*gated)(const GatedArgs&, int64_t begin, int64_t end);                             // rows
  void (*linear)(const LinearArgs&, int64_t begin, int64_t end);                           // columns, begin a multiple of 16
  void (*quantise)(const QuantiseArgs&, int64_t begin, int64_t end);                       // rows
  void (*block_linear)(const BlockLinearArgs&, int64_t begin, int64_t end);                // columns, as in linear
  void (*block_gated)(const BlockLinearArgs&, int64_t begin, int64_t end);                 // columns, as in linear
  void (*combine)(const CombineArgs&, int64_t begin, int64_t end);                         // rows
  void (*attention)(const AttentionArgs&, const AttentionUnit&, float* scratch);           // one unit
  void (*merge)(const AttentionArgs&, const AttentionUnit&, int64_t num_splits);           // units that share rows
};

// The table for the best instruction set of this machine.
const CpuKernels& cpu_kernels();

}  // namespace raylm
