// Sums of the parts of the gradients of attention by lists.
#include "index_lists.h"

namespace {

using blockflash::Config;
using blockflash::Element;

constexpr int kD = 64, kKeys = 32, kColumns = 2;  // of the kernel whose parts they are
constexpr double kTolerance = std::is_same_v<Element, __nv_bfloat16> ? 0.02 : 0.01;
blockflash_attention_index_bwd_params params;

void check(const Problem& problem, int number, bool first_pass, bool last_pass,
           std::mt19937& schedules) {
  const Lists lists(problem, number);
  const int heads_q = problem.heads_q, heads_kv = problem.heads_kv, qk = kD - 8, dv = kD;
  const int width = 1 << lists.width_log2, tiles = width / kKeys;
  const int64_t rows = int64_t{lists.entries} * lists.group, of_bin = int64_t{2} * width * kD;
  const float scale = 0.25f;
  lists.write(params);
  std::mt19937 random(number);
  std::vector<Transpose> transposes;
  const Tensor<int32_t> lengths(lists.sets * lists.bins), first_part(lengths.size);
  const Tensor<int32_t> places(lists.sets * lists.entries);
  for (int set = 0; set < lists.sets; ++set) {
    const Transpose& of = transposes.emplace_back(lists, set);
    std::copy(of.lengths.begin(), of.lengths.end(), lengths.data + set * lists.bins);
    std::copy(of.first_part.begin(), of.first_part.end(), first_part.data + set * lists.bins);
    std::copy(of.places.begin(), of.places.end(), places.data + set * lists.entries);
  }
  const Tensor<float> key_parts(heads_kv * params.max_parts * of_bin, random, 1);
  const Tensor<float> earlier(heads_kv * lists.bins * of_bin, random, 1);
  const Tensor<__half> dq_parts(heads_kv * tiles * rows * qk, random, 1);
  const Tensor<float> factors(heads_kv * tiles * rows * kColumns);
  for (size_t i = 0; i < factors.size; ++i) factors.data[i] = 1 << random() % 3;

  // dk and dv start as NaN, and those of bins of one item stay so.
  std::vector<double> expected_dq(lists.total_q * heads_q * qk, NAN);
  std::vector<double> expected_dk(lists.total_kv * heads_kv * qk, NAN);
  std::vector<double> expected_dv(lists.total_kv * heads_kv * dv, NAN);
  std::vector<double> expected_sums;
  for (size_t i = 0; i < earlier.size; ++i) expected_sums.push_back(earlier.at(i));
  for (int query = lists.first_query; query < lists.first_query + lists.queries; ++query)
    for (int head = 0; head < heads_q; ++head) {
      const int of_kv = heads_q / heads_kv, head_kv = head / of_kv;
      const int set = head_kv / (heads_kv / lists.sets);
      const int v = head % of_kv / lists.group * lists.queries + query - lists.first_query;
      for (int d = 0; d < qk; ++d) {
        double sum = 0;
        for (int i = 0; i < problem.capacity; ++i)
          for (int tile = 0; tile < tiles; ++tile) {
            const int64_t place = transposes[set].places[v * problem.capacity + i];
            if (place < 0) continue;
            const int64_t row = (int64_t{head_kv} * tiles + tile) * rows + place * lists.group +
                                head % of_kv % lists.group;
            sum += dq_parts.at(row * qk + d) * factors.at(row * kColumns + d / (kD / kColumns));
          }
        expected_dq[(int64_t{query} * heads_q + head) * qk + d] = sum * scale;
      }
    }
  for (int head = 0; head < heads_kv; ++head)
    for (int b = 0; b < problem.batch; ++b)
      for (int key = 0;
           key < tiles * kKeys * ((lists.of_kv[b + 1] - lists.of_kv[b] + width - 1) / width);
           ++key) {
        const int set = head / (heads_kv / lists.sets), bin = lists.bin_of(b, key);
        const int items =
            (transposes[set].lengths[bin] + problem.item_visits - 1) / problem.item_visits;
        if (items == 1) continue;
        const int of = key % width;
        for (int which = 0; which < 2; ++which)
          for (int d = 0; d < kD; ++d) {
            const int64_t at = ((of / kKeys * 2 + which) * int64_t{kKeys} + of % kKeys) * kD + d;
            const int64_t in_sums = (int64_t{head} * lists.bins + bin) * of_bin + at;
            double sum = first_pass ? 0 : earlier.at(in_sums);
            for (int item = 0; item < items; ++item)
              sum += key_parts.at(
                  (int64_t{head} * params.max_parts + transposes[set].first_part[bin] + item) *
                      of_bin +
                  at);
            const int64_t row = (lists.of_kv[b] + key) * int64_t{heads_kv} + head;
            if (!last_pass) {
              expected_sums[in_sums] = sum;
            } else if (key < lists.of_kv[b + 1] - lists.of_kv[b] && d < (which ? dv : qk)) {
              (which ? expected_dv : expected_dk)[row * (which ? dv : qk) + d] =
                  sum * (which ? 1 : scale);
            }
          }
      }

  in_every_schedule(schedules, [&](Run& run) {
    const Tensor<Element> dq(expected_dq.size(), schedules, NAN);
    const Tensor<Element> dk(expected_dk.size(), schedules, NAN);
    const Tensor<Element> d_v(expected_dv.size(), schedules, NAN);
    const Tensor<float> sums(earlier.size);
    std::copy_n(earlier.data, earlier.size, sums.data);
    lists.write(params);
    blockflash_attention_bwd_params& bwd = params.bwd;
    params.lengths = lengths.data, params.first_part = first_part.data;
    params.places = places.data, params.key_parts = key_parts.data, params.key_sums = sums.data;
    params.dq_parts = reinterpret_cast<uint16_t*>(dq_parts.data), params.dq_factors = factors.data;
    params.first_pass = first_pass, params.last_pass = last_pass;
    params.block_kv = kKeys, params.tile_head_dim = kD, params.dq_columns = kColumns;
    bwd.base.head_dim_qk = qk, bwd.base.head_dim_v = dv, bwd.base.scores.scale = scale;
    bwd.dq = dq.data, bwd.dk = dk.data, bwd.dv = d_v.data;
    bwd.dq_stride_batch = int64_t{problem.seqlen_q} * heads_q * qk;
    bwd.dq_stride_seq = heads_q * qk, bwd.dq_stride_head = qk;
    bwd.dk_stride_batch = int64_t{problem.seqlen_kv} * heads_kv * qk;
    bwd.dk_stride_seq = heads_kv * qk, bwd.dk_stride_head = qk;
    bwd.dv_stride_batch = int64_t{problem.seqlen_kv} * heads_kv * dv;
    bwd.dv_stride_seq = heads_kv * dv, bwd.dv_stride_head = dv;
    params.step = BLOCKFLASH_INDEX_SUM_KEYS;
    run.launch(heads_kv * lists.bins * (width / 64), [] { VARIANT_SYMBOL(params); });
    params.step = BLOCKFLASH_INDEX_SUM_QUERIES;
    run.launch((lists.queries * heads_q * (qk / 8) + Config::threads - 1) / Config::threads,
               [] { VARIANT_SYMBOL(params); });
    if (problem.hostile) return;
    run.compare(number, "dq", dq, expected_dq, kTolerance);
    run.compare(number, "dk", dk, expected_dk, kTolerance);
    run.compare(number, "dv", d_v, expected_dv, kTolerance);
    run.compare(number, "sums", sums, expected_sums, 1e-5);
  });
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int number = 0;
  for (const Problem& problem : kProblems) {
    check(problem, number, number % 2 == 0, number % 3 != 1, random);
    ++number;
  }
}
