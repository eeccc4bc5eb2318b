// What the Hopper kernels of the attention backward share. A CTA keeps a pair of tiles in shared
// memory (K and V, or Q and dO) and streams pairs of tiles of the other side past it. One thread of
// the producer warpgroup reads all lists and issues all TMA loads; two consumer warpgroups compute.
#pragma once

#include "blockflash/attention/gradient.cuh"
#include "blockflash/attention/visible_pairs.cuh"
#include "blockflash/config/attention_bwd_hopper.cuh"
#include "blockflash/config/attention_terms.cuh"
#include "blockflash/params/attention_bwd.h"
#include "blockflash/params/attention_terms.h"
#include "blockflash/ping_pong.cuh"
#include "blockflash/pipeline.cuh"
#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/shared.cuh"
#include "blockflash/ptx/tensor_copy.cuh"
#include "blockflash/ptx/wgmma.cuh"

namespace blockflash {
namespace {

using Config = GradientHopperConfig;
using Params = blockflash_attention_bwd_tma_params;
using KernelParams = ParamsFor<Params, blockflash_attention_bwd_tma_terms_params>;
using Element = Config::Element;
using Traits = ElementTraits<Element>;

// Of first tiles, and of second ones.
constexpr int kD = Config::head_dim_qk, kDV = Config::head_dim_v, kStages = Config::stages,
              kSecondStages = Config::second_stages;
constexpr int kResidentRows = Config::resident_rows, kStreamRows = Config::stream_rows;
// Panels have 64 columns: rows of 128 bytes with the 128-byte swizzle.
constexpr int kPanels = (kD + 63) / 64, kVPanels = (kDV + 63) / 64;

// One consumer, of which two CTAs share an SM, or two with ping-pong barriers.
constexpr bool kAlone = Config::warpgroups == 1;
static_assert(Config::min_blocks == (kAlone ? 2 : 1),
              "registers are for this number of CTAs per SM");
constexpr int kProducerRegisters = kAlone ? 32 : 40, kConsumerRegisters = kAlone ? 224 : 232;

// Shared memory: the resident pair; the rings of first tiles (Q or K) and of second tiles (dO or
// V); what a kernel adds; and a page of row statistics, published tiles and mbarriers.
constexpr int kResidentPanel = kResidentRows * 128, kStreamPanel = kStreamRows * 128;
constexpr int kResidentBytes = kPanels * kResidentPanel, kStreamBytes = kPanels * kStreamPanel;
constexpr int kSecondResidentBytes = kVPanels * kResidentPanel,
              kSecondStreamBytes = kVPanels * kStreamPanel;
constexpr int kFirstOffset = kResidentBytes + kSecondResidentBytes,
              kSecondOffset = kFirstOffset + kStages * kStreamBytes,
              kRingEnd = kSecondOffset + kSecondStages * kSecondStreamBytes;
constexpr int kStatisticsRows = Config::dq ? kStreamRows : kStatisticsTile;
constexpr int kPageBytes = 2048;
constexpr int kStatisticsOffset = Config::smem_bytes - kPageBytes,
              kStatisticsBytes = kStatisticsRows * 4;
constexpr int kStatisticsEnd = kStatisticsOffset + (kStages + kSecondStages) * kStatisticsBytes;
// Statistics of 128 rows fill the page. What follows them is in static shared memory then, of
// which the alignment of the tiles takes 1024 bytes anyway.
constexpr bool kPageIsFull = kStatisticsEnd == Config::smem_bytes;
constexpr int kStaticBytes = 512;
constexpr int kTileOffset = kPageIsFull ? 0 : kStatisticsEnd;
constexpr int kBarrierOffset = kTileOffset + 16,
              kPageEnd = kBarrierOffset + 8 * (3 + 3 * (kStages + kSecondStages));
constexpr int kPageLimit = kPageIsFull ? kStaticBytes : Config::smem_bytes;
static_assert(kPageEnd <= kPageLimit && kStatisticsEnd <= Config::smem_bytes,
              "the page is too small");

// The address from which the offsets of published tiles and mbarriers count.
__device__ __forceinline__ uint32_t page_base(uint32_t smem) {
  if constexpr (kPageIsFull) {
    __shared__ __align__(16) unsigned char bytes[kStaticBytes];
    return static_cast<uint32_t>(__cvta_generic_to_shared(bytes));
  } else {
    return smem;
  }
}

// The mbarriers: the two resident tiles; of each ring, the arrival of a stage and its release by
// all consumer warps; and, in packed batches, the loads of tiles that have to be zero-filled before
// they are passed on, see `zero_fill_tiles`.
struct Barriers {
  uint32_t resident, first, second, first_empty, second_empty;
  uint32_t loaded_resident, loaded_first, loaded_second;

  __device__ __forceinline__ explicit Barriers(uint32_t smem)
      : resident(page_base(smem) + kBarrierOffset),
        first(resident + 16),
        second(first + 8 * kStages),
        first_empty(second + 8 * kSecondStages),
        second_empty(first_empty + 8 * kStages),
        loaded_resident(second_empty + 8 * kSecondStages),
        loaded_first(loaded_resident + 8),
        loaded_second(loaded_first + 8 * kStages) {}

  __device__ __forceinline__ void init() const {
    constexpr int kFull = kStages + kSecondStages;
    for (int i = 0; i < 2 + kFull; ++i) ptx::mbarrier_init(resident + 8 * i, 1);
    for (int i = 0; i < kFull; ++i) ptx::mbarrier_init(first_empty + 8 * i, 4 * Config::warpgroups);
    for (int i = 0; i < 1 + kFull; ++i) ptx::mbarrier_init(loaded_resident + 8 * i, 1);
    ptx::fence_mbarrier_init();
  }

  // Releases a stage of both rings, which all lanes of the warp have read.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    ptx::mbarrier_arrive(barrier_of(first_empty, stage));
    ptx::mbarrier_arrive(barrier_of(second_empty, stage));
  }
};

// The state in the ring of second tiles, by that in the ring of first ones. A ring of two first
// tiles may have one of second tiles beside it: the n-th pair has stage n % 2 of the former, which
// is also the phase of the latter.
constexpr bool kOneSecondStage = kStages == 2 && kSecondStages == 1;
__device__ __forceinline__ PipelineState<kSecondStages> second_state(
    const PipelineState<kStages>& first, bool producer = false) {
  if constexpr (kOneSecondStage)
    return {0, static_cast<uint32_t>(first.stage) ^ producer};
  else
    return {first.stage, first.phase};
}

// Where the statistics of a stage are that belong to its first or its second tile.
__device__ __forceinline__ uint32_t first_statistics(uint32_t smem, int stage) {
  return smem + kStatisticsOffset + stage * kStatisticsBytes;
}
__device__ __forceinline__ uint32_t second_statistics(uint32_t smem, int stage) {
  return first_statistics(smem, kStages + stage);
}

// Starts the TMA loads of all panels of a tile, in boxes of box_rows rows.
template <int rows, int box_rows, int panels = kPanels>
__device__ __forceinline__ void copy_tile(uint32_t dst, const blockflash_tensor_map& map, int row,
                                          int head, int batch, uint32_t barrier) {
#pragma unroll
  for (int panel = 0; panel < panels; ++panel)
#pragma unroll
    for (int at = 0; at < rows; at += box_rows)
      ptx::tensor_copy_4d(dst + panel * rows * 128 + at * 128, &map, panel * 64, row + at, head,
                          batch, barrier);
}

// The producer publishes the tile of a stage: its first row, or -1 when there are no more tiles.
__device__ __forceinline__ void publish_tile(uint32_t smem, int stage, int first_row) {
  ptx::store_shared(page_base(smem) + kTileOffset + 4 * stage, static_cast<uint32_t>(first_row));
}
__device__ __forceinline__ int published_row(uint32_t smem, int stage) {
  return static_cast<int>(ptx::load_shared(page_base(smem) + kTileOffset + 4 * stage));
}

// Waits until a tile has been loaded, zero-fills its rows from `end` on, and passes it on. By a
// whole warp.
template <int rows, int panels = kPanels>
__device__ __forceinline__ void zero_fill_tile(uint32_t loaded, uint32_t phase, uint32_t tile,
                                               int end, uint32_t passed) {
  const int lane = threadIdx.x % 32;
  ptx::mbarrier_wait(loaded, phase);
#pragma unroll 1
  for (int panel = 0; panel < panels; ++panel)
#pragma unroll 1
    for (int at = max(end, 0) * 128 + lane * 16; at < rows * 128; at += 32 * 16)
      ptx::store_shared_int4(tile + panel * rows * 128 + at, make_int4(0, 0, 0, 0));
  ptx::fence_proxy_async();
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(passed);
}

// A tile of a packed batch may reach into the next sequence. Where a product sums over its rows, a
// NaN there would spread, since 0·NaN is NaN. So one warp follows the producer in packed batches
// and zero-fills the rows behind the sequence: of the first resident tile, whose sequence ends
// `resident_end` rows after its first one, of all first tiles that pass and, if `both`, of all
// second ones, whose sequence has `length` rows.
template <bool both>
__device__ __forceinline__ void zero_fill_tiles(uint32_t smem, const Barriers& barriers,
                                                int resident_end, int length) {
  zero_fill_tile<kResidentRows>(barriers.loaded_resident, 0, smem, resident_end, barriers.resident);
  auto at = PipelineState<kStages>::consumer();
#pragma unroll 1
  while (true) {
    at.wait(barriers.loaded_first);
    const int first = published_row(smem, at.stage);
    if (first < 0) {
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(at.of(barriers.first));
      return;
    }
    const uint32_t tile = smem + kFirstOffset + at.stage * kStreamBytes;
    zero_fill_tile<kStreamRows>(at.of(barriers.loaded_first), at.phase, tile, length - first,
                                at.of(barriers.first));
    if constexpr (both) {
      const auto second = second_state(at);
      zero_fill_tile<kStreamRows, kVPanels>(
          second.of(barriers.loaded_second), second.phase,
          smem + kSecondOffset + second.stage * kSecondStreamBytes, length - first,
          second.of(barriers.second));
    }
    at.advance();
  }
}

// The ping-pong of consumers that start and end with their first products.
struct GradientPingPong : PingPong<Config::warpgroups> {
  // The second consumer waits before its first product; the first one lets it go a last time.
  __device__ __forceinline__ void open() const {
    if (warpgroup == 1) sync();
  }
  __device__ __forceinline__ void close() const {
    if (warpgroup == 0) arrive();
  }
};

// d[64, columns] = a·bᵀ over a head dimension: 64 rows of a and all rows of b, both K-major. With
// `in_place` it takes the registers in which d was before.
template <int columns, bool in_place = false, int depth = kD>
__device__ __forceinline__ void start_scores(float (&d)[columns / 2], uint32_t a, int a_panel,
                                             uint32_t b, int b_panel) {
  using Product = ptx::Wgmma<columns, Element>;
#pragma unroll
  for (int k = 0; k < (depth + 15) / 16; ++k) {
    const uint64_t a_step = ptx::wgmma_descriptor_of(a) + (k / 4 * a_panel >> 4) + k % 4 * 2,
                   b_step = ptx::wgmma_descriptor_of(b) + (k / 4 * b_panel >> 4) + k % 4 * 2;
    if (k == 0 && in_place)
      Product::ss_over(d, a_step, b_step);
    else if (k == 0)
      Product::template ss<false>(d, a_step, b_step);
    else
      Product::template ss<true>(d, a_step, b_step);
  }
  ptx::wgmma_commit_group();
}

// d[64, columns] += a·b: a in registers, with 16 · steps columns, and as many rows of b.
template <int steps, int half_columns>
__device__ __forceinline__ void start_gradient(float (&d)[half_columns], const uint32_t* a,
                                               uint32_t b) {
#pragma unroll
  for (int k = 0; k < steps; ++k)
    ptx::Wgmma<2 * half_columns, Element>::template rs<true, true>(
        d, a + 4 * k, ptx::wgmma_descriptor_of(b) + k * 128);
}

__device__ __forceinline__ void round(const float* x, uint32_t* words) {
  words[0] = Traits::pack(x[0], x[1]), words[1] = Traits::pack(x[2], x[3]);
}

// Keeps the scheduler from working at more of the scores at a time than there are registers for:
// they get to depend on words that are known earlier, by bits that are 0 in any launch.
__device__ __forceinline__ void delay(float* s, const uint32_t* words) {
  const uint32_t zero = (words[0] | words[1]) & (gridDim.y - 1);
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] = __uint_as_float(__float_as_uint(s[i]) | zero);
}

// Whether one of the queries whose logarithms are there is beyond `kFusedLimit`. By whole warps.
template <int queries>
__device__ __forceinline__ bool has_large(uint32_t logs) {
  bool found = false;
#pragma unroll
  for (int i = threadIdx.x % 32; i < queries; i += 32)
    found |= is_beyond_fused(__uint_as_float(ptx::load_shared(logs + 4 * i)));
  return __any_sync(~0u, found);
}

// Once the scores s and dp = dO·v of a lane are there, in this order: rounds the probabilities
// and the gradients of the scores, both operands of the next products. `logs(j, x)`
// and `deltas(j, x)` yield the statistics of s[4 j…]: of element i they are x[i / 2 % 2] where rows
// are queries, and x[i % 2] where columns are. `large`: a query may be beyond `kFusedLimit`.
// `read()` is called when dp is complete. A hidden pair has both 0 by selection, since 0·NaN would
// be NaN.
template <bool by_row, int n, class Logs, class Deltas, class Read>
__device__ __forceinline__ void differentiate_scores(float (&s)[n], float (&dp)[n],
                                                     uint32_t (&p16)[n / 2],
                                                     uint32_t (&ds16)[n / 2],
                                                     const blockflash_scores& scores, bool large,
                                                     const Visible& visible, const Logs& logs,
                                                     const Deltas& deltas, const Read& read) {
  const auto of = [](int i) { return by_row ? i / 2 % 2 : i % 2; };
  float negative_log[2], delta[2];
  // Both at once, so that no register holds the slope beside dp.
  const auto at_once = [&](auto pairs) {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(s), ptx::wgmma_pin(dp);
    read();
    visible.hide(s, -CUDART_INF_F);
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
      logs(j, negative_log), deltas(j, delta);
      if (kAlone && j >= 2) delay(s + 4 * j, ds16 + 2 * j - 4);
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i)
        differentiate<decltype(pairs)::value>(s[i], dp[i], scores, negative_log[of(i)],
                                              delta[of(i)], s[i] != -CUDART_INF_F);
      round(s + 4 * j, p16 + 2 * j), round(dp + 4 * j, ds16 + 2 * j);
    }
  };
  if (scores.softcap > 0.f) return at_once(PairsAre<Pairs::kCapped>{});
  if (large) return at_once(PairsAre<Pairs::kLarge>{});
  ptx::wgmma_wait_group<1>();
  ptx::wgmma_pin(s);
  visible.hide(s, -CUDART_INF_F);
#pragma unroll
  for (int j = 0; j < n / 4; ++j) {
    logs(j, negative_log);
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i)
      s[i] = ptx::ex2_approx(FusedExponent{}(s[i], scores.scale_log2, negative_log[of(i)]));
    round(s + 4 * j, p16 + 2 * j);
  }
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_pin(dp);
  read();
#pragma unroll
  for (int j = 0; j < n / 4; ++j) {
    deltas(j, delta);
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i) dp[i] = s[i] * (dp[i] - delta[of(i)]);
  }
  visible.hide(dp, 0.f);
#pragma unroll
  for (int j = 0; j < n / 4; ++j) round(dp + 4 * j, ds16 + 2 * j);
}

// The same where queries are columns and registers are scarce: p16 takes none before dp is
// complete, and hidden pairs are left to the caller, see `Visible::clear`. `meanwhile` is called
// while the scores are computed, when the first `early` logarithms have been asked for: shared
// memory answers late while products read it.
template <bool may_be_capped, int early, int n, class Logs, class Deltas, class Meanwhile>
__device__ __forceinline__ void differentiate_all(float (&s)[n], float (&dp)[n],
                                                  uint32_t (&p16)[n / 2], uint32_t (&ds16)[n / 2],
                                                  const blockflash_scores& scores, bool large,
                                                  const Logs& logs, const Deltas& deltas,
                                                  const Meanwhile& meanwhile) {
  float negative_log[2], delta[2], early_logs[early + 1][2];
#pragma unroll
  for (int j = 0; j < early; ++j) logs(j, early_logs[j]);
  meanwhile();
  const auto at_once = [&](auto pairs) {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(s), ptx::wgmma_pin(dp);
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
      logs(j, negative_log), deltas(j, delta);
      if (j >= 2) delay(s + 4 * j, ds16 + 2 * j - 4);
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i)
        differentiate<decltype(pairs)::value>(s[i], dp[i], scores, negative_log[i % 2],
                                              delta[i % 2], true);
      round(s + 4 * j, p16 + 2 * j), round(dp + 4 * j, ds16 + 2 * j);
    }
  };
  if constexpr (may_be_capped) {
    if (scores.softcap > 0.f) return at_once(PairsAre<Pairs::kCapped>{});
    if (large) return at_once(PairsAre<Pairs::kLarge>{});
  }
  ptx::wgmma_wait_group<1>();
  ptx::wgmma_pin(s);
  const auto exponentiate = [&](const auto& exponent) {
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
      if (j >= early) logs(j, negative_log);
      const float(&x)[2] = j < early ? early_logs[j] : negative_log;
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i)
        s[i] = ptx::ex2_approx(exponent(s[i], scores.scale_log2, x[i % 2]));
    }
  };
  // Without another path that waits for the products, one here would serialise all of them.
  if (!may_be_capped && large)
    exponentiate(ExponentOfLarge{});
  else
    exponentiate(FusedExponent{});
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_pin(dp);
#pragma unroll
  for (int j = 0; j < n / 4; ++j) {
    deltas(j, delta);
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i) dp[i] = s[i] * (dp[i] - delta[i % 2]);
    round(dp + 4 * j, ds16 + 2 * j), round(s + 4 * j, p16 + 2 * j);
  }
}

}  // namespace
}  // namespace blockflash
