// Attention backward: gradients beside a reference in f64. A program runs one of its kernels.
#pragma once

#include "attention.h"

namespace {

// The gradients of scores are differences of products of head_dim terms, and are rounded to the
// element type before they are multiplied, so their errors grow with the root of head_dim: a
// score's gradient of 40 is rounded by up to .08 in bf16. f16 has eight times finer steps.
const double kGradientTolerance = std::is_same_v<Element, __nv_bfloat16> && kD > 64
                                      ? 0.045 * sqrt(kD / 64.)
                                      : 0.03;

struct Gradients {
  std::vector<double> dq, dk, dv;
  std::vector<double> d_bias;  // [batch, heads, seqlen_q, seqlen_kv], without broadcast
};

// What a launch reads and writes.
struct Backward {
  const Data data;
  Expected forward_of;
  Tensor<Element> d_o;
  Gradients gradients;
  int padded;
  Tensor<float> negative_logs, deltas;
  blockflash_attention_bwd_params base = {};

  Backward(const Problem& problem, int number)
      : data(problem, number),
        forward_of(forward(data)),
        d_o(of(random_of(number), problem)),
        padded((problem.seqlen_q + 63) / 64 * 64),
        negative_logs(problem.batch * kHeads * padded),
        deltas(problem.batch * kHeads * padded) {
    const auto& [seqlen_q, seqlen_kv, qk, dv, left, right, peak, cap, has_sink, nonfinite, bias,
                 strides, has_alibi, block, batch, hostile] = problem;
    gradients = {std::vector<double>(batch * seqlen_q * kHeads * qk),
                 std::vector<double>(batch * seqlen_kv * qk),
                 std::vector<double>(batch * seqlen_kv * dv),
                 std::vector<double>(batch * kHeads * seqlen_q * seqlen_kv)};
    for (int b = 0; b < batch; ++b)
      for (int h = 0; h < kHeads; ++h)
        for (int i = 0; i < padded; ++i) {
          const int at = (b * kHeads + h) * padded + i;
          negative_logs.data[at] = -INFINITY, deltas.data[at] = 0;
          if (i < seqlen_q) row(b, h, i, at);
        }
    data.write(base.base);
    base.d_o = d_o.data;
    base.negative_logs = negative_logs.data, base.deltas = deltas.data;
    base.statistics_stride_batch = kHeads * padded, base.statistics_stride_head = padded;
    base.d_o_stride_batch = seqlen_q * kHeads * dv, base.d_o_stride_seq = kHeads * dv;
    base.d_o_stride_head = dv;
    base.dq_stride_batch = seqlen_q * kHeads * qk, base.dq_stride_seq = kHeads * qk;
    base.dq_stride_head = qk;
    base.dk_stride_batch = seqlen_kv * qk, base.dk_stride_seq = qk;
    base.dv_stride_batch = seqlen_kv * dv, base.dv_stride_seq = dv;
    if (block > 0) base.block_mask_t = data.lists_t.mask(data.blocks);
  }

  static std::mt19937 random_of(int number) { return std::mt19937(number + 1000); }
  static Tensor<Element> of(std::mt19937 random, const Problem& problem) {
    return Tensor<Element>(problem.batch * problem.seqlen_q * kHeads * problem.dv, random, 1);
  }

  // The statistics of a query, and what it adds to the gradients.
  void row(int b, int h, int i, int at) {
    const Problem& p = data.problem;
    const double lse = forward_of.lse[(b * kHeads + h) * p.seqlen_q + i];
    const int64_t o = ((b * p.seqlen_q + i) * kHeads + h) * p.dv,
                  q = ((b * p.seqlen_q + i) * kHeads + h) * p.qk;
    double delta = 0;
    for (int d = 0; d < p.dv; ++d) delta += d_o.at(o + d) * forward_of.o[o + d];
    if (lse != -INFINITY) {
      const float log = static_cast<float>(-lse) * blockflash::kLog2e;
      const bool large = blockflash::is_beyond_fused(log) && p.softcap == 0;
      negative_logs.data[at] = large ? -2 * static_cast<float>(lse) : log;
      deltas.data[at] = static_cast<float>(delta);
    }
    for (int j = 0; j < p.seqlen_kv; ++j) {
      if (!data.is_visible(i, j)) continue;
      const int64_t k = (b * p.seqlen_kv + j) * p.qk, v = (b * p.seqlen_kv + j) * p.dv;
      const double weight = exp(data.score(b, h, i, j) - lse);
      double dp = 0;
      for (int d = 0; d < p.dv; ++d) dp += d_o.at(o + d) * data.v.at(v + d);
      double ds = weight * (dp - delta);
      gradients.d_bias[((b * kHeads + h) * p.seqlen_q + i) * int64_t{p.seqlen_kv} + j] = ds;
      if (p.softcap > 0) {
        const double t = tanh(data.scaled(b, h, i, j) / p.softcap);
        ds *= 1 - t * t;
      }
      for (int d = 0; d < p.dv; ++d) gradients.dv[v + d] += weight * d_o.at(o + d);
      for (int d = 0; d < p.qk; ++d) {
        gradients.dq[q + d] += ds * data.k.at(k + d) * data.scale();
        gradients.dk[k + d] += ds * data.q.at(q + d) * data.scale();
      }
    }
  }

  void write(blockflash_attention_bwd_terms_params& params) const {
    params.bwd = base;
    data.write(params.terms);
    if (data.problem.block == 0) return;
    params.block_bits_t = data.lists_t.block_bits.data, params.bits_t = data.lists_t.bits.data;
    params.bit_tiles_t = static_cast<int32_t>(data.lists_t.bits.size / BLOCKFLASH_BIT_TILE_WORDS);
  }
  void write(blockflash_attention_bwd_params& params) const { params = base; }
};

// Problems of kernels without score terms.
const Problem kPlainProblems[] = {
    {70, 130, kD, kD, kAll, 0, 1, 0, false, false},
    {64, 201, kD, kD, kAll, 0, 30, 0, true, false},
    {9, 190, kD - 8, kD - 8, kAll, kAll, 8, 0, false, false},
    {40, 158, kD, kD - 24, 67, 5, 3, 20, true, false},
};

template <class Check>
void check_all(const Check& check) {
  std::mt19937 random(7);
  int number = 0;
  const auto all = [&](const auto& problems) {
    for (const Problem& problem : problems) check(problem, number++, random);
  };
  if constexpr (kHasTerms)
    all(kTermProblems);
  else
    all(kPlainProblems);
}

}  // namespace
