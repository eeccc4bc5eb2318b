// Clusters, for few sequences that do not fill a GPU: a CTA for each split of a group, in order, so
// that the group is combined through distributed shared memory instead of the workspace. On an H100
// that is 3.5 of the 13.8 us that 8192 keys of one head take.
#pragma once

#include "blockflash/ptx/cluster.cuh"
#include "output.cuh"

namespace blockflash {
namespace {

// Kernels without clusters.
template <bool has_clusters>
struct Cluster {
  __device__ __forceinline__ Cluster(uint32_t, const Shared&) {}
  static __device__ __forceinline__ bool is_used(const blockflash_attention_decode_params&) {
    return false;
  }
  static __device__ __forceinline__ bool find(const blockflash_attention_decode_params&,
                                              DecodeItem&, int) {
    return false;
  }
  static __device__ __forceinline__ void finish(const blockflash_attention_decode_params&,
                                                const DecodeItem&, Shared&) {}
};

#if __CUDA_ARCH__ >= 900
// A CTA combines whole rows.
constexpr bool kHasClusters = Config::rows <= kShownRows && Config::threads >= kColumns4;

// A group of splits, one for each CTA. With fewer splits the last CTAs have none. Only where all
// sequences are divided alike.
template <>
struct Cluster<true> {
  static_assert(Config::rows * Config::head_dim * 4 <= 2 * kQBytes || !kHasClusters,
                "a result takes the place of the queries");

  int size, rank;
  uint32_t sums, logs;  // addresses of what a CTA shows

  __device__ __forceinline__ Cluster(uint32_t smem, const Shared& shared)
      : size(ptx::cluster_size()),
        rank(ptx::cluster_rank()),
        sums(smem + kQOffset),
        logs(static_cast<uint32_t>(__cvta_generic_to_shared(shared.shown_logs))) {}

  __device__ __forceinline__ bool is_used(const blockflash_attention_decode_params& p) const {
    return size > 1 && (kHasIndex || are_sequences_equal(p));
  }

  // Writes the item of this CTA and returns true, or returns false behind the last group.
  __device__ __forceinline__ bool find(const blockflash_attention_decode_params& p,
                                       DecodeItem& item, int lane) const {
    if constexpr (kHasIndex) return IndexWalk::find_in_cluster(p, size, rank, item, lane);
    const DecodeSequence s = DecodeSequence::of<Config::rows>(p, 0);
    const int of_group = s.row_tiles * p.num_heads_kv;
    const int of_sequence = ceil_div(s.splits, kGroup) * of_group;
    const int number = small_quotient(blockIdx.x, size);
    const int sequence = small_quotient(number, of_sequence);
    if (sequence >= p.batch) return false;
    const int within = number - sequence * of_sequence;
    const int group = small_quotient(within, of_group);
    if (lane == 0)
      describe<Config::rows>(p, DecodeSequence::of<Config::rows>(p, sequence), sequence,
                             sequence * s.splits * of_group, within - group * of_group,
                             group * kGroup + rank, 0, item);
    return true;
  }

  __device__ __forceinline__ Partial load(int of_rank, int row, int piece) const {
    const uint32_t at = (row * kColumns4 + piece) * sizeof(float4);
    const float2 of_row =
        ptx::load_cluster_float2(ptx::map_shared(logs + row * sizeof(float2), of_rank));
    return {ptx::load_cluster_float4(ptx::map_shared(sums + at, of_rank)), of_row.x, of_row.y};
  }

  // Combines the group, whole rows in a CTA, and the groups in the CTAs that complete their rows.
  __device__ __forceinline__ void finish(const blockflash_attention_decode_params& p,
                                         const DecodeItem& item, Shared& shared) const {
    bool& last = shared.last[0];
    ptx::launch_dependents();
    ptx::cluster_arrive();
    const SplitGroup group(item);
    const int groups = ceil_div(item.splits, kGroup);
    constexpr int kRowsAtOnce = Config::threads / kColumns4;
    const int row_of_thread = rank + static_cast<int>(threadIdx.x) / kColumns4 * size;
    const int piece = threadIdx.x % kColumns4, rows = rows_of<OutputTile>(p, item);
    const bool in_row = piece * 4 < p.head_dim_v;
    const Slot slot(p, item.slot_of(group.first));
    ptx::cluster_wait();
    for (int row = row_of_thread; row < rows; row += kRowsAtOnce * size) {
      if (!in_row) continue;
      const Partial x = combine_in_order<kInner, 8>(
          group.count, [&](int of_rank) { return load(of_rank, row, piece); });
      if (groups == 1)
        store_result<OutputTile>(p, item, row, piece, x);
      else
        slot.store(p, row, piece, x);
    }
    ptx::cluster_arrive();  // the others may end: their memory was read
    if (groups > 1 && rank < rows) {
      __syncthreads();
      // With several groups there is a split for each rank, whose counter no group uses.
      if (threadIdx.x == 0)
        last = shared.arrivals.are_complete_with_this(item.slot_of(rank), groups);
      __syncthreads();
      const int64_t rows_apart = static_cast<int64_t>(kGroup) * item.slot_step * p.partial_rows;
      const Slot first(p, item.slot_of(0));
      for (int row = row_of_thread; last && row < rows; row += kRowsAtOnce * size) {
        if (!in_row) continue;
        const Partial x = combine_in_order<1, 8>(
            groups, [&](int g) { return first.load(p, row, piece, g * rows_apart); });
        store_result<OutputTile>(p, item, row, piece, x);
      }
    }
    ptx::cluster_wait();
  }
};
#else
constexpr bool kHasClusters = false;
#endif

}  // namespace
}  // namespace blockflash
