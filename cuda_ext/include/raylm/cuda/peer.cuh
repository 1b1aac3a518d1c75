// Memory of one rank that all ranks of one host read and write, and how their blocks meet there.
//
// Each rank has a window: counters and flags, then two slots for data. In call n block b of each rank stages data in slots
// n % 2, meets block b of every peer, and then reads what the peers staged: either each stages in its own window and reads
// the peers' (all_reduce.cuh), or it stages in the peers' windows, each in a place of its own there, and reads its own
// (peer_norm.cuh, all_gather.cuh). (peer_split_norm.cuh and few_ranks.cuh use windows of their own otherwise, and say how.)
//
// Why a staged value is the one that a peer reads: all threads of a block stage, bar.sync orders that before the
// release at system scope by which one thread raises the peer's flag; the peer's thread sees the flag by an acquire at
// system scope, and its own bar.sync orders that before its block's reads. Causality passes along this chain, from
// every stager to every reader. Only blocks of the same index may rely on each other's data, whatever the parts are
// into which a call divides it.
//
// Why two slots are enough with one meeting a call: slots n % 2 are written again in call n + 2, by any rank, which begins
// there when its call n + 1 has ended (one stream, or streams ordered by events; early launched blocks wait for the
// kernels before them). In call n + 1 it met every peer, and a peer raises a flag of call n + 1 only after its own kernel
// of call n has ended, with all its reads. So nobody reads slots n % 2 any more, in whatever sizes and parts, and from
// whichever side, calls n and n + 2 use them. This needs a call to have the same number, hence the same slot, in all
// blocks, so that a call of few blocks counts for those it does without as well (PeerCall::end), and all calls on a window
// to be given the same capacity. A second meeting in a call adds order, and takes none away.
//
// A flag holds the number of the last call for which it was raised; it never falls. A peer may be one call ahead, so
// that a block waits for its own number or more. 64 bits do not wrap, so a flag that a block has not used for days is
// still behind.
//
// Nothing but few_layers.cuh waits for a whole grid: a block needs only its peers of the same index, and other kernels on
// a GPU end some time and leave it room. A grid has at most 128 blocks, one wave on a chip with as many multiprocessors;
// with fewer, progress relies on blocks starting in the order of their index, as they do, though CUDA does not promise it.
// A kernel launched early beside this one takes no place that this one needs: it starts when all blocks of this one run.
#pragma once

#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/tile/vec.cuh"

namespace raylm::cuda {

constexpr int kMaxPeers = 8;
constexpr int kPeerBlocks = 64;     // of a small sum, at most
constexpr int kWindowBlocks = 128;  // of any call
constexpr int kMeetings = 8;        // of one call, at most

struct PeerHeader {
  uint64_t calls[kWindowBlocks];  // ended, by this rank's blocks (few_ranks.cuh: layers); nobody else looks
  alignas(128) uint64_t flags[kMeetings][kWindowBlocks][16];  // [..][rank that raises it]: a line a block
  alignas(128) uint64_t sent[16];  // [rank that raises it]: peer_split_norm.cuh
};
static_assert(sizeof(PeerHeader) % 128 == 0 && kMaxPeers <= 16);

constexpr int64_t peer_window_bytes(int64_t capacity) { return sizeof(PeerHeader) + 2 * capacity; }

__device__ inline void store_release(uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ inline uint64_t load_acquire(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ inline uint64_t global_time_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

struct Peers {
  char* windows[kMaxPeers];  // as this rank addresses them, its own among them
  int rank, ranks;
  int64_t capacity;   // bytes of a slot, a multiple of 16
  uint64_t limit_ns;  // of waiting for a peer

  // Asks until the answer is true. A peer that stays away for longer than the limit is dead or has failed: the trap ends
  // this process's CUDA context with an error, where an endless loop would hold the GPU for good.
  template <typename Question>
  __device__ void until(const Question& question) const {
    constexpr int kPolls = 256;  // between looks at the clock
    if (question()) return;
    const uint64_t start = global_time_ns();
    while (true) {
#pragma unroll 1
      for (int i = 0; i < kPolls; ++i) {
        if (question()) return;
      }
      if (global_time_ns() - start > limit_ns) __trap();
    }
  }
};

// 16 bytes that another GPU may have written, past the first-level cache.
__device__ inline uint4 load_shared_by_peers(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

// One block's part in one call. Made after wait_for_dependencies(), by all threads.
class PeerCall {
 public:
  __device__ explicit PeerCall(const Peers& peers)
      : peers_(peers), number_(header(peers.rank)->calls[blockIdx.x] + 1),
        slot_(sizeof(PeerHeader) + number_ % 2 * peers.capacity) {}

  // Where `rank` stages in this call.
  __device__ uint4* slot(int rank) const { return reinterpret_cast<uint4*>(peers_.windows[rank] + slot_); }
  __device__ uint4* own_slot() const { return slot(peers_.rank); }

  // The same slot of `rank`'s window in every call, for kernels that need no turns (peer_split_norm.cuh).
  __device__ uint4* fixed_slot(int rank, int which) const {
    return reinterpret_cast<uint4*>(peers_.windows[rank] + sizeof(PeerHeader) + which * peers_.capacity);
  }

  // Returns when every peer has sent its rows for the `number`th time (peer_split_norm.cuh).
  __device__ void wait_for_rows(uint64_t number) const {
    if (const int peer = threadIdx.x; is_peer(peer)) {
      const uint64_t* const flag = &header(peers_.rank)->sent[peer];
      peers_.until([&] { return load_acquire(flag) >= number; });
    }
    __syncthreads();
  }

  // Returns when block b of every peer has come to the same meeting. What their threads wrote before can be read then.
  // A block has at least kMaxPeers threads, in one dimension.
  __device__ void meet(int meeting) const {
    arrive(meeting);
    wait(meeting);
  }

  // The two halves of a meeting, for a block that has something to do in between.
  __device__ void arrive(int meeting) const {
    __syncthreads();
    if (const int peer = threadIdx.x; is_peer(peer)) {
      store_release(&header(peer)->flags[meeting][blockIdx.x][peers_.rank], number_);
    }
  }
  __device__ void wait(int meeting) const {
    if (const int peer = threadIdx.x; is_peer(peer)) await(&header(peers_.rank)->flags[meeting][blockIdx.x][peer]);
    __syncthreads();
  }

  // Counts the call, after a meeting (by then every thread has read the number): here, and in block 0 for the blocks
  // that this grid does not have.
  __device__ void end() const {
    uint64_t* calls = header(peers_.rank)->calls;
    if (threadIdx.x == 0) calls[blockIdx.x] = number_;
    if (blockIdx.x != 0) return;
    for (unsigned b = gridDim.x + threadIdx.x; b < kWindowBlocks; b += blockDim.x) calls[b] = number_;
  }

 private:
  __device__ PeerHeader* header(int rank) const { return reinterpret_cast<PeerHeader*>(peers_.windows[rank]); }
  __device__ bool is_peer(int rank) const { return rank < peers_.ranks && rank != peers_.rank; }

  __device__ void await(const uint64_t* flag) const {
    peers_.until([&] { return load_acquire(flag) >= number_; });
  }

  const Peers& peers_;
  const uint64_t number_;
  const int64_t slot_;
};

// Vectors i < count, strided over the grid: part = load(i), then store(i, part). Unrolled by hand, all loads first:
// the compiler must assume that a store changes what the next load reads.
template <int kUnroll, typename Load, typename Store>
__device__ inline void for_my_vecs(int64_t count, const Load& load, const Store& store) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
#pragma unroll 1
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; first < count;
       first += kUnroll * step) {
    decltype(load(first)) parts[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * step < count) parts[u] = load(first + u * step);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * step < count) store(first + u * step, parts[u]);
    }
  }
}

// The same 16 bytes of every rank; kMost bounds the number of ranks.
template <int kMost>
struct Parts {
  uint4 of[kMost];
};

// Vector i of every rank's slot in this call.
template <int kMost>
__device__ inline Parts<kMost> load_parts(const PeerCall& call, int ranks, int64_t i) {
  Parts<kMost> parts;
#pragma unroll
  for (int r = 0; r < kMost; ++r) {
    if (r < ranks) parts.of[r] = load_shared_by_peers(call.slot(r) + i);
  }
  return parts;
}

// Added in float32 in the order of the ranks, rounded once: the same bits on every rank.
template <typename T, int kMost>
__device__ inline Vec<T> sum_parts(const Parts<kMost>& parts, int ranks) {
  float sum[kVec<T>];
#pragma unroll
  for (int r = 0; r < kMost; ++r) {
    if (r >= ranks) break;
    const Vec<T> part = *reinterpret_cast<const Vec<T>*>(&parts.of[r]);
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) sum[i] = r == 0 ? part[i] : sum[i] + part[i];
  }
  Vec<T> out;
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) out.set(i, sum[i]);
  return out;
}

}  // namespace raylm::cuda
