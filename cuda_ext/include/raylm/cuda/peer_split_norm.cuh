// residual += the sum of all ranks' x; out = its root-mean-square norm, for many rows, over peer memory (peer.cuh): the
// rows are split, and each rank sums and norms those that it owns.
//
//   push   each rank writes its x of every row into the owner's window, slot 0
//   norm   the owner adds up, keeps the new residual, and writes the norm into its own out and all peers' windows, slot 1
//   take   each rank copies what the owners have written from its window to its out
//
// So every byte crosses a link twice, as in a reduce-scatter and an all-gather, and a row is normed once. Kernels write
// to peers and read at home: a write does not wait for the way there and back. Only the owner's residual of a row is
// kept up to date, which is enough for the next call with as many rows.
//
// Where a product takes long, its rows of the peers' shares come first, and copy engines send them while those of this
// rank's share are computed; peer_rows_sent_kernel follows them. Then nothing is left to push, and the owner waits for the
// peers' flags instead of the first meetings. It starts when its own have been raised.
//
// A block's rows come in chunks, so that the links are in use while what lies here is read and written: all chunks are
// pushed, then each is normed when the peers' parts of it are here, and taken one chunk later. Meeting c is about the
// pushed x of chunk c, meeting kSplitChunks + c about its norm. All ranks give block b the same rows of every owner, in
// the same chunks, so a block needs its peers of the same index alone, as peer.cuh has it.
//
// Why one slot of each kind is enough, without turns: only this rank's blocks read its window. A peer writes there in
// call n + 1, when its kernel of call n has ended.
// - Slot 0 of call n is read by block b before it arrives at the meeting about that chunk's norm, and the peer's block b
//   waited for that meeting before it ended. So all blocks here have read all of slot 0 before the peer's call n + 1
//   begins, however that one is divided.
// - Slot 1 of call n is read until the end of this rank's kernel. In call n + 1 a peer's block writes there after a
//   meeting with a block of this rank's call n + 1, which began when all of call n had ended (wait_for_dependencies).
// What is sent instead is sent when the peer's call n has ended, too, and its flag stands for that meeting.
// A release also orders the reads before it, and bar.sync those of the other threads of the block.
#pragma once

#include "raylm/cuda/peer_norm.cuh"

namespace raylm::cuda {

constexpr int kSplitChunks = kMeetings / 2;

// How a call is divided; the same on all ranks. A row takes `width` threads, whole warps, and a block has threads for
// `groups` rows at a time: a round. A chunk is `rounds` of them.
struct Split {
  int64_t most;  // rows that a rank owns, at most
  int width, groups, chunks, rounds;
  uint64_t sent;  // not 0: peers' x has been sent so many times, this one among them
};

// One warp, behind the copies of this rank's rows to the windows of its peers.
__global__ void peer_rows_sent_kernel(const __grid_constant__ Peers peers, int to, uint64_t number) {
  if (threadIdx.x == 0) store_release(&reinterpret_cast<PeerHeader*>(peers.windows[to])->sent[peers.rank], number);
}

// One thread's part, kVecs times 16 bytes of a row.
template <typename T, int kMost, int kVecs>
class SplitNorm {
 public:
  __device__ SplitNorm(const PeerCall& call, const Peers& peers, const NormParams<T>& p, const Split& split)
      : call_(call), peers_(peers), p_(p), split_(split), group_(threadIdx.x / split.width),
        lane_(threadIdx.x % split.width), vecs_(static_cast<int>(p.hidden / kSize)) {}

  __device__ void push(int chunk) const {
    for_peers([&](int owner) {
      const uint4* x = x_of(owner);
      uint4* const to = slot(kGiven, peers_.rank, owner);
      copy_rows(chunk, rows_of(owner), x, p_.outer_stride / kSize, to, vecs_);
    });
  }

  __device__ void take(int chunk) const {
    for_peers([&](int owner) {
      uint4* const out = reinterpret_cast<uint4*>(p_.out) + first_row(owner) * vecs_;
      copy_rows(chunk, rows_of(owner), slot(kNormed, owner, peers_.rank), vecs_, out, vecs_);
    });
  }

  __device__ void norm(int chunk) const {
    Vec<T> held[kVecs];
    const int64_t first = first_row(peers_.rank);
    const int rows = rows_of(peers_.rank);
#pragma unroll 1
    for (int round = chunk * split_.rounds; round < (chunk + 1) * split_.rounds; ++round) {
      const int row = row_in(round);
      if (row >= rows) break;
      T* const residual = p_.residual + (first + row) * p_.residual_stride;
      for_vecs([&](int j, int v) { held[j] = added(row, v, Vec<T>::load(residual + v * kSize)); });
      float squares = 0;
      for_vecs([&](int j, int v) {
        held[j].store(residual + v * kSize);
        for (int i = 0; i < kSize; ++i) squares += held[j][i] * held[j][i];
      });
      const float scale =
          rsqrtf(group_sum(squares, group_, split_.width, round) / static_cast<float>(p_.hidden) + p_.eps);
      for_vecs([&](int j, int v) {
        const Vec<T> weight = Vec<T>::load(p_.weight + v * kSize);  // near by: it is the same for all rows
        for (int i = 0; i < kSize; ++i) held[j].set(i, held[j][i] * scale * weight[i]);
        held[j].store(p_.out + (first + row) * p_.hidden + v * kSize);
        give(row, v, *reinterpret_cast<const uint4*>(&held[j]));
      });
    }
  }

 private:
  static constexpr int kSize = kVec<T>;
  static constexpr int kGiven = 0, kNormed = 1;  // slots of a window

  __device__ int64_t first_row(int owner) const { return p_.rows * owner / peers_.ranks; }
  __device__ int rows_of(int owner) const { return static_cast<int>(first_row(owner + 1) - first_row(owner)); }

  // This thread's row of a share in a round; past the share's end there is none. The same for all threads of a group.
  __device__ int row_in(int round) const { return blockIdx.x + (round * split_.groups + group_) * gridDim.x; }

  // Where `to`'s window has what `from` writes: a share for each rank but itself.
  __device__ uint4* slot(int which, int from, int to) const {
    return call_.fixed_slot(to, which) + (from - (from > to)) * split_.most * vecs_;
  }

  __device__ const uint4* x_of(int owner) const {
    return reinterpret_cast<const uint4*>(p_.x + first_row(owner) * p_.outer_stride);
  }

  // body(j, v): this thread's vectors v of a row.
  template <typename Body>
  __device__ void for_vecs(const Body& body) const {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int v = lane_ + j * split_.width;
      if (v < vecs_) body(j, v);
    }
  }

  // Every rank begins with the one after it, so that not all of them write to one.
  template <typename Body>
  __device__ void for_peers(const Body& body) const {
#pragma unroll 1
    for (int k = 1; k < peers_.ranks; ++k) {
      const int peer = peers_.rank + k;
      body(peer < peers_.ranks ? peer : peer - peers_.ranks);
    }
  }

  // Rows of a chunk, `stride` vectors apart on either side; all loads come first.
  __device__ void copy_rows(int chunk, int rows, const uint4* from, int64_t from_stride, uint4* to,
                            int64_t to_stride) const {
    constexpr int kUnroll = 4 / kVecs;  // more takes registers that the norm does not need
    const int end = (chunk + 1) * split_.rounds;
#pragma unroll 1
    for (int round = chunk * split_.rounds; round < end; round += kUnroll) {
      uint4 parts[kUnroll][kVecs];
      for_rows<kUnroll>(round, end, rows, [&](int u, int row) {
        for_vecs([&](int j, int v) { parts[u][j] = load_shared_by_peers(from + row * from_stride + v); });
      });
      for_rows<kUnroll>(round, end, rows, [&](int u, int row) {
        for_vecs([&](int j, int v) { to[row * to_stride + v] = parts[u][j]; });
      });
    }
  }

  template <int kUnroll, typename Body>
  __device__ void for_rows(int round, int end, int rows, const Body& body) const {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int row = row_in(round + u);
      if (round + u < end && row < rows) body(u, row);
    }
  }

  // Vector v of an own row: rounded to T as a sum, then with the residual, the bits of peer_all_reduce and add_rms_norm
  // one after the other.
  __device__ Vec<T> added(int row, int v, const Vec<T>& residual) const {
    Parts<kMost> parts;
#pragma unroll
    for (int r = 0; r < kMost; ++r) {
      if (r >= peers_.ranks) break;
      const uint4* at = r == peers_.rank ? x_of(r) + row * (p_.outer_stride / kSize)
                                         : slot(kGiven, r, peers_.rank) + row * vecs_;
      parts.of[r] = load_shared_by_peers(at + v);
    }
    const Vec<T> sum = sum_parts<T>(parts, peers_.ranks);
    Vec<T> out;
    for (int i = 0; i < kSize; ++i) out.set(i, sum[i] + residual[i]);
    return out;
  }

  __device__ void give(int row, int v, const uint4& normed) const {
#pragma unroll
    for (int r = 0; r < kMost; ++r) {
      if (r < peers_.ranks && r != peers_.rank) slot(kNormed, peers_.rank, r)[row * vecs_ + v] = normed;
    }
  }

  const PeerCall& call_;
  const Peers& peers_;
  const NormParams<T>& p_;
  const Split& split_;
  const int group_, lane_, vecs_;
};

template <typename T, int kMost, int kVecs>
__global__ void __launch_bounds__(kPeerNormThreads, 1)
    peer_split_add_rms_norm_kernel(const __grid_constant__ Peers peers, const __grid_constant__ NormParams<T> p,
                                   const __grid_constant__ Split split) {
  start_dependents();
  wait_for_dependencies();
  const PeerCall call(peers);
  const SplitNorm<T, kMost, kVecs> rows(call, peers, p, split);
#pragma unroll 1
  for (int chunk = 0; chunk < split.chunks && !split.sent; ++chunk) {
    rows.push(chunk);
    call.arrive(chunk);
  }
  if (split.sent) call.wait_for_rows(split.sent);
#pragma unroll 1
  for (int chunk = 0; chunk <= split.chunks; ++chunk) {
    if (chunk < split.chunks) {
      if (!split.sent) call.wait(chunk);
      rows.norm(chunk);
      call.arrive(kSplitChunks + chunk);
    }
    if (chunk == 0) continue;
    call.wait(kSplitChunks + chunk - 1);
    rows.take(chunk - 1);
  }
  call.end();
}

}  // namespace raylm::cuda
