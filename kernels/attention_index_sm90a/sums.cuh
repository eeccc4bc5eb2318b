// What a consumer warpgroup does with the steps of a row group.
#pragma once

#include <math_constants.h>

#include "blockflash/attention/row_references.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/ptx/wgmma.cuh"
#include "visible.cuh"

namespace blockflash {
namespace {

using Traits = ElementTraits<Element>;
using ScoresProduct = ptx::Wgmma<kKeys, Element>;
using ValuesProduct = ptx::Wgmma<Config::head_dim, Element>;

// How far a score may exceed the reference of its row, in powers of two.
constexpr float kSlack = 8.f;

// Of the 16 rows of a warp, a lane holds rows g and g + 8 (g = lane / 4): key 8 j + 2 (lane % 4) +
// e of a step in s[4 j + 2 half + e], and the same of columns in o.
struct Sums {
  const Params& params;
  Shared& shared;
  const Barriers& barriers;
  const uint32_t smem;
  const int which;                         // the row group
  PhaseBits full = PhaseBits::consumer();  // of keys, and behind them of values

  float s[kKeys / 2];  // scores, then probabilities
  float o[Config::head_dim / 2];
  uint32_t p[kKeys / 4];  // probabilities in 16 bits
  float reference[2], denominator[2];
  Row rows[2];
  uint32_t pending_shown[2];  // keys that rows see of the step whose probabilities are in p,
  bool pending_masked;        // if it has a mask

  static constexpr int kValues = kKinds * kStages;  // bits of values in `full`

  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }
  static __device__ __forceinline__ int row_of(int half) {
    return threadIdx.x / kWarpSize % 4 * 16 + accumulator_row(lane(), 2 * half);
  }
  static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
  static __device__ __forceinline__ void release(uint32_t barriers, int stage) {
    if (lane() == 0) ptx::mbarrier_arrive(barrier_of(barriers, stage));
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < Config::head_dim / 2; ++i) o[i] = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) reference[half] = kNoReference, denominator[half] = 0.f;
  }

  // s = Q·Kᵀ. `at` is the number of the stage's "full" mbarrier.
  __device__ __forceinline__ void start_scores(int stage, int at) {
    full.wait(barriers.k_full, at);
    const uint64_t q = ptx::wgmma_descriptor(uniform(smem + which * kQBytes)),
                   k = ptx::wgmma_descriptor(uniform(smem + kKOffset + stage * kStageBytes));
    ptx::wgmma_pin(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kPanels * 4; ++d) {
      const uint64_t q_step = (d / 4 * kQPanelBytes + d % 4 * 32) >> 4,
                     k_step = (d / 4 * kPanelBytes + d % 4 * 32) >> 4;
      if (d == 0)
        ScoresProduct::template ss<false>(s, q + q_step, k + k_step);
      else
        ScoresProduct::template ss<true>(s, q + q_step, k + k_step);
    }
    ptx::wgmma_commit_group();
  }

  // Waits for the values of the pending step. Returns whether they hold NaN or infinity where some
  // row does not see a key.
  __device__ __forceinline__ bool await_values(int stage, int at) {
    full.peek(barriers.v_full - kBarrierBytes * kValues, kValues + at);
    // The scanner has released the stage before it was loaded, so its phase is this one's.
    if (pending_masked) full.peek(barriers.scanned - kBarrierBytes * kValues, kValues + at);
    full.bits ^= 1u << (kValues + at);
    return pending_masked && uniform(shared.nonfinite[stage]) != 0;
  }

  // o += P·V of the pending step. With `skip`, zeros are multiplied instead: a branch around the
  // product would serialise all WGMMAs.
  __device__ __forceinline__ void start_values(int stage, bool skip) {
    const uint64_t v = ptx::wgmma_descriptor_mn(
        uniform(smem + (skip ? kZerosOffset : kVOffset + stage * kStageBytes)),
        skip ? 0 : kPanelBytes, skip ? 0 : 1024);
    const int step = skip ? 0 : 16 * 128 >> 4;
    ptx::wgmma_pin(o), ptx::wgmma_pin(p);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      ValuesProduct::template rs<true, true>(o, p + 4 * k, v + k * step);
    ptx::wgmma_commit_group();
  }

  // An MMA spreads a NaN or infinity among values to every row, also to rows whose probability for
  // that key is 0. Such a product is computed here instead, over the keys that a row sees. This is
  // rare, so the code is small rather than fast.
  __device__ __forceinline__ void add_visible(int stage) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll 1
      for (int key = 0; key < kKeys; ++key) {
        float probability = 0.f;
#pragma unroll
        for (int i = half; i < kKeys / 4; i += 2)
          if (i / 2 == key / 8)
            probability = Traits::to_float(static_cast<uint16_t>(p[i] >> (key % 2 * 16)));
        const int owner = lane() / 4 * 4 + key % 8 / 2;
        probability = __shfl_sync(~0u, probability, owner);
        const uint32_t shown = __shfl_sync(~0u, pending_shown[half], owner);
        if (!(shown >> (key / 8 * 2 + key % 2) & 1)) continue;
        const uint32_t row = smem + kVOffset + stage * kStageBytes + key * 128 + lane() % 4 * 4;
#pragma unroll
        for (int d = 0; d < Config::head_dim / 8; ++d) {
          const uint32_t pair =
              ptx::load_shared(row + d / 8 * kPanelBytes + (d % 8 ^ key % 8) * 16);
#pragma unroll
          for (int i = 0; i < 2; ++i)
            o[4 * d + 2 * half + i] +=
                probability * Traits::to_float(static_cast<uint16_t>(pair >> (i * 16)));
        }
      }
    }
  }

  // Waits for the pending product and releases its values.
  __device__ __forceinline__ void finish_values(int stage, bool skip) {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(o), ptx::wgmma_pin(p);
    if (skip) add_visible(stage);
    release(barriers.v_empty, stage);
  }

  // What the mask of a step shows, before its keys are released.
  __device__ __forceinline__ void look_up(int stage, uint32_t (&shown)[2], bool& masked) const {
    const Step& step = shared.steps[stage];
    masked = uniform(step.is_masked[which]) != 0;
    if (!masked) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      shown[half] = shown_to(rows[half], step, which, params.index.lists.granularity_log2);
  }

  // From scores to exponentials. `rescale` is the factor for what was summed before.
  __device__ __forceinline__ void soften(const uint32_t (&shown)[2], bool masked,
                                         float (&rescale)[2]) {
    const blockflash_scores& scores = params.index.scaled.decode.scores;
    cap_scores(s, scores);
    if (masked) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i)
          if (!(shown[half] >> i & 1)) s[i / 2 * 4 + 2 * half + i % 2] = -CUDART_INF_F;
    }
    const float before[2] = {reference[0], reference[1]};
    float subtract[2];
    move_references(s, reference, subtract, kSlack, scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rescale[half] = ptx::ex2_approx(before[half] - reference[half]);
      float sum = 0.f;
#pragma unroll
      for (int i = 2 * half; i < kKeys / 2; i += 4)
#pragma unroll
        for (int e = i; e < i + 2; ++e) {
          s[e] = ptx::ex2_approx(fmaf(s[e], scores.scale_log2, -subtract[half]));
          sum += s[e];
        }
      denominator[half] = fmaf(denominator[half], rescale[half], sum);
    }
  }

  __device__ __forceinline__ void round() {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) p[i] = Traits::pack(s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void rescale_output(const float (&rescale)[2]) {
    if (!__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < Config::head_dim / 2; ++i) o[i] *= rescale[i / 2 % 2];
  }

  // All steps of the row group. `before` counts the steps of earlier tiles.
  __device__ __forceinline__ void run(const StepOrder& order, int before) {
    const int steps = order.steps_of(which);
    const auto find = [&](int step, int& stage, int& at) {
      const int position = order.position_of(which, step);
      const bool is_for_both = step >= steps - order.both;
      stage = uniform((before + position) % kStages);
      at = (is_for_both ? kBothKind : which) * kStages + stage;
    };
    const auto release_queries = [&] { release(barriers.q_empty, which); };
    if (steps == 0) {
      release_queries();
      return;
    }
    int stage, at;
    find(0, stage, at);
    start_scores(stage, at);
    look_up(stage, pending_shown, pending_masked);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(s);
    release(barriers.k_empty, stage);
    if (steps == 1) release_queries();
    float rescale[2];
    soften(pending_shown, pending_masked, rescale);
    round();
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      const int v_stage = stage, v_at = at;
      find(step, stage, at);
      start_scores(stage, at);
      const bool skip = await_values(v_stage, v_at);
      start_values(v_stage, skip);
      uint32_t shown[2] = {0, 0};
      bool masked;
      look_up(stage, shown, masked);
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_pin(s);
      release(barriers.k_empty, stage);
      if (step == steps - 1) release_queries();
      soften(shown, masked, rescale);
      finish_values(v_stage, skip);
      rescale_output(rescale);
      round();
      pending_shown[0] = shown[0], pending_shown[1] = shown[1], pending_masked = masked;
    }
    const bool skip = await_values(stage, at);
    start_values(stage, skip);
    finish_values(stage, skip);
  }
};

}  // namespace
}  // namespace blockflash
