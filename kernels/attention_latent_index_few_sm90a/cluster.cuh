// The splits of a list as a cluster: a CTA for each, in order, so that they are combined through
// distributed shared memory instead of a workspace, with the same operations as in
// decode/combine_tree.cuh.
#pragma once

#include "blockflash/latent/output.cuh"
#include "blockflash/ptx/cluster.cuh"
#include "blockflash/ptx/cluster_number.cuh"
#include "blockflash/ptx/shared.cuh"
#include "rows.cuh"

namespace blockflash {
namespace {

// What a CTA shows to the others: its sums, in the place of the ring, and behind them the
// logarithms of the rows.
struct Shown {
  static constexpr int kPieces = Config::values / 4;  // of a row, four columns each
  static constexpr int kLogs = Config::rows * kPieces * sizeof(float4);
  static constexpr int kBytes = kLogs + Config::rows * sizeof(float2);
  static constexpr int kMost = 16;  // CTAs of a cluster

  // The lanes of a phase of a store have two rows, so pieces of odd rows change banks.
  static __device__ __forceinline__ uint32_t piece_at(int row, int piece) {
    return (row * kPieces + (piece ^ row % 2 * 4)) * sizeof(float4);
  }

  static __device__ __forceinline__ void store(uint32_t smem, int row, int piece,
                                               const Partial& x) {
    const float sums[4] = {x.sum.x, x.sum.y, x.sum.z, x.sum.w};
    ptx::store_shared_float4(smem + piece_at(row, piece), sums);
    if (piece > 0) return;
    ptx::store_shared(smem + kLogs + row * 8, __float_as_uint(x.reference));
    ptx::store_shared(smem + kLogs + row * 8 + 4, __float_as_uint(x.denominator));
  }
  static __device__ __forceinline__ Partial load(uint32_t smem, int row, int piece, int rank) {
    const float2 of_row = ptx::load_cluster_float2(ptx::map_shared(smem + kLogs + row * 8, rank));
    return {ptx::load_cluster_float4(ptx::map_shared(smem + piece_at(row, piece), rank)), of_row.x,
            of_row.y};
  }
};

// That of the calling CTA; of one CTA in a launch without clusters.
struct Cluster {
  const int size = ptx::cluster_size(), rank = ptx::cluster_rank();
  const int number = size > 1 ? ptx::cluster_number() : blockIdx.x;

  // Ends an item with all threads, and with those of the other CTAs, each of which combines some
  // rows. Nobody reads the ring any more.
  template <class Sums>
  __device__ __forceinline__ void finish(const blockflash_attention_decode_params& p,
                                         const DecodeItem& item, const Sums& sums,
                                         uint32_t smem) const {
    static_assert(Team::threads % Shown::kPieces == 0, "threads have pieces of whole rows");
    constexpr int kRowsAtOnce = Team::threads / Shown::kPieces;
    constexpr int kBranches = TreeNode::kBranches;
    finish_split(p, item, sums,
                 [&](int row, int piece, const Partial& x) { Shown::store(smem, row, piece, x); });
    ptx::cluster_arrive();
    const int rows = rows_of<OutputTile>(p, item), piece = threadIdx.x % Shown::kPieces;
    ptx::cluster_wait();
#pragma unroll 1
    for (int row = rank + static_cast<int>(threadIdx.x) / Shown::kPieces * size; row < rows;
         row += kRowsAtOnce * size) {
      Partial parts[Shown::kMost];
#pragma unroll
      for (int i = 0; i < Shown::kMost; ++i)
        parts[i] = i < size ? Shown::load(smem, row, piece, i) : kNoPartial;
#pragma unroll
      for (int first = 0; first < Shown::kMost; first += kBranches) {
#pragma unroll
        for (int i = first + 1; i < first + kBranches; ++i)
          if (i < size) add(parts[first], parts[i]);
        if (first > 0 && first < size) add(parts[0], parts[first]);
      }
      store_result<OutputTile>(p, item, row, piece, parts[0]);
    }
    ptx::cluster_arrive();  // the others may end: their memory was read
    ptx::cluster_wait();
  }
};

}  // namespace
}  // namespace blockflash
