// How decode_attention.cuh's kernel is launched: for caches of the queries' type, and of codes.
#pragma once

#include <algorithm>

#include "decode_attention.h"
#include "raylm/cuda/decode_attention.cuh"

namespace raylm::cuda {
namespace {

static_assert(kMaxDecodeQueries == kDecodeQueries);

constexpr int kMinShare = 8;  // units: below, starting and joining blocks takes longer than their work
constexpr int kFewSlots = 4;  // for each sequence: with as many slots or more, a batch has few sequences

bool aligned(const void* pointer, size_t to) { return reinterpret_cast<uintptr_t>(pointer) % to == 0; }

// Elements of a cache of C that are copied at a time.
template <typename C>
constexpr int64_t kCacheVector = 16 / sizeof(C);

// Keys and values are copied 16 bytes at a time, a warp's 16 keys from one block; queries are read 4 bytes at a time, or
// with codes 8.
template <typename T, typename C>
bool can_take(const AttentionParams<T>& p) {
  constexpr int64_t vector = kCacheVector<C>, pairs = std::is_same_v<C, Code> ? 2 : 1;
  const int64_t strides[] = {p.k_block_stride, p.k_slot_stride, p.k_head_stride,
                             p.v_block_stride, p.v_slot_stride, p.v_head_stride};
  return p.head_dim % vector == 0 && p.block_size % 16 == 0 && aligned(p.k_cache, 16) && aligned(p.v_cache, 16) &&
         std::all_of(std::begin(strides), std::end(strides), [](int64_t stride) { return stride % vector == 0; }) &&
         aligned(p.q, 4 * pairs) && p.q_token_stride % (2 * pairs) == 0 && p.q_head_stride % (2 * pairs) == 0;
}

// Of a sequence, at most.
template <typename T>
int64_t most_rows(const AttentionParams<T>& p, int64_t max_query_len) {
  return std::min(max_query_len, kMaxDecodeQueries) * (p.num_heads / p.num_kv_heads);
}

// How many blocks the device runs at a time; 0 where it has too little shared memory for one.
template <typename T, typename C, int D, int N, bool Biased>
int resident_blocks(int device) {
  static DeviceNumber known;
  return known.of(device, [device] {
    constexpr int bytes = DecodeLayout<C, D, N>::kBytes;
    constexpr auto* kernel = decode_attention_kernel<T, C, D, N, Biased>;
    int blocks = 0;
    if (allows_shared<kernel>(device, bytes)) {
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kDecodeThreads, bytes);
    }
    cudaGetLastError();
    return blocks * device_attribute(cudaDevAttrMultiProcessorCount, device);
  });
}

template <typename T>
DecodeParams<T> make_params(const AttentionParams<T>& attention, int64_t units, int64_t columns, int blocks) {
  const int64_t most = std::max<int64_t>(1, blocks / columns);
  DecodeParams<T> p{attention, {}, {}, 0, nullptr};
  p.batch.few = kFewSlots * attention.num_seqs <= most;
  const int64_t cut = p.batch.few ? kDecodeTile : kMinShare + kDecodeTurn;
  const int64_t share = units <= p.batch.whole() ? units + kDecodeTurn : cut;
  const int64_t shares = divide_up(attention.num_seqs * (units + kDecodeTurn), share);
  p.batch.query_start = attention.query_start;
  p.batch.seq_lens = attention.seq_lens;
  p.batch.num_seqs = static_cast<int>(attention.num_seqs);
  p.batch.group = static_cast<int>(attention.num_heads / attention.num_kv_heads);
  p.batch.window = static_cast<int>(std::min<int64_t>(attention.window, INT32_MAX / 2));
  p.batch.slots = static_cast<int>(std::clamp<int64_t>(shares, 1, most));
  p.batch.min_share = static_cast<int>(share);
  return p;
}

// Memory of one launch, which torch's allocator keeps for this stream, and for a CUDA graph.
struct Memory {
  Tensor parts, arrivals;
};

// Room for the parts of sequences that are cut. `arrivals` are zeros, and are so again when the kernel has ended.
template <typename T>
Memory lay_out(DecodeParams<T>& p, int64_t columns, const Tensor& q, const std::optional<Tensor>& arrivals) {
  const int64_t slots = p.batch.slots * columns, parts = 2 * slots * p.parts.rows;
  const int64_t sums = parts * p.attention.head_dim;
  Memory memory;
  memory.parts = torch::stable::new_empty(q, {sums + parts}, ScalarType::Float);
  const bool given = arrivals && arrivals->numel() >= slots;
  memory.arrivals = given ? *arrivals : torch::stable::new_zeros(q, {slots}, ScalarType::Int);
  p.parts.sums = data<float>(memory.parts);
  p.parts.logs = p.parts.sums + sums;
  p.parts.arrivals = data<unsigned>(memory.arrivals);
  return memory;
}

template <typename T, typename C, int D, int N, bool Biased>
bool launch(const AttentionParams<T>& attention, const Tensor& q, int64_t max_query_len, int64_t max_seq_len,
            const float* alibi_slopes, const std::optional<Tensor>& arrivals) {
  using Layout = DecodeLayout<C, D, N>;
  const int64_t rows = most_rows(attention, max_query_len);
  const int blocks = resident_blocks<T, C, D, N, Biased>(q.get_device_index());
  if (blocks == 0) return false;
  const int64_t columns = attention.num_kv_heads * divide_up(rows, Layout::kRows);
  const int64_t window =
      attention.window > 0 ? std::min(attention.window, max_seq_len) + kDecodeQueries : max_seq_len;
  const int64_t units = std::min(divide_up(max_seq_len, kDecodeKeys), divide_up(window, kDecodeKeys) + 1);
  DecodeParams<T> p = make_params(attention, units, columns, blocks);
  p.num_tokens = q.size(0);
  p.alibi_slopes = alibi_slopes;
  p.parts.rows = static_cast<int>(std::min<int64_t>(rows, Layout::kRows));
  Memory memory;
  if (units > p.batch.whole() && p.batch.num_seqs > 0) memory = lay_out(p, columns, q, arrivals);
  const dim3 grid(columns, p.batch.slots);
  const cudaStream_t stream = current_stream(q);
  const auto kernel = decode_attention_kernel<T, C, D, N, Biased>;
  launch_dependent(kernel, {grid, dim3(kDecodeThreads), stream, Layout::kBytes}, p);
  check_launch("paged_attention");
  return true;
}

// Calls body.template operator()<D, N, Biased>() of the kernel for `rows` rows of a sequence: as many in a warp as there may
// be, and registers can hold. Every kernel takes long to compile: for linear biases, which are rare, and for codes a few do
// for all shapes, and for both together there is none.
template <typename C, typename Body>
bool by_shape(int64_t head_dim, int64_t rows, bool biased, const Body& body) {
  const auto plain = [&]<int D> {
    return rows <= 8 ? body.template operator()<D, 1, false>() : body.template operator()<D, 2, false>();
  };
  if constexpr (std::is_same_v<C, Code>) {
    if (biased) return false;
    if (head_dim <= 64) return plain.template operator()<64>();
    if (head_dim <= 128) return plain.template operator()<128>();
    return plain.template operator()<256>();
  } else {
    if (biased) {
      if (head_dim <= 64) return body.template operator()<64, 1, true>();
      if (head_dim <= 128) return body.template operator()<128, 1, true>();
      return body.template operator()<256, 1, true>();
    }
    if (head_dim <= 64) return plain.template operator()<64>();
    if (head_dim <= 96) return plain.template operator()<96>();
    if (head_dim <= 128) return plain.template operator()<128>();
    if (head_dim <= 192) return plain.template operator()<192>();
    return plain.template operator()<256>();
  }
}

}  // namespace

template <typename T, typename C>
bool decode_attention(const AttentionParams<T>& params, const Tensor& q, int64_t max_query_len, int64_t max_seq_len,
                      const float* alibi_slopes, const std::optional<Tensor>& arrivals) {
  if (!can_take<T, C>(params)) return false;
  const int64_t rows = most_rows(params, max_query_len);
  return by_shape<C>(params.head_dim, rows, alibi_slopes != nullptr, [&]<int D, int N, bool B> {
    return launch<T, C, D, N, B>(params, q, max_query_len, max_seq_len, alibi_slopes, arrivals);
  });
}

template <typename T, typename C>
bool has_decode_attention(int64_t head_dim, int64_t group, int64_t block_size, bool biased, int device) {
  if (head_dim % kCacheVector<C> != 0 || block_size % 16 != 0) return false;
  return by_shape<C>(head_dim, group, biased, [&]<int D, int N, bool B> {
    return resident_blocks<T, C, D, N, B>(device) > 0;
  });
}

}  // namespace raylm::cuda
