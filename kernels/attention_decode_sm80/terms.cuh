// Score terms of the steps of a warp: bias, ALiBi, and the mask of the last keys. Kernels without
// them have the same calls, which do nothing.
#pragma once

#include "blockflash/attention/terms.cuh"
#include "blockflash/config/attention_terms.cuh"
#include "blockflash/decode/tail_mask.cuh"
#include "blockflash/params/kv_cache_terms.h"
#include "blockflash/ptx/opaque.cuh"
#include "blockflash/ptx/readonly_if.cuh"
#include "output.cuh"

namespace blockflash {
namespace {

// blockflash_attention_decode_terms_params as what kernels without terms take and more, so that one
// text serves both.
struct TermsParams : blockflash_attention_decode_params {
  blockflash_score_terms terms;
  blockflash_tail_mask tail_mask;
};
static_assert(sizeof(TermsParams) == sizeof(blockflash_attention_decode_terms_params),
              "the base comes first, and the others follow in the same order");
static_assert(!(kHasCodes && kHasTerms), "caches of codes have no kernels with terms");
static_assert(!(kHasIndex && kHasTerms), "lists have no kernels with terms");
using ParamsWithoutIndex =
    std::conditional_t<kHasCodes, ScaledParams,
                       ParamsFor<blockflash_attention_decode_params, TermsParams>>;
using Params = std::conditional_t<kHasIndex, IndexParams, ParamsWithoutIndex>;

template <bool has_terms>
struct StepTerms {
  __device__ __forceinline__ StepTerms(const Params&, Shared&) {}
  __device__ __forceinline__ void begin_item(const DecodeItem&) const {}
  __device__ __forceinline__ void load(const DecodeItem&, int, int) const {}
  __device__ __forceinline__ void add(float (&)[kRowTiles][4], const DecodeItem&, int, int) const {}
  __device__ __forceinline__ bool may_hide(const DecodeItem&, int) const { return false; }
  static __device__ __forceinline__ uint32_t rows_that_see(const DecodeItem&, int, int) {
    return ~0u;
  }
};

// What a row of a tile has of its own. In shared memory, since registers are short.
struct alignas(16) TermsRow {
  const char* bias;  // of key 0; null if there is none, or if the row does not exist
  float slope;
  int diagonal;  // the key that ALiBi does not change
};

template <>
struct StepTerms<true> {
  static_assert(Config::rows <= Config::threads, "a thread prepares a row");

  const TermsParams& p;
  TermsRow* rows;
  uint32_t bias[2][kRowTiles][2];  // of the step, as loaded: half, row tile, row

  // The rows are behind what warps tell one another.
  __device__ __forceinline__ StepTerms(const TermsParams& params, Shared& shared)
      : p(params), rows(reinterpret_cast<TermsRow*>(&shared + 1)) {
    static_assert(!kHasTerms || sizeof(Shared) % alignof(TermsRow) == 0 &&
                                    sizeof(Shared) + Config::rows * sizeof(TermsRow) <= 1024,
                  "manifest and kernel disagree on smem");
  }

  __device__ __forceinline__ bool is_wide() const {
    return p.terms.bias_type == BLOCKFLASH_DTYPE_F32;
  }

  // By all threads before they meet: no warp has steps of an earlier item left.
  __device__ __forceinline__ void begin_item(const DecodeItem& item) const {
    if (threadIdx.x >= Config::rows) return;
    const blockflash_score_terms& terms = p.terms;
    const int row = item.row_tile * Config::rows + threadIdx.x;
    const int query = small_quotient(row, p.group);
    const int head = item.head_kv * p.group + row - query * p.group;
    const bool exists = query < item.q_length;
    TermsRow of_row = {nullptr, 0.f, query + item.kv_length - item.q_length};
    if (exists && terms.bias != nullptr)
      of_row.bias = static_cast<const char*>(terms.bias) +
                    (item.sequence * terms.bias_stride_batch + head * terms.bias_stride_head +
                     query * terms.bias_stride_q) *
                        (is_wide() ? 4 : 2);
    if (exists && terms.alibi != nullptr)
      of_row.slope =
          terms.alibi[item.sequence * terms.alibi_stride_batch + head * terms.alibi_stride_head];
    rows[threadIdx.x] = of_row;
  }

  // Row 8·n + 2·(lane % 4) + e.
  __device__ __forceinline__ const TermsRow& row(int n, int e, int lane) const {
    return rows[n * 8 + lane % 4 * 2 + e];
  }

  // Starts to load the biases of a step, before its keys are waited for.
  __device__ __forceinline__ void load(const DecodeItem& item, int first_key, int lane) {
    if (p.terms.bias == nullptr) return;
    lane = ptx::opaque(lane);  // nothing that follows from it stays in registers
    const bool wide = is_wide();
    const int64_t stride = p.terms.bias_stride_kv * (wide ? 4 : 2);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const char* const of_row = row(n, e, lane).bias;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = first_key + lane / 4 + half * 8;
          const bool exists = of_row != nullptr && key < item.kv_length;
          bias[half][n][e] = ptx::load_early_4_or_2_bytes_if(of_row + key * stride, exists && wide,
                                                             exists && !wide);
        }
      }
  }

  // Scores are capped, and scaled here first if something is added to them.
  __device__ __forceinline__ void add(float (&s)[kRowTiles][4], const DecodeItem& item,
                                      int first_key, int lane) const {
    const blockflash_score_terms& terms = p.terms;
    if (!adds(terms)) return;
    lane = ptx::opaque(lane);
    float factor = factor_before_terms(p.scores);
    if (terms.bias != nullptr) {
      const bool is_half = terms.bias_type == BLOCKFLASH_DTYPE_F16;
      // The bits of bf16 are the upper ones of f32.
      const int shift = terms.bias_type == BLOCKFLASH_DTYPE_BF16 ? 16 : 0;
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t bits = bias[i / 2][n][i % 2];
          const float value = is_half ? ElementTraits<__half>::to_float(static_cast<uint16_t>(bits))
                                      : __uint_as_float(bits << shift);
          s[n][i] = fmaf(s[n][i], factor, value);
        }
      factor = 1.f;
    }
    if (terms.alibi == nullptr) return;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const TermsRow& of_row = row(n, e, lane);
        const float distance = static_cast<float>(of_row.diagonal - first_key - lane / 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = s[n][2 * half + e];
          x = fmaf(-of_row.slope, fabsf(distance - static_cast<float>(8 * half)), x * factor);
        }
      }
  }

  // Whether the mask of the last keys has entries for a step.
  __device__ __forceinline__ bool may_hide(const DecodeItem& item, int first_key) const {
    const blockflash_tail_mask& mask = p.tail_mask;
    return mask.visible != nullptr && first_key + kStepKeys > item.kv_length - mask.tail;
  }

  // Bits of rows as those of WarpSums::rows_that_see, where the mask of the last keys leaves the
  // key as it is.
  __device__ __forceinline__ uint32_t rows_that_see(const DecodeItem& item, int key,
                                                    int lane) const {
    if (p.tail_mask.visible == nullptr) return ~0u;
    lane = ptx::opaque(lane);
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int row = item.row_tile * Config::rows + i / 2 * 8 + lane % 4 * 2 + i % 2;
      const TailRow tail = TailRow::of(p.tail_mask, item, small_quotient(row, p.group));
      bits |= static_cast<uint32_t>(tail.shows(key)) << i;
    }
    return bits;
  }
};
using Terms = StepTerms<kHasTerms>;

}  // namespace
}  // namespace blockflash
