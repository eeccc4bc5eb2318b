// The copy of the queries of an item.
#pragma once

#include "blockflash/latent_hopper/layout.cuh"
#include "blockflash/ptx/cp_async.cuh"

namespace blockflash {
namespace {

// Starts the copy of the queries of an item by the team. Rows and columns that do not exist become
// zeros.
__device__ __forceinline__ void copy_queries(const blockflash_attention_decode_params& p,
                                             const DecodeRun& item, uint32_t q_smem) {
  const Element* const q = static_cast<const Element*>(p.q);
  const Element* of_sequence = q + (p.cu_seqlens_q == nullptr ? item.sequence * p.q_stride_batch
                                                              : item.q_begin * p.q_stride_seq);
  // Each query is an item of its own then.
  if (Config::has_lists && p.cu_seqlens_q == nullptr) of_sequence += item.q_begin * p.q_stride_seq;
  // Eight threads side by side copy a row, 16 bytes each at a time.
  const int chunk = threadIdx.x % 8;
#pragma unroll
  for (int in_tile = threadIdx.x / 8; in_tile < kRows; in_tile += Team::threads / 8) {
    const int row = item.row_tile * kRows + in_tile;
    const int query = small_quotient(row, p.group);
    const Element* const from = of_sequence + query * p.q_stride_seq +
                                (item.head_kv * p.group + row - query * p.group) * p.q_stride_head +
                                chunk * 8;
    const uint32_t to = q_smem + in_tile * 128 + (chunk ^ in_tile % 8) * 16;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const bool exists = query < item.q_length && panel * 64 + chunk * 8 < p.head_dim_qk;
      ptx::cp_async_cg_16(to + panel * kQPanelBytes, exists ? from + panel * 64 : q,
                          exists ? 16 : 0);
    }
  }
}

}  // namespace
}  // namespace blockflash
