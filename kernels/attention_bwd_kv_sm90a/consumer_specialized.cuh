// Two consumer warpgroups that share the keys of a CTA and also compute dq, for head dimensions
// whose dk and dv do not fit into the registers of one. The first has the scores of a tile, dv and
// the first columns of dq; the second has their gradients, dk and the other columns of dq. So every
// operand of the scores is read from shared memory once per tile. The second knows probabilities as
// the first leaves them for its own product, rounded.
#pragma once

#include "blockflash/params/attention_bwd.h"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/stmatrix.cuh"
#include "dq_order.cuh"

namespace blockflash {
namespace {

struct Specialized {
  static constexpr int kKeys = kResidentRows;
  template <int panels>
  using Transposed = float[panels][kKeys / 2];  // of dk or dv: 64 columns × all keys each

  const Params& params;
  const blockflash_attention_fwd_params& p;
  const uint32_t smem;
  const Barriers& barriers;
  const DqBarriers dq_barriers;
  // Probabilities, and gradients of the scores: 64 queries of each key.
  const uint32_t of_scores[2];

  __device__ __forceinline__ Specialized(const Params& params, uint32_t smem,
                                         const Barriers& barriers)
      : params(params),
        p(params.base.base),
        smem(smem),
        barriers(barriers),
        dq_barriers(smem),
        of_scores{smem + kScoresOffset, smem + kScoresOffset + kScoresBytes} {}

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }
  static __device__ __forceinline__ void arrive(uint32_t barrier) {
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(barrier);
  }
  // Where a lane stores or loads its row of four transposed fragments: 16 keys × 16 of the rows of
  // 128 bytes.
  static __device__ __forceinline__ uint32_t transposed_row() {
    const int key = lane() / 16 * 8 + lane() % 8, chunk = 2 * warp() + lane() / 8 % 2;
    return key * 128 + (chunk ^ lane() % 8) * 16;
  }

  __device__ __forceinline__ int query(int half) const {
    return warp() * 16 + accumulator_row(lane(), 2 * half);
  }
  __device__ __forceinline__ Visible visible_pairs(int first_query) const {
    const QueryRange range = Keys::shared().range(p);
    const int k_begin = Keys::shared().k_begin;
    Visible visible;
    visible.masked = range.is_masked(k_begin, kKeys, first_query, kStreamRows);
    if (visible.masked) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const KeyRange keys = range.mask.keys_of(first_query + query(half));
        const int first = k_begin + accumulator_column(lane(), 0);
        visible.bits[half] = visible_keys(keys.begin - first, keys.end - first);
      }
    }
    return visible;
  }
  __device__ __forceinline__ void load_statistics(float (&x)[2], uint32_t from) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      x[half] = __uint_as_float(ptx::load_shared(from + query(half) * 4));
  }

  // gradientᵀ += rowsᵀ·scores, some panels of it: Q or dO by rows, and what is kept of the scores.
  template <int begin, int end, int panels>
  static __device__ __forceinline__ void start_gradient_t(Transposed<panels>& gradient,
                                                          uint32_t rows, uint32_t scores) {
#pragma unroll
    for (int panel = begin; panel < end; ++panel)
#pragma unroll
      for (int step = 0; step < kStreamRows / 16; ++step)
        ptx::Wgmma<kKeys, Element>::template ss<true, false, true>(
            gradient[panel],
            ptx::wgmma_descriptor_of(rows) + (panel * kStreamPanel >> 4) + step * 128,
            ptx::wgmma_descriptor_of(scores) + step * 2);
    ptx::wgmma_commit_group();
  }
  // dq = ds·k, the columns of a panel of K.
  static __device__ __forceinline__ void start_dq(float (&dq)[32], uint32_t scores, uint32_t k) {
    using Product = ptx::Wgmma<64, Element>;
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      const uint64_t a = ptx::wgmma_descriptor_of(scores) + step * 128,
                     b = ptx::wgmma_descriptor_of(k) + step * 128;
      if (step == 0)
        Product::template ss<false, true, true>(dq, a, b);
      else
        Product::template ss<true, true, true>(dq, a, b);
    }
    ptx::wgmma_commit_group();
  }
  // Waits until the tile before, of which there is one staging, has been read.
  __device__ __forceinline__ void await_staging(uint32_t n) const {
    if (n > 0) wait_full<2>(dq_barriers.staged_empty, n - 1);
  }
  // Stores the columns of a panel in the order of sums, where a warp has 16 queries and half of the
  // columns.
  template <int panel>
  __device__ __forceinline__ void stage_dq(const float (&dq)[32]) const {
    const uint32_t staging = smem + kStagingOffset + warp() * (kSumsBytes / 8) + lane() * 16;
    constexpr int kHalf = kD / 16;  // groups of eight columns
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int group = panel * 8 + i;
      ptx::store_shared_float4(staging + group / kHalf * (kSumsBytes / 2) + group % kHalf * 512,
                               dq + 4 * i);
    }
    ptx::fence_proxy_async();
  }

  // Both threads that add tiles read the end of the queue.
  __device__ __forceinline__ void end_queue(uint32_t n) const {
#pragma unroll 1
    for (uint32_t end = n; end < n + 2; ++end) {
      wait_empty<2>(dq_barriers.staged_empty, end);
      arrive(barrier_of(dq_barriers.staged, end & 1));
    }
  }

  // Stores a gradient by way of a resident tile that is read no more.
  template <int panels>
  __device__ __forceinline__ void store(const Transposed<panels>& gradient, float factor,
                                        uint32_t tile, int warpgroup, void* tensor, int64_t batch,
                                        int64_t seq, int64_t head, int columns) const {
    constexpr int kChunks = 8 * panels;  // of a row
    const uint32_t row = tile + transposed_row();
#pragma unroll
    for (int panel = 0; panel < panels; ++panel)
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) {
        const float* const d = gradient[panel] + 8 * i;
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          words[j] = Traits::pack(d[2 * j] * factor, d[2 * j + 1] * factor);
        ptx::stmatrix_x4_trans(row + panel * kResidentPanel + i * 2048, words);
      }
    ptx::named_barrier_sync(2 + warpgroup, 128);
    const Keys& work = Keys::shared();
    Element* const out = static_cast<Element*>(tensor) +
                         work.batch * batch * (p.cu_seqlens_q == nullptr) + work.head_kv * head +
                         (work.kv_offset + work.k_begin) * seq;
    const int rows = min(kKeys, work.seqlen_kv - work.k_begin);
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < rows * kChunks; i += 128) {
      const int key = i / kChunks, chunk = i % kChunks;
      const int4 values = ptx::load_shared_int4(tile + chunk / 8 * kResidentPanel + key * 128 +
                                                (chunk % 8 ^ key % 8) * 16);
      if (chunk * 8 < columns) *reinterpret_cast<int4*>(out + key * seq + chunk * 8) = values;
    }
  }

  __device__ __forceinline__ void keep_scores(const uint32_t (&words)[kKeys / 4], int which) const {
    const uint32_t row = of_scores[which] + transposed_row();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const uint32_t four[4] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
      ptx::stmatrix_x4_trans(row + i * 2048, four);
    }
    ptx::fence_proxy_async();
    arrive(barrier_of(dq_barriers.scores, which));
  }

  // The scores, dv and the first 64 columns of dq.
  __device__ __forceinline__ void have_scores() const {
    const float scale_log2 = p.scores.scale_log2;
    const uint32_t k = ptx::wgmma_low(smem);
    const uint32_t q = ptx::wgmma_low(smem + kFirstOffset),
                   d_o = ptx::wgmma_low(smem + kSecondOffset);
    const uint32_t of_p = ptx::wgmma_low(of_scores[0]), of_ds = ptx::wgmma_low(of_scores[1]);
    Transposed<kVPanels> dv;
#pragma unroll
    for (int panel = 0; panel < kVPanels; ++panel)
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) dv[panel][i] = 0.f;

    uint32_t n = 0;  // number of the tile
#pragma unroll 1
    for (;; ++n) {
      wait_full<2>(barriers.first, n);
      const int first_query = published_row(smem, n & 1);
      if (first_query < 0) break;
      if (n == 0) wait_full<1>(barriers.resident, 0);
      {
        float s[kKeys / 2];
        ptx::wgmma_fence();
        start_scores<kKeys>(s, q + (n & 1) * (kStreamBytes >> 4), kStreamPanel, k, kResidentPanel);
        const Visible visible = visible_pairs(first_query);
        float negative_log[2];
        load_statistics(negative_log, first_statistics(smem, n & 1));
        ptx::wgmma_wait_group<0>();
        ptx::wgmma_pin(s);
        arrive(barrier_of(barriers.first_empty, n & 1));
        visible.hide(s, -CUDART_INF_F);
        uint32_t p16[kKeys / 4];
        if (has_large<kStreamRows>(first_statistics(smem, n & 1))) {
#pragma unroll
          for (int i = 0; i < kKeys / 2; ++i)
            s[i] = ExponentOfLarge{}(s[i], scale_log2, negative_log[i / 2 % 2]);
#pragma unroll
          for (int i = 0; i < kKeys / 2; ++i) s[i] = ptx::ex2_approx(s[i]);
        } else {
#pragma unroll
          for (int i = 0; i < kKeys / 2; ++i)
            s[i] = ptx::ex2_approx(fmaf(s[i], scale_log2, negative_log[i / 2 % 2]));
        }
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) p16[i] = Traits::pack(s[2 * i], s[2 * i + 1]);
        wait_empty<1>(dq_barriers.scores_empty, n);
        keep_scores(p16, 0);
      }
      wait_full<1>(dq_barriers.scores, n);
      wait_full<1>(barriers.second, n);
      float dq[32];
      ptx::wgmma_fence();
      start_gradient_t<0, kVPanels>(dv, d_o, of_p);
      wait_full<1>(barrier_of(dq_barriers.scores, 1), n);
      ptx::wgmma_fence();
      start_dq(dq, of_ds, k);
      ptx::wgmma_wait_group<1>();
#pragma unroll
      for (int panel = 0; panel < kVPanels; ++panel) ptx::wgmma_pin(dv[panel]);
      arrive(barriers.second_empty);
      arrive(dq_barriers.scores_empty);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(dq);
      arrive(barrier_of(dq_barriers.scores_empty, 1));
      await_staging(n);
      stage_dq<0>(dq);
      arrive(barrier_of(dq_barriers.staged, n & 1));
    }
    end_queue(n);
    ptx::named_barrier_sync(1, 256);
    const blockflash_attention_bwd_params& b = params.base;
    store(dv, 1.f, smem + kResidentBytes, 0, b.dv, b.dv_stride_batch, b.dv_stride_seq,
          b.dv_stride_head, p.head_dim_v);
  }

  // The gradients of the scores, dk and the other columns of dq.
  __device__ __forceinline__ void have_gradients() const {
    const uint32_t v = ptx::wgmma_low(smem + kResidentBytes), k = ptx::wgmma_low(smem);
    const uint32_t q = ptx::wgmma_low(smem + kFirstOffset),
                   d_o = ptx::wgmma_low(smem + kSecondOffset);
    const uint32_t of_ds = ptx::wgmma_low(of_scores[1]);
    Transposed<kPanels> dk;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) dk[panel][i] = 0.f;

    uint32_t n = 0;  // number of the tile
#pragma unroll 1
    for (;; ++n) {
      wait_full<2>(barriers.first, n);
      const int first_query = published_row(smem, n & 1);
      if (first_query < 0) break;
      if (n == 0)
        wait_full<1>(barriers.resident, 0), wait_full<1>(barrier_of(barriers.resident, 1), 0);
      wait_full<1>(barriers.second, n);
      {
        float dp[kKeys / 2];
        ptx::wgmma_fence();
        start_scores<kKeys, false, kDV>(dp, d_o, kStreamPanel, v, kResidentPanel);
        // They are queued behind dk of the tile before, whose Q is read then.
        ptx::wgmma_wait_group<1>();
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) ptx::wgmma_pin(dk[panel]);
        if (n > 0) {
          arrive(barrier_of(barriers.first_empty, n - 1 & 1));
          arrive(barrier_of(dq_barriers.scores_empty, 1));
        }
        const Visible visible = visible_pairs(first_query);
        float delta[2];
        load_statistics(delta, second_statistics(smem, 0));
        ptx::wgmma_wait_group<0>();
        ptx::wgmma_pin(dp);
        arrive(barriers.second_empty);
        wait_full<1>(dq_barriers.scores, n);
        const uint32_t row = of_scores[0] + transposed_row();
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) {
          uint32_t words[4];
          ptx::ldmatrix_x4_trans(words, row + i * 2048);
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const float probability =
                Traits::to_float(static_cast<uint16_t>(words[j / 2] >> j % 2 * 16));
            dp[8 * i + j] = probability * (dp[8 * i + j] - delta[j / 2 % 2]);
          }
        }
        arrive(dq_barriers.scores_empty);
        visible.hide(dp, 0.f);
        uint32_t ds16[kKeys / 4];
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) ds16[i] = Traits::pack(dp[2 * i], dp[2 * i + 1]);
        wait_empty<1>(barrier_of(dq_barriers.scores_empty, 1), n);
        keep_scores(ds16, 1);
      }
      wait_full<1>(barrier_of(dq_barriers.scores, 1), n);
      // Both panels of dq at once would take too many registers.
      float dq[32];
      const uint32_t q_rows = q + (n & 1) * (kStreamBytes >> 4);
      ptx::wgmma_fence();
      start_dq(dq, of_ds, k + (kResidentPanel >> 4));
      start_gradient_t<0, 1>(dk, q_rows, of_ds);
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_pin(dq);
      await_staging(n);
      stage_dq<1>(dq);
      ptx::wgmma_fence();
      start_dq(dq, of_ds, k + (2 * kResidentPanel >> 4));
      start_gradient_t<1, kPanels>(dk, q_rows, of_ds);
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_pin(dq);
      stage_dq<2>(dq);
      arrive(barrier_of(dq_barriers.staged, n & 1));
    }
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) ptx::wgmma_pin(dk[panel]);
    end_queue(n);
    ptx::named_barrier_sync(1, 256);
    const blockflash_attention_bwd_params& b = params.base;
    store(dk, p.scores.scale, smem, 1, b.dk, b.dk_stride_batch, b.dk_stride_seq, b.dk_stride_head,
          p.head_dim_qk);
  }
};

__device__ __forceinline__ void consume_specialized(const Params& params, uint32_t smem,
                                                    const Barriers& barriers, int warpgroup) {
  const Specialized apart(params, smem, barriers);
  if (warpgroup == 0)
    apart.have_scores();
  else
    apart.have_gradients();
}

}  // namespace
}  // namespace blockflash
