// The warps of few_layers.cuh that fetch, so that the others only compute.
#pragma once

#include "raylm/cuda/few_reader.cuh"
#include "raylm/cuda/ptx/copy.cuh"

namespace raylm::cuda {

// A warp that fills the rings of some others, so that these only compute. Each of its first lanes keeps what is next
// for one of them.
template <typename N, typename E, int D>
class FewFetcher {
 public:
  using T = typename N::Result;
  using Stage = FewStage<N, E, D>;
  static constexpr bool kMixture = kHasExperts<E>;
  static constexpr int kRings = kFewWarps / kFewFetchers;

  __device__ FewFetcher(const FewLayersArgs<T>& args, const FewColumn& column, FewRings& rings, FewRouted& routed,
                        char* memory)
      : args_(args), column_(column), rings_(rings), routed_(routed), memory_(shared_address(memory)),
        lane_(threadIdx.x % kWarp),
        first_((threadIdx.x / kWarp - kFewWarps) * kRings), warp_(first_ + min(lane_, kRings - 1)), ring_{args.stages},
        policy_(evict_first_policy()) {}

  __device__ void init_barriers() const {
    for (int i = lane_; i < kRings * args_.stages; i += kWarp) {
      const int warp = first_ + i / args_.stages, stage = i % args_.stages;
      barrier_init(barrier(rings_.full, warp, stage), Stage::kBulk ? 1 : kWarp);
      barrier_init(barrier(rings_.empty, warp, stage), kWarpArrivals);
    }
    if (kMixture && first_ == 0 && lane_ == 0) barrier_init(shared_address(&routed_.known), kWarpArrivals);
    barrier_init_done();
  }

  __device__ void run() {
    if (lane_ < kRings) {
      for (int phase = 0; phase < kFewPhases; ++phase) {
        for_product<N, E>(phase, [&](auto w) { rings_.shares[warp_][phase] = share_of<decltype(w)>(phase); });
      }
      const int first = column_.begin + warp_;
      first_block_ = block_of(first);
      units_ = first < column_.end ? 2 * ((column_.end - first - 1) / kFewWarps + 1) : 0;
      skip();
    }
    // Each ring is filled by itself. A warp with fewer copies in a phase is further on here, and frees a stage only
    // once the slower warps have done their part: waiting for one ring could last forever.
#pragma unroll 1
    while (__any_sync(kAllLanes, left_ > 0)) {
      bool fills = left_ > 0 && barrier_passed(barrier(rings_.empty, warp_, ring_.stage), ring_.parity ^ 1);
      if constexpr (kMixture) {
        if (fills && of_experts()) {
          fills = barrier_passed(shared_address(&routed_.known), layer_ & 1);
          if (fills) from_ = source();
        }
      }
      fill(fills);
      if (fills) for_product<N, E>(phase_, [&](auto w) { advance<decltype(w)>(); });
    }
  }

 private:
  __device__ bool of_experts() const { return kMixture && (phase_ == kFewGateUp || phase_ == kFewDown); }

  // Where the next copy of experts' weights begins. Which expert's they are follows from the tile for gate and up, and
  // from the columns for down.
  __device__ const char* source() const {
    const FewMixture& mixture = args_.mixture;
    const bool down = phase_ == kFewDown;
    const FewStack& stack = down ? mixture.down : mixture.gate_up;
    const int number = down ? __umulhi(k_, mixture.of_size) : __umulhi(tile_, mixture.of_tiles);
    const int tile = down ? tile_ : tile_ - number * mixture.tiles, k = down ? k_ - number * mixture.size : k_;
    return args_.layers[layer_].weights[phase_] + routed_.chosen[number] * stack.expert + tile * stack.tile +
           bytes_of<E>(k);
  }

  // Fills the next stage of the lane's ring, where it may be filled.
  __device__ void fill(bool mine) const {
    __syncwarp();  // lanes that copy for another one come behind what that one saw at its barrier
    const bool of_weights = phase_ != kFewAttention, in_patches = of_weights && are_patches();
    if constexpr (Stage::kBulk) {
      if (mine && in_patches) load_patches();
    }
    if constexpr (kMixture || !kInPatches<N>) {
      for_lanes(mine && of_weights && !in_patches, [&](int lane) { load_weights(lane); });
    }
    for_lanes(mine && !of_weights, [&](int lane) { load_keys(lane); });
  }

  __device__ bool are_patches() const {
    if constexpr (!kMixture) return kInPatches<N>;
    bool found = false;
    for_product<N, E>(phase_, [&](auto w) { found = kInPatches<decltype(w)>; });
    return found;
  }

  template <typename Load>
  __device__ static void for_lanes(bool mine, const Load& load) {
#pragma unroll 1
    for (unsigned lanes = __ballot_sync(kAllLanes, mine); lanes; lanes &= lanes - 1) load(__ffs(lanes) - 1);
  }

  template <typename X>
  __device__ static X from_lane(X x, int lane) { return __shfl_sync(kAllLanes, x, lane); }

  __device__ static uint32_t barrier(const uint64_t (&barriers)[kFewWarps][kFewMostStages], int warp, int stage) {
    return shared_address(&barriers[warp][stage]);
  }
  __device__ uint32_t place(int warp, int stage) const {
    return memory_ + (warp * args_.stages + stage) * Stage::kBytes;
  }

  __device__ void load_weights(int lane) const {
    if constexpr (N::kScaled) {
      if (!kMixture || from_lane(phase_, lane) != kFewRouter) return load_rows<true>(lane);
    }
    if constexpr (kMixture || !N::kScaled) load_rows<false>(lane);
  }

  // What lies beyond the weight's columns becomes zeros.
  template <bool Codes>
  __device__ void load_rows(int lane) const {
    constexpr int kOfRow = Codes ? kFewCodeColumns / 16 : kWarp, kAtOnce = kWarp / kOfRow;  // lanes of a row, rows
    constexpr int kPitch = Codes ? kFewCodeColumns : kSkinnyPitch;
    const int stage = from_lane(ring_.stage, lane), number = lane_ % kOfRow, down = lane_ / kOfRow;
    const int row = from_lane(row_bytes(), lane), left = from_lane((columns_ - k_) * item(), lane);
    const int64_t half = from_lane(half_, lane);
    const char* from = reinterpret_cast<const char*>(from_lane(reinterpret_cast<int64_t>(from_), lane));
    from += down * row + number * 16;
    const uint32_t to = place(first_ + lane, stage) + (Codes ? Stage::code_place(down, number) : number * 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      copy_async_once(to + i * kAtOnce * kPitch, (i < 4 ? from : from + half) + i % 4 * kAtOnce * row,
                      number * 16 < left, policy_);
    }
    arrive(barrier(rings_.full, first_ + lane, stage));
  }

  // Bytes of a number, and of a row of W where the lane's next copy begins.
  __device__ int item() const {
    if constexpr (!kMixture) return sizeof(typename N::Stored);
    int found = 1;
    for_product<N, E>(phase_, [&](auto w) { found = sizeof(typename decltype(w)::Stored); });
    return found;
  }
  __device__ int row_bytes() const {
    return (kMixture && phase_ == kFewDown ? args_.mixture.size : columns_) * item();
  }

  // Counts all lanes' copies so far. Where other copies are counted in bytes, one arrival is counted, behind those that
  // all lanes have added.
  __device__ void arrive(uint32_t full) const {
    copies_arrive<!Stage::kBulk>(full);
    if constexpr (Stage::kBulk) {
      __syncwarp();
      if (lane_ == 0) barrier_arrive(full);
    }
  }

  // Patches beside each other, of a gated product gate's and then up's, for the lane's warp.
  __device__ void load_patches() const {
    const uint32_t full = barrier(rings_.full, warp_, ring_.stage);
    int bytes = 0;
    for_product<N, E>(phase_, [&](auto w) {
      using W = decltype(w);
      bytes = bytes_of<W>(min(few_block<W>(), (columns_ - k_ + kPatchColumns - 1) / kPatchColumns * kPatchColumns));
    });
    barrier_arrive_expecting(full, bytes);
    bulk_copy_once(place(warp_, ring_.stage), from_ + (up_ ? half_ : 0), bytes, full, policy_);
  }

  // Keys up to the token's own one, which is not in the cache yet; zeros from there on.
  __device__ void load_keys(int lane) const {
    constexpr int kChunks = D / 8, kAtOnce = kWarp / kChunks;
    const int stage = from_lane(ring_.stage, lane);
    const int unit = from_lane(unit_, lane), block = from_lane(block_, lane), layer = from_lane(layer_, lane);
    const bool values = from_lane(left_, lane) % 2 == 1;
    const FewStrides& strides = values ? args_.step.v_strides : args_.step.k_strides;
    const T* from = values ? args_.layers[layer].v_cache : args_.layers[layer].k_cache;
    const int chunk = lane_ % kChunks, keys = column_.length - 1 - unit * kFewKeys;
    int key = lane_ / kChunks;
    const int slot = (unit * kFewKeys & ((1 << args_.step.block_log2) - 1)) + key;
    from += block * strides.block + slot * strides.slot + column_.kv_head * strides.head + chunk * 8;
    uint32_t to = place(first_ + lane, stage) + key * Stage::kKeyPitch + chunk * 16;
#pragma unroll
    for (int i = 0; i < kFewKeys / kAtOnce; ++i) {
      copy_async(to, from, key < keys);
      key += kAtOnce, to += kAtOnce * Stage::kKeyPitch, from += kAtOnce * strides.slot;
    }
    arrive(barrier(rings_.full, first_ + lane, stage));
  }

  // To what the lane's warp needs next. W: what the phase's weights hold.
  template <typename W>
  __device__ void advance() {
    ring_.advance();
    if (phase_ == kFewAttention) {
      if (left_ % 2 == 1) unit_ += kFewWarps, block_ = block_of(unit_);  // values follow their keys
    } else {
      up_ = kInPatches<W> && phase_ == kFewGateUp && !up_;
      if (!up_) k_ += step_, from_ += bytes_of<W>(step_);
      if (k_ >= columns_) k_ = first_column_, from_ += next_tile_, tile_ += tile_step_;
    }
    if (--left_ == 0) skip();
  }

  // To the next phase in which the warp has something to copy.
  __device__ void skip() {
#pragma unroll 1
    do {
      if ((phase_ = next_phase<E>(phase_)) == kFewPhases) phase_ = 0, ++layer_;
      if (layer_ == args_.num_layers) return;
      enter();
    } while (left_ == 0);
  }

  __device__ void enter() {
    if (phase_ == kFewAttention) {
      unit_ = column_.begin + warp_, block_ = first_block_, left_ = units_;
      return;
    }
    const FewShare& share = rings_.shares[warp_][phase_];
    from_ = args_.layers[layer_].weights[phase_] + share.first;
    half_ = share.half, next_tile_ = share.next_tile;
    columns_ = share.k, k_ = first_column_ = share.first_column, step_ = share.step, left_ = share.copies;
    if constexpr (kMixture) {
      if (!of_experts()) return;
      const FewTeam team(E{}, columns_, warp_);
      tile_ = team.first_tile, tile_step_ = team.tile_step;
    }
  }

  __device__ int block_of(int unit) const {
    if (unit >= column_.end) return 0;
    const int at = unit * kFewKeys >> args_.step.block_log2;
    return args_.step.block_table[column_.row * args_.step.block_table_stride + at];
  }

  // Of columns of a row, or of a row of patches.
  template <typename W>
  __device__ static int bytes_of(int columns) {
    if constexpr (kInPatches<W>) return columns / kPatchColumns * W::kPatchBytes;
    return columns * sizeof(typename W::Stored);
  }

  // Of experts, `first` and `next_tile` are not used.
  template <typename W>
  __device__ FewShare share_of(int phase) const {
    constexpr int kBlock = few_block<W>();
    constexpr bool kPatches = kInPatches<W>;
    const FewProduct& product = args_.products[phase];
    const FewTeam team(W{}, product.k, warp_, reversed_in<E>(phase));
    const bool gated = phase == kFewGateUp, experts = kMixture && phase > kFewRouter;
    FewShare out{};
    out.k = product.k, out.first_column = team.warp * kBlock, out.step = team.split * kBlock;
    if (out.first_column >= product.k || team.first_tile >= product.tiles) return out;
    const int each = (product.k - out.first_column - 1) / out.step + 1;
    const int tiles = (product.tiles - team.first_tile - 1) / team.tile_step + 1;
    out.copies = each * tiles * (kPatches && gated ? 2 : 1);
    const int across = experts && !gated ? args_.mixture.size : product.k;
    const int64_t row = bytes_of<W>(kPatches ? (across + kPatchColumns - 1) / kPatchColumns * kPatchColumns : across);
    constexpr int kHalf = W::kScaled ? kFewCodeRows / 2 : 4;  // rows of half a tile
    const int64_t tile = kPatches ? row : (gated ? 1 : 2) * kHalf * row;
    const int gates = experts ? args_.mixture.size : product.n / 2;
    out.half = gated ? gates / (kPatches ? kPatchRows : 1) * row : kHalf * row;
    out.first = static_cast<int>(team.first_tile * tile) + bytes_of<W>(out.first_column);
    out.next_tile = static_cast<int>(team.tile_step * tile) - each * bytes_of<W>(out.step);
    return out;
  }

  const FewLayersArgs<T>& args_;
  const FewColumn& column_;
  FewRings& rings_;
  FewRouted& routed_;
  const uint32_t memory_;
  const int lane_, first_, warp_;  // of the warps that it fetches for: the first one, and the lane's
  SizedRing ring_;
  int layer_ = 0, phase_ = -1, left_ = 0;  // copies of the phase
  const char* from_ = nullptr;  // the next copy's first row
  int64_t half_ = 0, next_tile_ = 0;
  int columns_ = 0, first_column_ = 0, step_ = 0, k_ = 0;
  int tile_ = 0, tile_step_ = 0;  // of experts
  int units_ = 0, unit_ = 0, block_ = 0, first_block_ = 0;
  bool up_ = false;
  const uint64_t policy_;
};

}  // namespace raylm::cuda
