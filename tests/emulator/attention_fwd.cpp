// Attention forward: a few problems beside a reference in f64.
#include "problem.h"

namespace {

using blockflash::Config;
using blockflash::Element;
constexpr int kHeads = 2;  // of queries; they share the keys of one

blockflash_attention_fwd_params params;

struct Problem {
  int seqlen_q, seqlen_kv;
  int qk, dv;       // columns of q and k, and of v and o
  int left, right;  // sides of the window, from the last query and the last key on
  float peak;       // factor of the queries: peaked rows move the reference of the softmax
  float softcap;
  bool sink, nonfinite;
};

constexpr int kAll = BLOCKFLASH_WINDOW_UNBOUNDED;
constexpr int kQ = Config::block_q, kKv = Config::block_kv, kD = Config::head_dim;
// Values that are not finite have keys of some weight: 0·infinity would be NaN.
const Problem kProblems[] = {
    {kQ + 6, 2 * kKv + 2, kD, kD, kAll, 0, 1, 0, false, false},
    {kQ, 3 * kKv + 9, kD, kD, kAll, 0, 30, 0, true, false},
    {9, 3 * kKv - 9, kD - 8, kD - 8, kAll, kAll, 8, 0, false, false},
    {9, 3 * kKv - 9, kD - 8, kD - 8, kAll, kAll, 1, 0, false, true},
    {40, 2 * kKv + 30, kD, kD, kKv + 3, 5, 3, 20, true, true},
    {40, 2 * kKv + 30, kD, kD - 24, kKv + 3, 5, 3, 20, true, true},
    {kQ + 6, kKv + 9, kD - 24, kD, kAll, 0, 1, 0, false, false},
};

struct Expected {
  std::vector<double> o, lse;
};

Expected reference(const Problem& problem, const Tensor<Element>& q, const Tensor<Element>& k,
                   const Tensor<Element>& v, const float* sink) {
  const auto [seqlen_q, seqlen_kv, qk, dv, left, right, peak, cap, has_sink, nonfinite] = problem;
  Expected expected{{}, std::vector<double>(kHeads * seqlen_q)};
  for (int row = 0; row < seqlen_q * kHeads; ++row) {
    const int64_t diagonal = row / kHeads + seqlen_kv - seqlen_q;
    std::vector<double> scores(seqlen_kv, -INFINITY), o(dv);
    double largest = sink ? sink[row % kHeads] : -INFINITY;
    for (int64_t key = 0; key < seqlen_kv; ++key) {
      if (key < diagonal - left || key > diagonal + right) continue;
      double score = 0;
      for (int d = 0; d < qk; ++d) score += q.at(row * qk + d) * k.at(key * qk + d);
      score *= params.scores.scale;
      scores[key] = cap > 0 ? cap * tanh(score / cap) : score;
      largest = std::max(largest, scores[key]);
    }
    double sum = sink ? exp(sink[row % kHeads] - largest) : 0;
    for (int key = 0; key < seqlen_kv; ++key) {
      if (scores[key] == -INFINITY) continue;
      const double weight = exp(scores[key] - largest);
      sum += weight;
      for (int d = 0; d < dv; ++d) o[d] += weight * v.at(key * dv + d);
    }
    for (double x : o) expected.o.push_back(sum == 0 ? 0 : x / sum);
    expected.lse[row % kHeads * seqlen_q + row / kHeads] =
        sum == 0 ? -INFINITY : largest + log(sum);
  }
  return expected;
}

void check(const Problem& problem, int number, std::mt19937& schedules) {
  // Of its own, so that the data do not depend on how often threads of a kernel meet.
  std::mt19937 random(number);
  const int rows = problem.seqlen_q * kHeads, qk = problem.qk, dv = problem.dv;
  const Tensor<Element> q(rows * qk, random, problem.peak);
  const Tensor<Element> k(problem.seqlen_kv * qk, random, 1);
  const Tensor<Element> v(problem.seqlen_kv * dv, random, 1);
  const Tensor<float> sink(kHeads, random, 2);
  if (problem.nonfinite) {
    v.data[(problem.seqlen_kv - 2) * dv + 5] = Element(INFINITY);
    v.data[(problem.seqlen_kv - 40) * dv + 7] = Element(-INFINITY);
    v.data[problem.seqlen_kv / 2 * dv + 9] = Element(NAN);
  }
  params = {};
  params.q = q.data, params.k = k.data, params.v = v.data;
  params.q_stride_seq = kHeads * qk, params.o_stride_seq = kHeads * dv;
  params.q_stride_head = qk, params.o_stride_head = dv;
  params.k_stride_seq = qk, params.v_stride_seq = dv;
  params.lse_stride_head = problem.seqlen_q;
  params.batch = params.num_heads_kv = 1, params.num_heads_q = kHeads;
  params.seqlen_q = problem.seqlen_q, params.seqlen_kv = problem.seqlen_kv;
  params.head_dim_qk = qk, params.head_dim_v = dv;
  blockflash_scores& scores = params.scores;
  scores.sink = problem.sink ? sink.data : nullptr;
  scores.scale = 1 / sqrtf(qk), scores.softcap = problem.softcap;
  const bool capped = problem.softcap > 0;
  scores.scale_log2 = blockflash::kLog2e * (capped ? 1 : scores.scale);
  scores.inverse_scale_log2 = 1 / scores.scale_log2;
  scores.scale_over_cap = capped ? scores.scale / scores.softcap : 0;
  scores.window = {problem.left, problem.right, 1};
  const Expected expected = reference(problem, q, k, v, scores.sink);
  const unsigned ctas = kHeads * ((problem.seqlen_q + kQ - 1) / kQ);
  in_every_schedule(schedules, [&](Run& run) {
    const Tensor<Element> o(rows * dv, random, NAN);
    const Tensor<float> lse(rows, random, NAN);
    params.o = o.data, params.lse = lse.data;
    run.launch(ctas, [] { VARIANT_SYMBOL(params); });
    run.compare(number, "o", o, expected.o, 0.02);
    run.compare(number, "lse", lse, expected.lse, 0.01);
  });
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int number = 0;
  for (const Problem& problem : kProblems) check(problem, number++, random);
}
