// Scores of blocks of keys: contiguous, paged and packed ones, all granularities, maxima and means,
// beside a reference in f64.
#include "problem.h"

namespace {

using blockflash::Config;
using blockflash::Element;

blockflash_index_scores_params params;

constexpr int kAll = BLOCKFLASH_WINDOW_UNBOUNDED;
constexpr int kD = Config::head_dim;

struct Problem {
  std::vector<int> queries, lengths;  // of each sequence
  int capacity, page_size;            // a page of the capacity: no block table
  int heads, heads_k, groups;
  int granularity;
  bool is_mean, has_relu, has_weights;
  int left, right;
  int item_queries;
  unsigned ctas;
  bool packed = false, packed_keys = false, leaves_hidden = false;
  int head_dim = kD;
  bool nonfinite = false;  // a key that some queries do not see is NaN, and another infinite
};

const std::vector<Problem> kProblems = {
    {{3, 3}, {300, 77}, 320, 320, 4, 1, 4, 128, false, false, false, kAll, 0, 8, 2},
    {{1, 1, 1}, {0, 530, 16}, 544, 16, 20, 1, 1, 1, false, true, true, kAll, 0, 1, 3},
    {{40, 0, 9}, {290, 5, 9}, 336, 48, 6, 2, 2, 4, true, true, true, kAll, 0, 16, 2, true},
    {{7, 19}, {260, 130}, 272, 272, 2, 1, 1, 16, false, false, false, 100, 0, 5, 1, true},
    {{2, 17}, {513, 300}, 528, 16, 4, 2, 4, 64, true, false, true, kAll, kAll, 17, 2, true},
    {{5, 33}, {290, 400}, 400, 0, 4, 4, 4, 16, true, true, false, 64, 3, 20, 2, true, true},
    {{20}, {700}, 704, 64, 33, 1, 1, 64, false, true, true, kAll, 0, 7, 2},
    {{1, 2},
     {900, 300},
     1024,
     1024,
     3,
     1,
     3,
     128,
     true,
     false,
     false,
     300,
     0,
     1,
     4,
     true,
     false,
     true},
    {{2},  {200}, 208, 16, 18, 1,     1,     4,     false,   true,
     true, kAll,  0,   2,  1,  false, false, false, kD - 24, true},
    {{9},   {270}, 272, 16, 1, 1,     1,     1,     false,  false,
     false, kAll,  0,   4,  1, false, false, false, kD - 8, true},
};

// Tensors of a problem.
struct Data {
  Problem problem;
  std::mt19937 random;
  int batch, most = 0, total = 0, columns = 1, pages = 1, page_size, blocks;
  std::vector<int> starts = {0}, key_starts = {0};
  Tensor<Element> q, k;
  Tensor<float> weights;
  Tensor<int32_t> table, lengths, offsets, key_offsets;

  static int sum(const std::vector<int>& of) {
    int total = 0;
    for (int x : of) total += x;
    return total;
  }
  static int slots_of(const Problem& p) {
    if (p.packed_keys) return sum(p.lengths);
    return (p.queries.size() * (p.capacity / p.page_size) + 1) * p.page_size;
  }

  Data(const Problem& p, int number)
      : problem(p),
        random(number),
        batch(p.queries.size()),
        total(sum(p.queries)),
        page_size(p.packed_keys ? sum(p.lengths) : p.page_size),
        blocks((p.capacity + p.granularity - 1) / p.granularity),
        q(size_t(total) * p.heads * kD, random, 1),
        k(size_t(slots_of(p)) * p.heads_k * kD, random, 1),
        weights(total * p.heads, random, 1),
        table(batch * (p.packed_keys ? 1 : p.capacity / p.page_size)),
        lengths(batch),
        offsets(batch + 1),
        key_offsets(batch + 1) {
    if (!p.packed_keys) columns = p.capacity / p.page_size, pages = batch * columns + 1;
    for (int b = 0; b < batch; ++b) {
      most = max(most, p.queries[b]);
      starts.push_back(starts[b] + p.queries[b]);
      key_starts.push_back(key_starts[b] + p.lengths[b]);
      lengths.data[b] = p.lengths[b];
      for (int c = 0; c < columns; ++c) table.data[b * columns + c] = (b + c * batch) % pages;
    }
    std::copy(starts.begin(), starts.end(), offsets.data);
    std::copy(key_starts.begin(), key_starts.end(), key_offsets.data);
    // Slots behind the last key and columns behind the last one are nobody's, and NaN.
    for (int b = 0; b < batch && !p.packed_keys; ++b)
      for (int key = p.lengths[b]; key < p.capacity; ++key)
        memset(key_at(b, key, 0), 0xff, p.heads_k * kD * sizeof(Element));
    for (size_t i = 0; i < k.size; ++i)
      if (int(i % kD) >= p.head_dim) k.data[i] = Element(NAN);
    if (p.nonfinite) {
      key_at(0, p.lengths[0] - 1, 0)[3] = Element(NAN);
      key_at(0, p.lengths[0] - 70, 0)[5] = Element(INFINITY);
    }
  }
  Element* key_at(int b, int key, int head) const {
    size_t slot = key;
    if (problem.packed_keys)
      slot += key_starts[b];
    else
      slot = size_t(columns == 1 ? b : table.data[b * columns + key / page_size]) * page_size +
             key % page_size;
    return k.data + (slot * problem.heads_k + head) * kD;
  }
  bool sees(int b, int query, int key) const {
    const int center = problem.lengths[b] - problem.queries[b] + query;
    return (problem.left == kAll || key >= center - problem.left) &&
           (problem.right == kAll || key <= center + problem.right);
  }

  void write(blockflash_index_scores_params& to) const {
    const Problem& p = problem;
    blockflash_index_rows& rows = to.rows;
    rows.cu_seqlens_q = p.packed ? offsets.data : nullptr;
    rows.cu_seqlens_kv = p.packed_keys ? key_offsets.data : nullptr;
    rows.cache = {.k = k.data,
                  .block_table = columns > 1 ? table.data : nullptr,
                  .seqused = p.packed_keys ? nullptr : lengths.data};
    rows.cache.k_stride_page = int64_t(page_size) * p.heads_k * kD;
    rows.cache.k_stride_slot = p.heads_k * kD, rows.cache.k_stride_head = kD;
    rows.cache.block_table_stride = columns;
    rows.cache.pages = pages, rows.cache.page_size = page_size, rows.cache.capacity = p.capacity;
    rows.batch = batch, rows.seqlen_q = most, rows.rows = total;
    rows.window = {p.left, p.right, 1};
    to.q = q.data, to.weights = p.has_weights ? weights.data : nullptr;
    to.q_stride_batch = p.packed ? 0 : int64_t(most) * p.heads * kD;
    to.q_stride_seq = p.heads * kD, to.q_stride_head = kD;
    to.weights_stride_row = p.heads, to.weights_stride_head = 1;
    to.scores_stride_group = int64_t(total) * blocks, to.scores_stride_row = blocks;
    to.num_heads = p.heads, to.num_heads_k = p.heads_k, to.groups = p.groups;
    to.head_dim = p.head_dim, to.granularity = p.granularity, to.blocks = blocks;
    to.reduction = p.is_mean ? BLOCKFLASH_INDEX_MEAN : BLOCKFLASH_INDEX_MAX;
    to.activation = p.has_relu ? BLOCKFLASH_INDEX_RELU : BLOCKFLASH_INDEX_IDENTITY;
    to.scale = 0.125f, to.item_queries = p.item_queries, to.leaves_hidden = p.leaves_hidden;
  }
};

double larger(double a, double b) { return std::isnan(a) || std::isnan(b) ? NAN : max(a, b); }

std::vector<double> reference(const Data& data) {
  const Problem& p = data.problem;
  std::vector<double> expected(size_t(p.groups) * data.total * data.blocks, -INFINITY);
  const int heads = p.heads / p.groups;
  for (int group = 0; group < p.groups; ++group)
    for (int b = 0; b < data.batch; ++b)
      for (int i = 0; i < p.queries[b]; ++i)
        for (int block = 0; block < data.blocks; ++block) {
          const int row = data.starts[b] + i, first = block * p.granularity;
          double score = p.is_mean ? 0 : -INFINITY;
          int seen = 0;
          for (int key = first; key < min(first + p.granularity, p.lengths[b]); ++key) {
            if (!data.sees(b, i, key)) continue;
            double sum = 0;
            for (int h = group * heads; h < (group + 1) * heads; ++h) {
              double x = 0;
              for (int c = 0; c < p.head_dim; ++c)
                x += data.q.at((size_t(row) * p.heads + h) * kD + c) *
                     static_cast<float>(data.key_at(b, key, h * p.heads_k / p.heads)[c]);
              x *= 0.125;
              if (p.has_relu) x = larger(x, 0);
              sum += x * (p.has_weights ? data.weights.at(row * p.heads + h) : 1);
            }
            score = p.is_mean ? score + sum : larger(score, sum), ++seen;
          }
          if (seen == 0) continue;
          expected[(size_t(group) * data.total + row) * data.blocks + block] =
              p.is_mean ? score / seen : score;
        }
  return expected;
}

void check(const Problem& problem, int number, std::mt19937& schedules) {
  const Data data(problem, number);
  std::vector<double> expected = reference(data);
  params = {};
  data.write(params);
  in_every_schedule(schedules, [&](Run& run) {
    const Tensor<float> scores(expected.size(), schedules, NAN);
    const Tensor<uint32_t> counter(2);
    params.scores = scores.data;
    params.tile_counter = run.schedule.late ? counter.data : nullptr;
    run.launch(problem.ctas, [] { VARIANT_SYMBOL(params); });
    // What may be left as it was is, or is hidden.
    for (size_t i = 0; problem.leaves_hidden && i < expected.size(); ++i)
      if (expected[i] == -INFINITY && std::isnan(scores.data[i])) scores.data[i] = -INFINITY;
    run.compare(number, "scores", scores, expected, 2e-5);
    if (counter.data[0] != 0 || counter.data[1] != 0) simt::fail("the counter is not 0");
  });
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int number = 0;
  for (const Problem& problem : kProblems) check(problem, number++, random);
}
