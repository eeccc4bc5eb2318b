// Gradients of attention by lists from lists that are transposed by definition: dk and dv of bins
// of one item, parts of others, and parts of dq.
#include "index_lists.h"

namespace {

using blockflash::Config;
using blockflash::Element;

constexpr int kD = Config::head_dim;
constexpr double kTolerance = std::is_same_v<Element, __nv_bfloat16> ? 0.05 : 0.03;
blockflash_attention_index_bwd_params params;

struct Operands {
  const Lists lists;
  const int heads_q, heads_kv, qk, dv, padded;
  std::mt19937 random;
  const Tensor<Element> q, k, v, d_o;
  const Tensor<float> negative_logs, deltas;
  // By item: key head, item, dk and dv, keys of the bin, columns. By visit: key head, visit, head.
  std::vector<double> of_items, of_visits;
  std::vector<Transpose> transposes;

  Operands(const Problem& p, int number)
      : lists(p, number),
        heads_q(p.heads_q),
        heads_kv(p.heads_kv),
        qk(number % 2 ? kD : kD - 8),
        dv(number % 3 ? kD : kD - 24),
        padded(p.packed ? (lists.total_q / 64 + p.batch) * 64 : (p.seqlen_q + 63) / 64 * 64),
        random(number),
        q(lists.total_q * heads_q * qk, random, 1),
        k(lists.total_kv * heads_kv * qk, random, 1),
        v(lists.total_kv * heads_kv * dv, random, 1),
        d_o(lists.total_q * heads_q * dv, random, 0.3f),
        negative_logs((p.packed ? 1 : p.batch) * heads_q * padded),
        deltas(negative_logs.size) {
    for (size_t i = 0; i < deltas.size; ++i) negative_logs.data[i] = -6, deltas.data[i] = 0.5f;
    for (int set = 0; set < lists.sets; ++set) transposes.emplace_back(lists, set);
    of_items.resize(heads_kv * items() * item_size());
    of_visits.resize(heads_kv * int64_t{lists.entries} * lists.group * qk);
    for (int head = 0; head < heads_kv; ++head) add(head);
  }

  int width() const { return 1 << lists.width_log2; }
  int items() const { return lists.bins + lists.entries / lists.problem.item_visits; }
  int64_t item_size() const { return int64_t{2} * width() * kD; }
  float scale() const { return 1 / sqrtf(kD); }

  void add(int head) {
    const Problem& p = lists.problem;
    const int set = head / (heads_kv / lists.sets);
    const Transpose& transpose = transposes[set];
    lists.each_visit(set, [&](int entry, int v_of_set, int query, int b, int from, int to) {
      const int visit = transpose.places[entry], bin = lists.bin_of(b, from);
      int item = 0;
      while (transpose.items[item].begin + transpose.items[item].visits <= visit) ++item;
      for (int j = 0; j < lists.group; ++j) {
        const int head_q = head * (heads_q / heads_kv) + v_of_set / lists.queries * lists.group + j;
        for (int key = from; key < to; ++key) {
          const int64_t row = lists.of_kv[b] + key, of_q = int64_t{query} * heads_q + head_q;
          double s = 0, dp = 0, slope = 1;
          for (int d = 0; d < qk; ++d)
            s += q.at(of_q * qk + d) * k.at((row * heads_kv + head) * qk + d);
          for (int d = 0; d < dv; ++d)
            dp += d_o.at(of_q * dv + d) * v.at((row * heads_kv + head) * dv + d);
          s *= scale();
          if (p.softcap > 0) {
            const double t = tanh(s / p.softcap);
            s = p.softcap * t, slope = 1 - t * t;
          }
          const double weight = exp2(s * blockflash::kLog2e - 6), ds = weight * (dp - 0.5) * slope;
          double* const sums =
              &of_items[(head * int64_t{items()} + item) * item_size()] +
              (key - ((bin - lists.first_bin(b)) << lists.width_log2)) * int64_t{kD};
          for (int d = 0; d < qk; ++d) {
            sums[d] += ds * q.at(of_q * qk + d);
            of_visits[((head * int64_t{lists.entries} + visit) * lists.group + j) * qk + d] +=
                ds * k.at((row * heads_kv + head) * qk + d);
          }
          for (int d = 0; d < dv; ++d) sums[width() * kD + d] += weight * d_o.at(of_q * dv + d);
        }
      }
    });
  }

  void write() const {
    const Problem& p = lists.problem;
    lists.write(params);
    blockflash_attention_bwd_params& bwd = params.bwd;
    blockflash_attention_fwd_params& fwd = bwd.base;
    fwd.q = q.data, fwd.k = k.data, fwd.v = v.data, bwd.d_o = d_o.data;
    fwd.head_dim_qk = qk, fwd.head_dim_v = dv;
    const auto strides = [](int64_t& batch, int64_t& seq, int64_t& head, int rows, int heads,
                            int columns) {
      batch = int64_t{rows} * heads * columns, seq = heads * columns, head = columns;
    };
    strides(fwd.q_stride_batch, fwd.q_stride_seq, fwd.q_stride_head, p.seqlen_q, heads_q, qk);
    strides(fwd.k_stride_batch, fwd.k_stride_seq, fwd.k_stride_head, p.seqlen_kv, heads_kv, qk);
    strides(fwd.v_stride_batch, fwd.v_stride_seq, fwd.v_stride_head, p.seqlen_kv, heads_kv, dv);
    strides(bwd.d_o_stride_batch, bwd.d_o_stride_seq, bwd.d_o_stride_head, p.seqlen_q, heads_q, dv);
    strides(bwd.dk_stride_batch, bwd.dk_stride_seq, bwd.dk_stride_head, p.seqlen_kv, heads_kv, qk);
    strides(bwd.dv_stride_batch, bwd.dv_stride_seq, bwd.dv_stride_head, p.seqlen_kv, heads_kv, dv);
    bwd.negative_logs = negative_logs.data, bwd.deltas = deltas.data;
    bwd.statistics_stride_head = padded, bwd.statistics_stride_batch = int64_t{heads_q} * padded;
    blockflash_scores& scores = fwd.scores;
    scores.scale = scale(), scores.softcap = p.softcap;
    scores.scale_log2 = blockflash::kLog2e * (p.softcap > 0 ? 1 : scores.scale);
    scores.scale_over_cap = p.softcap > 0 ? scores.scale / p.softcap : 0;
    params.block_kv = Config::block_kv, params.tile_head_dim = kD;
    params.dq_columns = Config::warps_d;
  }
};

void check(const Problem& problem, int number, std::mt19937& schedules) {
  const Operands operands(problem, number);
  const Lists& lists = operands.lists;
  const int heads_kv = problem.heads_kv, qk = operands.qk, dv = operands.dv;
  const int width = operands.width(), tiles = width / Config::block_kv,
            max_items = operands.items();
  const int64_t rows = int64_t{lists.entries} * lists.group;
  const Tensor<blockflash_index_item> items(lists.sets * max_items);
  const Tensor<uint32_t> visits(lists.sets * lists.entries);
  for (int set = 0; set < lists.sets; ++set) {
    const Transpose& transpose = operands.transposes[set];
    std::fill_n(items.data + set * max_items, max_items, blockflash_index_item{-1, 0, 0, -1});
    std::copy(transpose.items.begin(), transpose.items.end(), items.data + set * max_items);
    std::copy(transpose.visits.begin(), transpose.visits.end(), visits.data + set * lists.entries);
  }
  in_every_schedule(schedules, [&](Run& run) {
    operands.write();
    const Tensor<Element> dk(lists.total_kv * heads_kv * qk, schedules, NAN);
    const Tensor<Element> d_v(lists.total_kv * heads_kv * dv, schedules, NAN);
    const Tensor<float> key_parts(heads_kv * params.max_parts * operands.item_size());
    const Tensor<uint16_t> dq_parts(heads_kv * tiles * rows * qk);
    const Tensor<float> factors(heads_kv * tiles * rows * Config::warps_d);
    params.items = items.data, params.visits = visits.data;
    params.bwd.dk = dk.data, params.bwd.dv = d_v.data, params.key_parts = key_parts.data;
    params.dq_parts = dq_parts.data, params.dq_factors = factors.data;
    run.launch(heads_kv * max_items * tiles, [] { VARIANT_SYMBOL(params); });
    if (problem.hostile) return;

    std::vector<double> of_dq, expected_dq, of_keys, expected_keys;
    for (int head = 0; head < heads_kv; ++head) {
      const Transpose& transpose = operands.transposes[head / (heads_kv / lists.sets)];
      for (int64_t row = 0; row < int64_t(transpose.visits.size()) * lists.group; ++row)
        for (int d = 0; d < qk; ++d) {
          double sum = 0;
          for (int tile = 0; tile < tiles; ++tile) {
            const int64_t at = (int64_t{head} * tiles + tile) * rows + row;
            sum += blockflash::ElementTraits<__half>::to_float(dq_parts.data[at * qk + d]) *
                   factors.data[at * Config::warps_d + d / (kD / Config::warps_d)];
          }
          of_dq.push_back(sum);
          expected_dq.push_back(operands.of_visits[(head * rows + row) * qk + d]);
        }
      for (size_t i = 0; i < transpose.items.size(); ++i) {
        const blockflash_index_item& item = transpose.items[i];
        int b = problem.batch - 1;
        while (item.bin < lists.first_bin(b)) --b;
        const int first = (item.bin - lists.first_bin(b)) << lists.width_log2;
        const double* const expected =
            &operands.of_items[(head * int64_t{max_items} + i) * operands.item_size()];
        for (int key = 0; key < min(width, lists.of_kv[b + 1] - lists.of_kv[b] - first); ++key)
          for (int which = 0; which < 2; ++which)
            for (int d = 0; d < (which ? dv : qk); ++d) {
              const double factor = which || item.part >= 0 ? 1 : operands.scale();
              expected_keys.push_back(expected[(which * width + key) * kD + d] * factor);
              const int64_t row = (lists.of_kv[b] + first + key) * int64_t{heads_kv} + head;
              const int64_t tile =
                  (int64_t{head} * params.max_parts + item.part) * tiles + key / Config::block_kv;
              of_keys.push_back(
                  item.part >= 0
                      ? key_parts.at(
                            ((tile * 2 + which) * Config::block_kv + key % Config::block_kv) * kD +
                            d)
                  : which ? d_v.at(row * dv + d)
                          : dk.at(row * qk + d));
            }
      }
    }
    const auto compare = [&](const char* name, const std::vector<double>& got,
                             const std::vector<double>& expected) {
      const Tensor<double> shown(got.size());
      std::copy(got.begin(), got.end(), shown.data);
      run.compare(number, name, shown, expected, kTolerance);
    };
    compare("dq", of_dq, expected_dq);
    compare("dk, dv", of_keys, expected_keys);
  });
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int number = 0;
  for (const Problem& problem : kProblems) check(problem, number++, random);
}
