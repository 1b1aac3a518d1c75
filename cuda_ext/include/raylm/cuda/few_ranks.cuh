// How tensor ranks sum what o and down give in few_layers.cuh: each sends its part of two outputs to a cell in every other
// rank's window (peer.cuh), and adds all parts in the order of ranks, the same bits on each of them.
//
// A cell (ptx/cell.cuh) has a stamp that is not used twice in a window for 2^32 layers, whichever models run over it: layers
// are counted there. It is written again in the next layer. By then it has been read: a rank sends parts of down behind
// gate and up, which read all of o's outputs and so come behind all parts of o that it was sent; and parts of o behind q, k
// and v, which read all of down's. Whoever sends to it has waited for those.
//
// All ranks run the same models over as many rows, in the same order.
#pragma once

#include "raylm/cuda/peer.cuh"
#include "raylm/cuda/ptx/cell.cuh"
#include "raylm/cuda/tile/fragments.cuh"

namespace raylm::cuda {

// One rank's end. A slot of its window is for parts of o, the other one for those of down: [rank that sends][row][pair].
template <typename T>
class FewRanks {
 public:
  // `row_cells`: of all rows that there is room for. `peers.ranks` is 0 where the model is whole.
  __device__ FewRanks(const Peers& peers, int row_cells)
      : peers_(peers), row_cells_(row_cells), stamp_(split() ? static_cast<uint32_t>(layers()) : 0) {}

  __device__ bool split() const { return peers_.ranks > 1; }
  __device__ void begin_layer() { ++stamp_; }

  // Counts a launch's layers, when all blocks of it have ended but one thread of this.
  __device__ void count(int num_layers) const {
    if (split()) layers() += num_layers;
  }

  // Sends this rank's part of two outputs, those of cell `at` of down or of o.
  __device__ void send(uint32_t pair, bool down, int64_t at) const {
#pragma unroll 1
    for (int r = 0; r < peers_.ranks; ++r) {
      if (r != peers_.rank) store_cell_of_peer(cells(r, down, peers_.rank) + at, pair, stamp_);
    }
  }

  // All ranks' parts of it. `own`: what this rank has sent.
  __device__ float2 sum(uint32_t own, bool down, int64_t at) const {
    float2 sum;
#pragma unroll 1
    for (int r = 0; r < peers_.ranks; ++r) {
      const float2 part = unpack<T>(r == peers_.rank ? own : await(cells(peers_.rank, down, r) + at));
      sum = r == 0 ? part : make_float2(sum.x + part.x, sum.y + part.y);
    }
    return sum;
  }

 private:
  __device__ uint64_t& layers() const { return reinterpret_cast<PeerHeader*>(peers_.windows[peers_.rank])->calls[0]; }

  __device__ uint2* cells(int rank, bool down, int sender) const {
    const int64_t slot = sizeof(PeerHeader) + (down ? peers_.capacity : 0);
    return reinterpret_cast<uint2*>(peers_.windows[rank] + slot) + static_cast<int64_t>(sender) * row_cells_;
  }

  __device__ uint32_t await(const uint2* from) const {
    uint2 seen;
    peers_.until([&] { return (seen = load_cell_of_peer(from)).y == stamp_; });
    return seen.x;
  }

  const Peers& peers_;
  const int row_cells_;
  uint32_t stamp_;
};

}  // namespace raylm::cuda
