// The largest scores of rows: short and long ones, with equal scores, NaN and infinities, shared by
// several CTAs and not, beside a sort.
#include "problem.h"

namespace {

using blockflash::Config;

blockflash_top_k_params params;

constexpr int kAll = BLOCKFLASH_WINDOW_UNBOUNDED;

enum class Kind { kNormal, kFew, kEqual, kZeros, kOdd, kAscending };

struct Problem {
  std::vector<int> queries, lengths;  // of each sequence
  int blocks, granularity, groups, k, first, last;
  Kind kind;
  int left = kAll, right = 0, parts = 1;
  bool packed = false;
};

const std::vector<Problem> kShort = {
    {{3, 3}, {500, 77}, 500, 1, 2, 16, 0, 0, Kind::kNormal},
    {{1, 1, 1}, {0, 4000, 130}, 32, 128, 1, 16, 1, 2, Kind::kFew},
    {{5, 0, 2}, {900, 4, 1}, 57, 16, 2, 33, 0, 1, Kind::kOdd, kAll, 0, 1, true},
    {{4, 6}, {1024, 1000}, 256, 4, 1, 300, 4, 4, Kind::kZeros, 200, 0, 1, true},
    {{2}, {64 * 90}, 90, 64, 3, 5, 2, 3, Kind::kEqual},
    {{2}, {1000}, 1000, 1, 1, 7, 0, 0, Kind::kEqual, kAll, kAll},
};
const std::vector<Problem> kLong = {
    {{1}, {15000}, 15000, 1, 1, 300, 0, 0, Kind::kNormal, kAll, 0, 3},
    {{2}, {25001}, 25001, 1, 1, 2048, 1, 64, Kind::kNormal},
    {{2}, {31003}, 31003, 1, 1, 2048, 0, 3, Kind::kZeros, kAll, 0, 4},
    {{1}, {60000}, 15000, 4, 1, 100, 0, 0, Kind::kEqual, kAll, 0, 3},
    {{1}, {12000}, 12000, 1, 1, 64, 0, 0, Kind::kOdd, kAll, 0, 2},
    {{1, 1}, {14000, 500}, 14000, 1, 1, 512, 5, 5, Kind::kAscending, kAll, 0, 2, true},
    {{1}, {700000}, 700000, 1, 1, 1000, 0, 0, Kind::kNormal, kAll, 0, 5},
};

struct Data {
  Problem problem;
  std::mt19937 random;
  int batch, most = 0, total = 0;
  std::vector<int> starts = {0};
  Tensor<float> scores;
  Tensor<int32_t> lengths, offsets;

  static int total_of(const Problem& p) {
    int total = 0;
    for (int queries : p.queries) total += queries;
    return total;
  }

  Data(const Problem& p, int number)
      : problem(p),
        random(number),
        batch(p.queries.size()),
        total(total_of(p)),
        scores(size_t(p.groups) * total * p.blocks, random, 1),
        lengths(batch),
        offsets(batch + 1) {
    for (int b = 0; b < batch; ++b) {
      most = max(most, p.queries[b]);
      starts.push_back(starts[b] + p.queries[b]);
      lengths.data[b] = p.lengths[b];
    }
    std::copy(starts.begin(), starts.end(), offsets.data);
    for (size_t i = 0; i < scores.size; ++i) {
      float& x = scores.data[i];
      const int kind = random() % 10;
      if (p.kind == Kind::kFew) x = roundf(x * 2);
      if (p.kind == Kind::kEqual) x = -3;
      if (p.kind == Kind::kZeros) x = x > 1.8f ? x : kind % 2 ? 0.f : -0.f;
      if (p.kind == Kind::kOdd && kind < 8) x = kind < 4 ? NAN : kind < 7 ? -INFINITY : INFINITY;
      if (p.kind == Kind::kAscending) x = static_cast<float>(i) * 1e-3f;
    }
  }
};

std::vector<double> reference(const Data& data) {
  const Problem& p = data.problem;
  std::vector<double> expected(size_t(p.groups) * data.total * p.k, -1);
  for (int group = 0; group < p.groups; ++group)
    for (int b = 0; b < data.batch; ++b)
      for (int i = 0; i < p.queries[b]; ++i) {
        const int row = data.starts[b] + i, center = p.lengths[b] - p.queries[b] + i;
        const int first_key = p.left == kAll ? 0 : max(center - p.left, 0);
        const int end_key = p.right == kAll ? p.lengths[b] : min(center + 1, p.lengths[b]);
        if (first_key >= end_key) continue;
        const int begin = first_key / p.granularity;
        const int end = min((end_key - 1) / p.granularity + 1, p.blocks);
        const float* const scores =
            data.scores.data + (size_t(group) * data.total + row) * p.blocks;
        std::vector<int> chosen, others;
        for (int c = begin; c < end; ++c) {
          if (c < p.first || c >= end - p.last)
            chosen.push_back(c);
          else if (scores[c] > -INFINITY)
            others.push_back(c);
        }
        std::stable_sort(others.begin(), others.end(),
                         [scores](int a, int b) { return scores[a] > scores[b]; });
        for (size_t j = 0; j < others.size() && int(chosen.size()) < p.k; ++j)
          chosen.push_back(others[j]);
        std::sort(chosen.begin(), chosen.end());
        std::copy(chosen.begin(), chosen.end(),
                  expected.begin() + (size_t(group) * data.total + row) * p.k);
      }
  return expected;
}

void check(const Problem& problem, int number, std::mt19937& schedules) {
  const Problem& p = problem;
  const Data data(problem, number);
  const std::vector<double> expected = reference(data);
  params = {};
  params.rows.cu_seqlens_q = p.packed ? data.offsets.data : nullptr;
  params.rows.cache.seqused = data.lengths.data;
  params.rows.cache.capacity = params.rows.cache.page_size = p.blocks * p.granularity;
  params.rows.batch = data.batch, params.rows.seqlen_q = data.most, params.rows.rows = data.total;
  params.rows.window = {p.left, p.right, 1};
  params.scores = data.scores.data;
  params.scores_stride_row = p.blocks, params.scores_stride_group = int64_t(data.total) * p.blocks;
  params.chosen_stride_row = p.k, params.chosen_stride_group = data.total * p.k;
  params.groups = p.groups, params.granularity = p.granularity, params.blocks = p.blocks;
  params.k = p.k, params.first = p.first, params.last = p.last, params.parts = p.parts;
  const int rows = p.groups * data.total;
  const int per_cta = Config::threads / 32;
  const unsigned ctas = Config::is_of_warps ? (rows + per_cta - 1) / per_cta : rows * p.parts;
  const Tensor<uint64_t> arrivals(2 + rows);  // of all schedules
  in_every_schedule(schedules, [&](Run& run) {
    const Tensor<int32_t> chosen(expected.size());
    std::fill_n(chosen.data, chosen.size, 0x7fffffff);
    const Tensor<uint64_t> candidates(size_t(rows) * p.parts * p.k);
    const Tensor<uint32_t> counts(rows * p.parts);
    std::fill_n(counts.data, counts.size, ~0u);
    params.chosen = chosen.data, params.candidates = candidates.data;
    params.counts = counts.data, params.arrivals = arrivals.data;
    run.launch(ctas, [] { VARIANT_SYMBOL(params); });
    run.compare(number, "chosen", chosen, expected, 0);
  });
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int number = 0;
  for (const Problem& problem : kShort) check(problem, number++, random);
  if (Config::is_of_warps) return 0;
  for (const Problem& problem : kLong) check(problem, number++, random);
}
