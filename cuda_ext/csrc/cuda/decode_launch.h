// How decode_attention.cuh's kernel is launched: for caches of the queries' type, and of codes; all keys at once, or those
// of shared prefixes first.
#pragma once

#include <algorithm>

#include "decode_attention.h"
#include "raylm/cuda/decode_attention.cuh"
#include "tensor_map.h"

namespace raylm::cuda {
namespace {

static_assert(kMaxDecodeQueries == kDecodeQueries);
static_assert(kNarrowRows == DecodeLayout<__half, 64, 1, false>::kRows);
static_assert(kWideRows == DecodeLayout<__half, 64, 2, false>::kRows);

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
  return most_decode_queries(max_query_len, p.group()) * p.group();
}

// How many blocks the device runs at a time, with a stage more where `deep`; 0 where it has too little shared memory for
// one.
template <typename T, typename C, int D, int N, bool Biased, DecodePart Part, bool Boxes>
int resident_blocks(int device, bool deep = false) {
  static DeviceNumber known[2];
  return known[deep].of(device, [=] {
    using Layout = DecodeLayout<C, D, N, Boxes>;
    constexpr auto* kernel = decode_attention_kernel<T, C, D, N, Biased, Part, Boxes>;
    const bool has_deep = Layout::bytes(true) <= device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    int blocks = 0;
    if ((has_deep || !deep) && allows_shared<kernel>(device, Layout::bytes(has_deep))) {
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kDecodeThreads, Layout::bytes(deep));
    }
    cudaGetLastError();
    return blocks * device_attribute(cudaDevAttrMultiProcessorCount, device);
  });
}

template <DecodePart Part, bool Boxes, typename T>
DecodeParams<T, Part, Boxes> make_params(const AttentionParams<T>& attention, int64_t units, int64_t columns, int blocks) {
  const int64_t most = std::max<int64_t>(1, blocks / columns);
  DecodeParams<T, Part, Boxes> p{attention};
  p.batch.few = kFewSlots * attention.num_seqs <= most;
  const int64_t cut = p.batch.few ? kDecodeTile : kMinShare + kDecodeTurn;
  const int64_t share = units <= p.batch.whole() ? units + kDecodeTurn : cut;
  const int64_t shares = divide_up(attention.num_seqs * (units + kDecodeTurn), share);
  p.batch.query_start = attention.query_start;
  p.batch.seq_lens = attention.seq_lens;
  p.batch.num_seqs = static_cast<int>(attention.num_seqs);
  p.batch.group = static_cast<int>(attention.group());
  p.batch.window = static_cast<int>(std::min<int64_t>(attention.window, INT32_MAX / 2));
  p.batch.slots = static_cast<int>(std::clamp<int64_t>(shares, 1, most));
  p.batch.min_share = static_cast<int>(share);
  return p;
}

// Whether the copy engine may bring heads of this size: on Hopper, whose kernels these are.
template <typename C, int D>
bool takes_boxes(int64_t head_dim, int device) {
  return kHopperKernels && kComeInBoxes<C, D> && head_dim == D && compute_major(device) == 9;
}

// False where the heads of a slot don't follow each other.
template <typename C, int D, typename T>
bool make_boxes(DecodeBoxes& boxes, const AttentionParams<T>& a, int64_t num_blocks) {
  const auto make = [&](CUtensorMap* map, const void* cache, int64_t block, int64_t slot, int64_t head) {
    return make_heads_map<C, D>(map, cache, num_blocks, a.block_size, a.num_kv_heads, block, slot, head, kDecodeKeys / 8,
                                kLines);
  };
  return make(&boxes.k, a.k_cache, a.k_block_stride, a.k_slot_stride, a.k_head_stride) &&
         make(&boxes.v, a.v_cache, a.v_block_stride, a.v_slot_stride, a.v_head_stride);
}

// One launch of a kernel, and its memory, which torch's allocator keeps for this stream, and for a CUDA graph.
template <typename T, DecodePart Part, bool Boxes>
struct DecodeLaunch {
  DecodeParams<T, Part, Boxes> params;
  int64_t columns;  // 0: there is no room for a block
  Tensor parts, arrivals;
};

// The KV heads and chunks of rows that blocks are for.
template <typename Layout, typename T>
int64_t columns_of(const AttentionParams<T>& attention, int64_t rows) {
  return attention.num_kv_heads * divide_up(rows, Layout::kRows);
}

// A launch for sequences of at most `rows` rows, with room for the parts of sequences that are cut, and behind it for `more`
// rows. It runs at most `most` blocks at a time; with fewer than the device runs, no block is deep. Counters of arrivals are
// zeros, and are so again when the kernel has ended; prefixes have none.
template <typename T, typename C, int D, int N, bool Biased, DecodePart Part, bool Boxes>
DecodeLaunch<T, Part, Boxes> prepare(const AttentionParams<T>& attention, const AttentionCall& call, int64_t rows,
                                     int64_t more = 0, int most = INT_MAX) {
  using Layout = DecodeLayout<C, D, N, Boxes>;
  constexpr auto* resident = resident_blocks<T, C, D, N, Biased, Part, Boxes>;
  const int32_t device = call.q.get_device_index();
  const int fit = resident(device, false), all = std::min(fit, most), fewer = all < fit ? 0 : resident(device, true);
  if (all == 0) return {};
  const int64_t columns = columns_of<Layout>(attention, rows), longest = call.max_seq_len;
  // Whether blocks with a stage more still make a slot for each sequence. Few sequences are cut into tiles instead.
  const bool deep = kFewSlots * attention.num_seqs > all / columns && attention.num_seqs <= fewer / columns;
  const int blocks = deep ? fewer : all;
  const int64_t window = attention.window > 0 ? std::min(attention.window, longest) + kDecodeQueries : longest;
  const int64_t units = std::min(divide_up(longest, kDecodeKeys), divide_up(window, kDecodeKeys) + 1);
  DecodeLaunch<T, Part, Boxes> made{make_params<Part, Boxes>(attention, units, columns, blocks), columns};
  DecodeParams<T, Part, Boxes>& p = made.params;
  if constexpr (Boxes) {
    if (!make_boxes<C, D>(p.boxes, attention, call.num_blocks)) return {};
  }
  p.batch.most_queries = static_cast<int>(most_decode_queries(call.max_query_len, attention.group()));
  const auto of_block = static_cast<unsigned>(attention.block_size / kDecodeKeys);
  p.blocks = {of_block, static_cast<unsigned>(((int64_t{1} << 32) + of_block - 1) / of_block)};
  p.num_tokens = call.q.size(0);
  p.alibi_slopes = call.alibi_slopes;
  p.deep = deep, p.early = call.frozen;
  p.parts.rows = static_cast<int>(std::min<int64_t>(rows, Layout::kRows));
  const int64_t slots = units > p.batch.whole() && p.batch.num_seqs > 0 ? p.batch.slots * columns : 0;
  const int64_t parts = 2 * slots * p.parts.rows + more, sums = parts * attention.head_dim;
  if (parts > 0) {
    made.parts = torch::stable::new_empty(call.q, {sums + parts}, ScalarType::Float);
    p.parts.sums = data<float>(made.parts);
    p.parts.logs = p.parts.sums + sums;
  }
  if (slots > 0 && Part != DecodePart::kPrefixes) {
    const bool given = call.arrivals && call.arrivals->numel() >= slots + kTileCounters;
    made.arrivals = given ? *call.arrivals : torch::stable::new_zeros(call.q, {slots}, ScalarType::Int);
    p.parts.arrivals = data<unsigned>(made.arrivals);
  }
  return made;
}

template <typename T, typename C, int D, int N, bool Biased, DecodePart Part, bool Boxes>
void run(const DecodeLaunch<T, Part, Boxes>& made, const Tensor& q) {
  const dim3 grid(made.columns, made.params.batch.slots);
  const auto kernel = decode_attention_kernel<T, C, D, N, Biased, Part, Boxes>;
  const size_t shared = DecodeLayout<C, D, N, Boxes>::bytes(made.params.deep);
  launch_dependent(kernel, {grid, dim3(kDecodeThreads), current_stream(q), shared}, made.params);
  check_launch("paged_attention");
}

// Calls body.template operator()<D, N, Biased>() of the kernel for such heads. Every kernel takes long to compile: for linear
// biases, which are rare, and for codes a few do for all shapes, and for both together there is none.
template <typename C, typename Body>
bool by_shape(int64_t head_dim, bool narrow, bool biased, const Body& body) {
  const auto plain = [&]<int D> {
    return narrow ? body.template operator()<D, 1, false>() : body.template operator()<D, 2, false>();
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

// False where the kernel cannot run.
template <typename T, typename C, int D, int N, bool Biased, bool Boxes>
bool attend_all(const AttentionParams<T>& params, const AttentionCall& call) {
  const int64_t rows = most_rows(params, call.max_query_len);
  const auto made = prepare<T, C, D, N, Biased, DecodePart::kAll, Boxes>(params, call, rows);
  if (made.columns > 0) run<T, C, D, N, Biased, DecodePart::kAll>(made, call.q);
  return made.columns > 0;
}

}  // namespace

template <typename T, typename C>
bool decode_attention(const AttentionParams<T>& params, const AttentionCall& call) {
  if (!can_take<T, C>(params)) return false;
  const bool narrow = narrow_decode(call.max_query_len, params.group());
  return by_shape<C>(params.head_dim, narrow, call.alibi_slopes != nullptr, [&]<int D, int N, bool B> {
    if constexpr (kComeInBoxes<C, D> && !B) {
      if (takes_boxes<C, D>(params.head_dim, call.q.get_device_index()) && attend_all<T, C, D, N, B, true>(params, call)) {
        return true;
      }
    }
    return attend_all<T, C, D, N, B, false>(params, call);
  });
}

// How many blocks each of the two launches may run at a time.
struct BlocksOfBoth {
  int prefixes, rest;
};

// Divides the `all` blocks that the device runs at a time. If the launch of the rest can give one or two whole sequences to
// each of its blocks with one block a multiprocessor left out, prefixes get that block and both launches run from the start.
// A ninth of the rest's blocks may be idle then; with more idle, sequences would be cut, which takes longer. Otherwise
// prefixes leave one block a multiprocessor free, where the rest starts; it gets all blocks when prefixes have ended.
// Before Hopper the rest starts when prefixes have ended, so both get all.
inline BlocksOfBoth blocks_of_both(int all, int32_t device, int64_t num_seqs, int64_t columns) {
  const int each = device_attribute(cudaDevAttrMultiProcessorCount, device);
  if (compute_major(device) < 9 || all <= each) return {all, all};
  const int64_t slots = (all - each) / columns, places = slots > 0 ? divide_up(num_seqs, slots) * slots : 0;
  const bool beside = 0 < places && places <= 2 * slots && 8 * places <= 9 * num_seqs;
  return beside ? BlocksOfBoth{each, all - each} : BlocksOfBoth{all - each, all};
}

// Prefixes have many rows, what follows them few.
template <typename T, typename C, int D, bool Boxes>
bool decode_after_prefixes(const AttentionParams<T>& params, const AttentionCall& call) {
  AttentionParams<T> of_prefixes = params;
  of_prefixes.sinks = nullptr;  // they count once
  const int64_t sharers = kMostSharers * params.group(), seqs = params.num_seqs;
  const int64_t rows = most_rows(params, call.max_query_len);
  const int32_t device = call.q.get_device_index();
  const int all = resident_blocks<T, C, D, 1, false, DecodePart::kRest, Boxes>(device);
  const BlocksOfBoth most = blocks_of_both(all, device, seqs, columns_of<DecodeLayout<C, D, 1, Boxes>>(params, rows));
  auto rest = prepare<T, C, D, 1, false, DecodePart::kRest, Boxes>(params, call, rows, 0, most.rest);
  // Deep blocks of the rest fit beside those of prefixes only if the cache has codes, so no block is left free for them.
  const int of_device = rest.params.deep ? all : most.prefixes;
  auto first = prepare<T, C, D, 2, false, DecodePart::kPrefixes, Boxes>(of_prefixes, call, sharers, seqs * params.num_heads,
                                                                        of_device);
  if (first.columns == 0 || rest.columns == 0) return false;
  const int64_t stride = call.prefixes->stride(0), parts = first.parts.numel() / (params.head_dim + 1);
  const int32_t* members = data<int32_t>(*call.prefixes);
  Tensor places = torch::stable::new_empty(*call.prefixes, {first.columns / params.num_kv_heads, seqs, 3});
  first.params.batch.prefixes = rest.params.batch.prefixes = {members, members + stride, members + 2 * stride};
  first.params.prefixes = rest.params.prefixes = {
      first.params.parts, static_cast<int>(first.columns), parts - seqs * params.num_heads,
      static_cast<PrefixSums::Place*>(places.data_ptr())};
  run<T, C, D, 2, false, DecodePart::kPrefixes>(first, call.q);
  run<T, C, D, 1, false, DecodePart::kRest>(rest, call.q);
  return true;
}

template <typename T, typename C>
bool decode_with_prefixes(const AttentionParams<T>& params, const AttentionCall& call) {
  if (!call.prefixes || call.alibi_slopes || params.window > 0 || params.num_seqs == 0 || !can_take<T, C>(params)) return false;
  const auto attend = [&]<int D> {
    if constexpr (kComeInBoxes<C, D>) {
      if (takes_boxes<C, D>(params.head_dim, call.q.get_device_index()) && decode_after_prefixes<T, C, D, true>(params, call)) {
        return true;
      }
    }
    return decode_after_prefixes<T, C, D, false>(params, call);
  };
  if constexpr (std::is_same_v<C, T>) {
    if (params.head_dim <= 64) return attend.template operator()<64>();
  }
  return params.head_dim <= 128 && attend.template operator()<128>();
}

template <typename T, typename C>
bool has_decode_attention(int64_t head_dim, int64_t group, int64_t block_size, bool biased, int device) {
  if (head_dim % kCacheVector<C> != 0 || block_size % 16 != 0) return false;
  return by_shape<C>(head_dim, narrow_decode(1, group), biased, [&]<int D, int N, bool B> {
    return resident_blocks<T, C, D, N, B, DecodePart::kAll, false>(device) > 0;
  });
}

}  // namespace raylm::cuda
