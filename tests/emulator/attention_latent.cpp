// Attention to a cache whose values are the first columns of its keys: contiguous and paged, packed
// and not, of elements and of codes, beside a reference in f64.
#include "latent_rows.h"

namespace {

blockflash_attention_decode_params params;

constexpr int kAll = BLOCKFLASH_WINDOW_UNBOUNDED;
struct Problem {
  std::vector<int> queries, lengths;  // of each sequence
  int capacity, page_size;            // a page of the capacity: no block table
  int heads;
  int left, right;
  unsigned ctas;
  bool packed = false, equal = false;  // equal: all sequences have the capacity
  float softcap = 0;
  bool sink = false;
  bool nonfinite = false;  // a key that some queries do not see is NaN
  int chunk_min = 64;      // keys of a split
  int splits = 8;          // of a sequence of medium length
};

const std::vector<Problem> kProblems = {
    {{1, 1}, {200, 200}, 200, 200, 3, kAll, 0, 4},
    {{1, 1, 1, 1}, {1, 16, 17, 250}, 256, 16, 16, kAll, kAll, 3},
    {{1, 1}, {150, 150}, 150, 150, 5, kAll, 0, 64, false, true},
    {{5, 5, 5}, {0, 77, 160}, 160, 32, 7, 40, 0, 2, false, false, 20, true},
    {{3, 0, 7}, {9, 30, 96}, 96, 16, 4, kAll, 0, 3, true},
    {{4, 4}, {130, 33}, 144, 48, 6, kAll, 0, 5, false, false, 0, false, true},
    {{6}, {90}, 96, 32, 3, 20, 4, 1, false, false, 0, true, true},
    {{1}, {700}, 704, 16, 20, kAll, 0, 2, false, false, 0, false, false, 1024},
    {{2, 2}, {512, 512}, 512, 64, 8, kAll, 0, 3, false, true, 0, true},
    {{1, 1}, {1340, 700}, 1344, 16, 3, kAll, 0, 5, false, false, 0, true, false, 64, 64},
    {{1}, {1100}, 1100, 1100, 2, kAll, 0, 64, false, true, 0, false, false, 64, 64},
    {{9, 9, 9}, {0, 1, 12}, 16, 16, 2, kAll, 0, 1},
};

// Tensors of a problem.
struct Data {
  Problem problem;
  std::mt19937 random;
  int batch, most = 0, total = 0, columns, pages;
  std::vector<int> starts = {0};
  Tensor<Element> q;
  Tensor<Row::Type> k;
  Tensor<float> sink;
  Tensor<int32_t> table, lengths, offsets;

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
        columns(p.capacity / p.page_size),
        pages(batch * columns + 1),
        q(size_t(total) * p.heads * kQk, random, 1),
        k(size_t(pages) * p.page_size * Row::kWidth),
        sink(p.heads, random, 1),
        table(batch * columns),
        lengths(batch),
        offsets(batch + 1) {
    for (int b = 0; b < batch; ++b) {
      most = max(most, p.queries[b]);
      starts.push_back(starts[b] + p.queries[b]);
      lengths.data[b] = p.lengths[b];
      for (int c = 0; c < columns; ++c) table.data[b * columns + c] = (b + c * batch) % pages;
    }
    std::copy(starts.begin(), starts.end(), offsets.data);
    for (size_t i = 0; i < k.size; i += Row::kWidth) Row::fill(k.data + i, random);
    // Slots behind the last key are nobody's, and NaN.
    for (int b = 0; b < batch; ++b)
      for (int key = p.lengths[b]; key < p.capacity; ++key)
        memset(key_at(b, key), 0xff, Row::kWidth * sizeof(Row::Type));
    if (p.nonfinite)
      for (int b = 0; b < batch; ++b) Row::make_nan(key_at(b, p.lengths[b] - 3), 300);
  }
  Row::Type* key_at(int b, int key) const { return k.data + row(b, key) * Row::kWidth; }

  size_t row(int b, int key) const {
    const int page = columns == 1 ? b : table.data[b * columns + key / problem.page_size];
    return size_t(page) * problem.page_size + key % problem.page_size;
  }
  bool sees(int b, int query, int key) const {
    const int center = problem.lengths[b] - problem.queries[b] + query;
    return (problem.left == kAll || key >= center - problem.left) &&
           (problem.right == kAll || key <= center + problem.right);
  }

  void write(blockflash_attention_decode_params& to) const {
    const Problem& p = problem;
    to.q = q.data;
    to.cu_seqlens_q = p.packed ? offsets.data : nullptr;
    to.cache = {.k = k.data,
                .block_table = columns > 1 ? table.data : nullptr,
                .seqused = p.equal ? nullptr : lengths.data};
    to.cache.k_stride_page = int64_t(p.page_size) * Row::kWidth;
    to.cache.k_stride_slot = to.cache.k_stride_head = Row::kWidth;
    to.cache.block_table_stride = columns;
    to.cache.pages = pages, to.cache.page_size = p.page_size, to.cache.capacity = p.capacity;
    to.q_stride_batch = p.packed ? 0 : int64_t(most) * p.heads * kQk;
    to.q_stride_seq = p.heads * kQk, to.q_stride_head = kQk;
    to.o_stride_batch = p.packed ? 0 : int64_t(most) * p.heads * kV;
    to.o_stride_seq = p.heads * kV, to.o_stride_head = kV;
    to.lse_stride_batch = p.packed ? 0 : p.heads * most;
    to.lse_stride_head = p.packed ? total : most;
    to.batch = batch, to.num_heads_q = to.group = p.heads, to.num_heads_kv = 1;
    to.seqlen_q = most, to.total_q = p.packed ? total : 0;
    to.head_dim_qk = kQk, to.head_dim_v = kV, to.most_queries = most;
    to.splits = p.splits, to.chunk_min = p.chunk_min, to.chunk_max = max(128, p.chunk_min);
    const float scale = 1 / sqrtf(kQk), log2e = 1.4426950408889634f;
    const float factor = p.softcap > 0 ? log2e : scale * log2e;
    to.scores = {p.sink ? sink.data : nullptr,
                 scale,
                 factor,
                 1 / factor,
                 p.softcap > 0 ? scale / p.softcap : 0,
                 p.softcap,
                 {p.left, p.right, 1}};
  }
};

struct Expected {
  std::vector<double> o, lse;
};

Expected reference(const Data& data) {
  const Problem& p = data.problem;
  Expected expected = {std::vector<double>(size_t(data.total) * p.heads * kV),
                       std::vector<double>(data.total * p.heads)};
  for (int b = 0; b < data.batch; ++b)
    for (int i = 0; i < p.queries[b]; ++i)
      for (int h = 0; h < p.heads; ++h) {
        const int token = data.starts[b] + i;
        std::vector<double> scores(p.lengths[b], -INFINITY), o(kV);
        double largest = p.sink ? data.sink.data[h] : -INFINITY;
        for (int key = 0; key < p.lengths[b]; ++key) {
          if (!data.sees(b, i, key)) continue;
          double s = 0;
          for (int c = 0; c < kQk; ++c)
            s += data.q.at((size_t(token) * p.heads + h) * kQk + c) *
                 Row::at(data.key_at(b, key), c);
          s /= sqrt(kQk);
          if (p.softcap > 0) s = p.softcap * tanh(s / p.softcap);
          scores[key] = s, largest = max(largest, s);
        }
        double sum = p.sink ? exp(data.sink.data[h] - largest) : 0;
        for (int key = 0; key < p.lengths[b]; ++key) {
          if (!data.sees(b, i, key)) continue;
          const double weight = exp(scores[key] - largest);
          sum += weight;
          for (int c = 0; c < kV; ++c) o[c] += weight * Row::at(data.key_at(b, key), c);
        }
        for (int c = 0; c < kV; ++c)
          expected.o[(size_t(token) * p.heads + h) * kV + c] = sum == 0 ? 0 : o[c] / sum;
        const size_t at =
            p.packed ? size_t(h) * data.total + token : (size_t(b) * p.heads + h) * data.most + i;
        expected.lse[at] = sum == 0 ? -INFINITY : largest + log(sum);
      }
  return expected;
}

void check(const Problem& problem, int number, std::mt19937& schedules) {
  const Data data(problem, number);
  const Expected expected = reference(data);
  params = {};
  data.write(params);
  const int rows = min(data.most * problem.heads, int{Config::rows});
  const int row_tiles = (data.most * problem.heads + Config::rows - 1) / Config::rows;
  params.items = data.batch * row_tiles * problem.splits, params.partial_rows = rows;
  in_every_schedule(schedules, [&](Run& run) {
    const Tensor<Element> o(size_t(data.total) * problem.heads * kV, schedules, NAN);
    const Tensor<float> lse(data.total * problem.heads, schedules, NAN);
    const Tensor<float> sums(size_t(params.items) * rows * kV, schedules, NAN);
    const Tensor<float> logs(size_t(params.items) * rows * 2, schedules, NAN);
    const Tensor<uint64_t> arrivals(2 + params.items);
    const Tensor<uint32_t> counter(2);
    params.o = o.data, params.lse = lse.data, params.partial_sums = sums.data;
    params.partial_logs = logs.data, params.arrivals = arrivals.data;
    params.tile_counter = counter.data;
    run.launch(problem.ctas, [] { VARIANT_SYMBOL(params); });
    run.compare(number, "o", o, expected.o, 0.03);
    run.compare(number, "lse", lse, expected.lse, 0.01);
  });
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int number = 0;
  for (const Problem& problem : kProblems) check(problem, number++, random);
}
