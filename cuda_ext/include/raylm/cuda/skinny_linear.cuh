// y = x W^T (+ bias), or its gated activation, for a few rows of x: bound by the reading of W [n, k], which happens once.
//
// A team of warps takes tiles of 8 * Tiles rows of W in turn. Its warps split k, in blocks of 256 dealt out in turn,
// and each warp keeps its own ring of bulk copies of W in flight, across the end of a tile into the next one: no warp
// waits for another one's weights. x lies in shared memory for the whole life of a block, which is one team or
// several. All blocks are resident at once and share out the tiles (persistent blocks, as in stream-K,
// arXiv:2301.03598).
//
// mma.sync m16n8k16 does the arithmetic, with rows of x, padded to 8 or to a multiple of 16, as its A operand and 8
// rows of W as its B operand. The sum over k may run in any order, so long as both operands agree: each lane reads 16
// bytes of a row and feeds them to two instructions. The warps' sums of a tile meet in shared memory, where one warp
// adds them in the order of the warps while the others are at the next tile. All these orders depend on k only, so a
// row's result depends neither on the rows beside it nor on timing. What is made of the sums is said by `Results`.
//
// Numbers may be of 8 bits, with a scale for each row of x and of W. The chip's own product of these takes them apart into
// halves each time, x too; so x lies in shared memory as halves, which hold all its codes exactly, and a lane's 16 bytes of
// W become halves for four instructions.
#pragma once

#include "raylm/cuda/gated.cuh"
#include "raylm/cuda/ptx/barrier.cuh"
#include "raylm/cuda/ptx/copy.cuh"
#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/ptx/matrix.cuh"
#include "raylm/cuda/tile/numbers.cuh"

namespace raylm::cuda {

template <typename N>
struct SkinnyArgs {
  const typename N::Stored* x;
  const typename N::Stored* weight;
  const typename N::Result* bias;  // or null
  typename N::Result* out;
  const float *x_scales, *scales;  // of rows of x and of W, where numbers have them
  int64_t x_stride;
  int64_t weight_stride;
  int rows;
  int n;
  int k;
  int tiles;
  int split;   // warps of a team
  bool early;  // W is read while the kernel ahead may still run; x never is
};

constexpr int kSkinnySlots = 2;  // tiles of a team whose sums may wait to be added
constexpr int kSkinnyBytes = 512;  // of a row of W: what a warp takes at a time

// Numbers of k: 16 bytes for each of the 4 lanes of a row, and what a warp takes at a time.
template <typename N>
inline constexpr int kSkinnyStep = 64 / sizeof(typename N::Stored);
template <typename N>
inline constexpr int kSkinnyBlock = kSkinnyBytes / sizeof(typename N::Stored);

// Two rows that a quarter of a warp reads at once share no bank: a lane reads 16 bytes beside its neighbour's, or, of
// halves that were 8-bit numbers, every other 16.
constexpr int kSkinnyPitch = kSkinnyBytes + 64;
__host__ __device__ constexpr int skinny_x_pitch(bool scaled, int k) {
  return (k * 2 + 127) / 128 * 128 + (scaled ? 16 : 64);
}

// y = x W^T. Of a tile of `width` rows of W, `weight_row` is its row number i, and sum(i) the product with it.
struct SkinnyPlain {
  static __host__ __device__ constexpr int outputs(int width) { return width; }
  static __device__ int weight_row(int, int tile, int width, int i) { return tile * width + i; }

  template <typename T, typename Sum>
  static __device__ T result(const Sum& sum, int i, int) {
    return from_float<T>(sum(i));
  }
};

// act(gate) * up, where the first half of W's rows is gate's: a tile has as many of each. Both are rounded first, as the
// product alone would be.
template <typename Act>
struct SkinnyGated {
  static __host__ __device__ constexpr int outputs(int width) { return width / 2; }
  static __device__ int weight_row(int n, int tile, int width, int i) {
    const int half = width / 2, row = min(tile * half + i % half, n / 2 - 1);
    return i < half ? row : n / 2 + row;
  }

  template <typename T, typename Sum>
  static __device__ T result(const Sum& sum, int i, int width) {
    const T gate = from_float<T>(sum(i)), up = from_float<T>(sum(i + width / 2));
    return from_float<T>(Act{}(to_float(gate)) * to_float(up));
  }
};

struct SkinnyTeam {
  int index, warp, lane;  // of this thread: its team in the block, its warp in the team, its lane
  int first_tile, tile_step;

  __device__ explicit SkinnyTeam(int split) {
    const int warp_of_block = threadIdx.x / kWarp, teams = blockDim.x / kWarp / split;
    index = warp_of_block / split, warp = warp_of_block % split, lane = threadIdx.x % kWarp;
    first_tile = blockIdx.x * teams + index, tile_step = gridDim.x * teams;
  }
};

// A warp's ring of copies of W: stage after stage in the order in which it uses them.
template <typename N, typename Results, int Tiles, int Stages>
class SkinnyRing {
 public:
  static constexpr int kStageBytes = 8 * Tiles * kSkinnyPitch;
  static constexpr int kBlock = kSkinnyBlock<N>;

  __device__ SkinnyRing(const SkinnyArgs<N>& args, const SkinnyTeam& team, char* stages, uint32_t full)
      : args_(args), team_(team), stages_(stages), full_(full), tile_(team.first_tile), k_(team.warp * kBlock),
        policy_(evict_first_policy()) {
    for (int i = 0; i < Stages; ++i) load();
  }

  // The stage whose weights are next, once they have arrived.
  __device__ const char* wait() const {
    barrier_wait(full_ + 8 * read_, phase_);
    return stages_ + read_ * kStageBytes;
  }

  // The stage has been read by all lanes: its place is for the next copy.
  __device__ void release() {
    __syncwarp();
    if (++read_ == Stages) read_ = 0, phase_ ^= 1;
    load();
  }

 private:
  __device__ void load() {
    if (k_ >= args_.k || tile_ >= args_.tiles) return;
    const int lane = threadIdx.x % kWarp;
    const int bytes = min(kBlock, args_.k - k_) * static_cast<int>(sizeof(typename N::Stored));
    const uint32_t barrier = full_ + 8 * write_;
    if (lane == 0) barrier_arrive_expecting(barrier, bytes * 8 * Tiles);
    __syncwarp();
    if (lane < 8 * Tiles) {
      const int64_t row = min(Results::weight_row(args_.n, tile_, 8 * Tiles, lane), args_.n - 1);
      const uint32_t to = shared_address(stages_) + write_ * kStageBytes + lane * kSkinnyPitch;
      bulk_copy_once(to, args_.weight + row * args_.weight_stride + k_, bytes, barrier, policy_);
    }
    if (++write_ == Stages) write_ = 0;
    k_ += args_.split * kBlock;
    if (k_ < args_.k) return;
    k_ = team_.warp * kBlock;
    tile_ += team_.tile_step;
  }

  const SkinnyArgs<N>& args_;
  const SkinnyTeam& team_;
  char* const stages_;
  const uint32_t full_;
  int tile_, k_;  // of the next copy
  int read_ = 0, write_ = 0;
  int phase_ = 0;
  const uint64_t policy_;
};

// One warp's sums of a tile: Groups groups of 8 rows of x (1, 2 or 4) by Tiles groups of 8 rows of W.
template <typename N, int Groups, int Tiles>
class SkinnySums {
 public:
  static constexpr int kBlocks16 = (Groups + 1) / 2;

  __device__ void clear() {
#pragma unroll
    for (auto& block : sums_) {
#pragma unroll
      for (auto& tile : block) {
#pragma unroll
        for (int i = 0; i < 8; ++i) tile[i / 4][i % 4] = 0.0f;
      }
    }
  }

  // Adds a block of k; x and w are this lane's first bytes of it. Beyond `left` elements, both count as 0.
  template <bool Whole>
  __device__ void add(const char* x, const int (&x_rows)[Groups], const char* w, int left) {
    constexpr int kStep = kSkinnyStep<N>, kOfLane = kStep / 4;
#pragma unroll
    for (int j = 0; j < kSkinnyBlock<N> / kStep; ++j) {
      if (!Whole && j * kStep >= left) break;
      const bool valid = Whole || j * kStep + static_cast<int>(threadIdx.x) % 4 * kOfLane < left;
      uint4 a[2 * kBlocks16][kReads] = {};
#pragma unroll
      for (int g = 0; g < Groups; ++g) {
#pragma unroll
        for (int i = 0; i < kReads; ++i) a[g][i] = read(x + x_rows[g] + j * kStep * 2 + i * 16, valid);
      }
#pragma unroll
      for (int t = 0; t < Tiles; ++t) {
        const uint4 b = read(w + 8 * t * kSkinnyPitch + j * 64, valid);
#pragma unroll
        for (int m = 0; m < kBlocks16; ++m) add(sums_[m][t], a[2 * m], a[2 * m + 1], b);
      }
    }
  }

  // As [row of x][row of W], 8 * Tiles wide.
  __device__ void store(float* to) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int m = 0; m < kBlocks16; ++m) {
#pragma unroll
      for (int t = 0; t < Tiles; ++t) {
        const auto& s = sums_[m][t];
        float* cell = to + (16 * m + lane / 4) * (8 * Tiles) + 8 * t + lane % 4 * 2;
        *reinterpret_cast<float2*>(cell) = make_float2(s[0][0] + s[1][0], s[0][1] + s[1][1]);
        if constexpr (Groups > 1) {
          *reinterpret_cast<float2*>(cell + 64 * Tiles) = make_float2(s[0][2] + s[1][2], s[0][3] + s[1][3]);
        }
      }
    }
  }

 private:
  static constexpr int kReads = N::kScaled ? 2 : 1;  // of x, for one of W

  // What a lane has of x's rows lane / 4 and lane / 4 + 8 times what it has of W.
  __device__ static void add(float (&sums)[2][4], const uint4 (&low)[kReads], const uint4 (&high)[kReads], uint4 b) {
    if constexpr (N::kScaled) {
      add(sums, low[0], high[0], make_uint4(halves_of<0>(b.x), halves_of<1>(b.x), halves_of<0>(b.y), halves_of<1>(b.y)));
      add(sums, low[1], high[1], make_uint4(halves_of<0>(b.z), halves_of<1>(b.z), halves_of<0>(b.w), halves_of<1>(b.w)));
    } else {
      add(sums, low[0], high[0], b);
    }
  }

  __device__ static void add(float (&sums)[2][4], uint4 low, uint4 high, uint4 b) {
    using T = std::conditional_t<N::kScaled, __half, typename N::Stored>;
    multiply_add<T>(sums[0], {low.x, high.x, low.y, high.y}, b.x, b.y);
    multiply_add<T>(sums[1], {low.z, high.z, low.w, high.w}, b.z, b.w);
  }

  __device__ static uint4 read(const char* from, bool valid) {
    return valid ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  }

  float sums_[kBlocks16][Tiles][2][4];  // the even and the odd instructions': two chains run side by side
};

// Where the sums of a team's warps meet: `kSkinnySlots` tiles, each filled by all warps and emptied by one of them.
template <typename N, typename Results, int Groups, int Tiles>
class SkinnyMeeting {
 public:
  using T = typename N::Result;
  static constexpr int kWidth = 8 * Tiles;
  static constexpr int kSums = Groups * 8 * kWidth;  // floats

  static __host__ __device__ constexpr int bytes(int split) { return kSkinnySlots * split * kSums * 4; }

  __device__ SkinnyMeeting(const SkinnyArgs<N>& args, const SkinnyTeam& team, float* parts, uint32_t barriers)
      : args_(args), team_(team), parts_(parts), filled_(barriers), emptied_(barriers + 8 * kSkinnySlots) {}

  static __device__ void init(uint32_t barriers, int split) {
    for (int i = 0; i < kSkinnySlots; ++i) {
      barrier_init(barriers + 8 * i, split * kWarpArrivals);
      barrier_init(barriers + 8 * (kSkinnySlots + i), kWarpArrivals);
    }
  }

  // Brings this warp's sums of its next tile; one warp then writes the tile before, which the others have left by now.
  __device__ void bring(const SkinnySums<N, Groups, Tiles>& sums) {
    const int slot = count_ % kSkinnySlots, use = count_ / kSkinnySlots;
    barrier_wait(emptied_ + 8 * slot, (use & 1) ^ 1);
    sums.store(parts_ + (slot * args_.split + team_.warp) * kSums);
    barrier_arrive_warp(filled_ + 8 * slot);
    if (count_ > 0 && (count_ - 1) % args_.split == team_.warp) {
      write(count_ - 1, team_.lane, kWarp);
      barrier_arrive_warp(emptied_ + 8 * ((count_ - 1) % kSkinnySlots));
    }
    ++count_;
  }

  // The whole team writes its last tile.
  __device__ void finish() {
    if (count_ > 0) write(count_ - 1, team_.warp * kWarp + team_.lane, args_.split * kWarp);
  }

 private:
  // Adds the warps' sums of the team's tile number `count`, in their order, and writes what they make.
  __device__ void write(int count, int thread, int threads) const {
    const int slot = count % kSkinnySlots, tile = team_.first_tile + count * team_.tile_step;
    barrier_wait(filled_ + 8 * slot, count / kSkinnySlots & 1);
    const float* parts = parts_ + slot * args_.split * kSums;
    constexpr int kOutputs = Results::outputs(kWidth);
    const int outputs = Results::outputs(args_.n);
    for (int i = thread; i < args_.rows * kOutputs; i += threads) {
      const int row = i / kOutputs, column = tile * kOutputs + i % kOutputs;
      if (column >= outputs) continue;
      const auto sum = [&](int of) {
        const float* part = parts + row * kWidth + of;
        float sum = part[0];
        for (int w = 1; w < args_.split; ++w) sum += part[w * kSums];
        const int weight_row = Results::weight_row(args_.n, tile, kWidth, of);
        if constexpr (N::kScaled) sum *= args_.x_scales[row] * args_.scales[weight_row];
        return args_.bias ? sum + to_float(args_.bias[weight_row]) : sum;
      };
      args_.out[static_cast<int64_t>(row) * outputs + column] = Results::template result<T>(sum, i % kOutputs, kWidth);
    }
  }

  const SkinnyArgs<N>& args_;
  const SkinnyTeam& team_;
  float* const parts_;
  const uint32_t filled_, emptied_;
  int count_ = 0;
};

// x goes to shared memory by bulk copies, one a row.
template <typename N>
__device__ void skinny_copy_x(const SkinnyArgs<N>& args, char* to, uint32_t barrier) {
  if (threadIdx.x == 0) barrier_arrive_expecting(barrier, args.rows * args.k * 2);
  __syncwarp();
  for (int row = threadIdx.x; row < args.rows; row += kWarp) {
    const uint32_t at = shared_address(to) + row * skinny_x_pitch(false, args.k);
    bulk_copy(at, args.x + row * args.x_stride, args.k * 2, barrier);
  }
}

// x's 8-bit numbers go to shared memory as halves, by all threads of the block.
template <typename N>
__device__ void skinny_widen_x(const SkinnyArgs<N>& args, char* to) {
  const int each = args.k / 16;
  for (int i = threadIdx.x; i < args.rows * each; i += blockDim.x) {
    const int row = i / each, at = i % each * 16;
    const uint4 c = *reinterpret_cast<const uint4*>(args.x + row * args.x_stride + at);
    uint4* const place = reinterpret_cast<uint4*>(to + row * skinny_x_pitch(true, args.k) + at * 2);
    place[0] = make_uint4(halves_of<0>(c.x), halves_of<1>(c.x), halves_of<0>(c.y), halves_of<1>(c.y));
    place[1] = make_uint4(halves_of<0>(c.z), halves_of<1>(c.z), halves_of<0>(c.w), halves_of<1>(c.w));
  }
}

__host__ __device__ constexpr int skinny_ring_bytes(int tiles, int stages) { return stages * 8 * tiles * kSkinnyPitch; }

// Shared memory of a block: the warps' rings, the teams' meetings, x.
constexpr int skinny_shared_bytes(bool scaled, int groups, int tiles, int stages, int warps, int rows, int k) {
  const int meetings = kSkinnySlots * warps * groups * 8 * 8 * tiles * 4;
  return warps * skinny_ring_bytes(tiles, stages) + meetings + rows * skinny_x_pitch(scaled, k);
}

template <typename N, typename Results, int Groups, int Tiles, int Stages, int MaxWarps>
__global__ void __launch_bounds__(MaxWarps* kWarp) skinny_linear_kernel(const __grid_constant__ SkinnyArgs<N> args) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using Meeting = SkinnyMeeting<N, Results, Groups, Tiles>;
  constexpr int kRing = skinny_ring_bytes(Tiles, Stages);
  extern __shared__ char shared[] __attribute__((aligned(128)));
  __shared__ uint64_t ring_barriers[MaxWarps * Stages], meeting_barriers[MaxWarps * 2 * kSkinnySlots], x_barrier;
  start_dependents();
  const SkinnyTeam team(args.split);
  const int warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp;
  const uint32_t full = shared_address(ring_barriers + warp * Stages), x_full = shared_address(&x_barrier);
  const uint32_t meet = shared_address(meeting_barriers + team.index * 2 * kSkinnySlots);
  if (team.lane == 0) {
    for (int i = 0; i < Stages; ++i) barrier_init(full + 8 * i, 1);
    if (team.warp == 0) Meeting::init(meet, args.split);
    if (warp == 0) barrier_init(x_full, 1);
    barrier_init_done();
  }
  __syncwarp();
  if (!args.early) wait_for_dependencies();
  SkinnyRing<N, Results, Tiles, Stages> ring(args, team, shared + warp * kRing, full);
  if (args.early) wait_for_dependencies();
  char* const meetings = shared + warps * kRing;
  char* const x = meetings + Meeting::bytes(warps);
  Meeting meeting(args, team, reinterpret_cast<float*>(meetings + team.index * Meeting::bytes(args.split)), meet);
  if constexpr (N::kScaled) {
    skinny_widen_x(args, x);
  } else if (warp == 0) {
    skinny_copy_x(args, x, x_full);
  }
  __syncthreads();

  int x_rows[Groups];
#pragma unroll
  for (int g = 0; g < Groups; ++g) x_rows[g] = min(8 * g + team.lane / 4, args.rows - 1) * skinny_x_pitch(N::kScaled, args.k);
  const char* const x_lane = x + team.lane % 4 * (N::kScaled ? 32 : 16);
  const int w_lane = team.lane / 4 * kSkinnyPitch + team.lane % 4 * 16;
  if constexpr (!N::kScaled) barrier_wait(x_full, 0);
  SkinnySums<N, Groups, Tiles> sums;
  constexpr int kBlock = kSkinnyBlock<N>;
  for (int tile = team.first_tile; tile < args.tiles; tile += team.tile_step) {
    sums.clear();
    for (int k = team.warp * kBlock; k < args.k; k += args.split * kBlock) {
      const char* w = ring.wait() + w_lane;
      if (k + kBlock <= args.k) {
        sums.template add<true>(x_lane + k * 2, x_rows, w, 0);
      } else {
        sums.template add<false>(x_lane + k * 2, x_rows, w, args.k - k);
      }
      ring.release();
    }
    meeting.bring(sums);
  }
  meeting.finish();
#endif
}

}  // namespace raylm::cuda
