// Attention to the rows of a latent cache that lists name: contiguous, paged and packed keys,
// packed queries and not, of elements and of codes, beside a reference in f64.
#include "latent_rows.h"

namespace {

blockflash_attention_index_params params;

constexpr int kAll = BLOCKFLASH_WINDOW_UNBOUNDED;

struct Problem {
  std::vector<int> queries, lengths;  // of each sequence
  int capacity, page_size;            // a page of the capacity: no block table
  int heads, groups;
  int log2, listed;  // granularity, and entries of a list
  int chunk;         // positions of a split
  int left = kAll;
  bool packed = false, packed_keys = false;
  bool nonfinite = false;  // a key that some queries do not see is NaN
  bool empty = false;      // lists hold nothing that exists
};

const std::vector<Problem> kProblems = {
    {{1, 1}, {200, 30}, 200, 200, 5, 1, 0, 70, 64},
    {{2, 2, 2}, {0, 77, 160}, 160, 32, 3, 1, 0, 150, 64, 40},
    {{1, 1}, {250, 9}, 256, 16, 20, 1, 0, 40, 64},
    {{3, 0, 4}, {9, 30, 96}, 96, 16, 4, 1, 0, 33, 64, kAll, true},
    {{2, 1}, {90, 60}, 90, 150, 4, 1, 0, 50, 64, kAll, true, true},
    {{1, 1}, {130, 33}, 144, 48, 6, 6, 2, 30, 64},
    {{2}, {300}, 304, 16, 3, 1, 6, 5, 128, kAll, false, false, true},
    {{1}, {700}, 704, 64, 2, 1, 0, 600, 64},
    {{2}, {90}, 96, 32, 3, 1, 4, 3, 64, kAll, false, false, false, true},
};

// Tensors of a problem.
struct Data {
  Problem problem;
  std::mt19937 random;
  int batch, most = 0, total = 0, columns, pages;
  std::vector<int> starts = {0}, key_starts = {0};
  Tensor<Element> q;
  Tensor<Row::Type> k;
  Tensor<int32_t> table, lengths, offsets, key_offsets, entries;

  static int total_of(const std::vector<int>& counts) {
    int total = 0;
    for (int count : counts) total += count;
    return total;
  }

  Data(const Problem& p, int number)
      : problem(p),
        random(number),
        batch(p.queries.size()),
        total(total_of(p.queries)),
        columns(p.packed_keys ? 1 : p.capacity / p.page_size),
        pages(p.packed_keys ? 1 : batch * columns + 1),
        q(size_t(total) * p.heads * kQk, random, 1),
        k(size_t(pages) * p.page_size * Row::kWidth),
        table(batch * columns),
        lengths(batch),
        offsets(batch + 1),
        key_offsets(batch + 1),
        entries(size_t(p.groups) * total * p.listed) {
    for (int b = 0; b < batch; ++b) {
      most = max(most, p.queries[b]);
      starts.push_back(starts[b] + p.queries[b]);
      key_starts.push_back(key_starts[b] + p.lengths[b]);
      lengths.data[b] = p.lengths[b];
      for (int c = 0; c < columns; ++c) table.data[b * columns + c] = (b + c * batch) % pages;
    }
    std::copy(starts.begin(), starts.end(), offsets.data);
    std::copy(key_starts.begin(), key_starts.end(), key_offsets.data);
    for (size_t i = 0; i < k.size; i += Row::kWidth) Row::fill(k.data + i, random);
    // Slots behind the last key are nobody's, and NaN.
    if (!p.packed_keys)
      for (int b = 0; b < batch; ++b)
        for (int key = p.lengths[b]; key < p.capacity; ++key)
          memset(key_at(b, key), 0xff, Row::kWidth * sizeof(Row::Type));
    if (p.nonfinite)
      for (int b = 0; b < batch; ++b) Row::make_nan(key_at(b, p.lengths[b] - 1), 300);
    // Some entries name nothing, and some come twice.
    const int blocks = (p.capacity >> p.log2) + 2;
    for (size_t i = 0; i < entries.size; ++i) {
      const unsigned x = random();
      entries.data[i] = x % 7 == 0    ? -1
                        : x % 61 == 1 ? INT32_MAX
                        : x % 67 == 2 ? INT32_MIN
                        : p.empty     ? -1 - int(x % 9)
                                      : int(x / 8 % blocks);
    }
  }
  Row::Type* key_at(int b, int key) const { return k.data + row(b, key) * Row::kWidth; }

  size_t row(int b, int key) const {
    if (problem.packed_keys) return key_starts[b] + key;
    const int page = columns == 1 ? b : table.data[b * columns + key / problem.page_size];
    return size_t(page) * problem.page_size + key % problem.page_size;
  }
  // The keys of a list that a query sees.
  std::vector<int> keys_of(int b, int query, int group) const {
    const Problem& p = problem;
    const int center = p.lengths[b] - p.queries[b] + query;
    const int32_t* const list =
        entries.data + (size_t(group) * total + starts[b] + query) * p.listed;
    std::vector<int> keys;
    for (int e = 0; e < p.listed; ++e)
      for (int i = 0; i < 1 << p.log2; ++i) {
        const int64_t key = (int64_t(list[e]) << p.log2) + i;
        const bool sees = key <= center && (p.left == kAll || key >= center - p.left);
        if (list[e] >= 0 && key < p.lengths[b] && sees) keys.push_back(key);
      }
    return keys;
  }

  void write(blockflash_attention_index_params& all) const {
    const Problem& p = problem;
    blockflash_attention_decode_params& to = all.scaled.decode;
    to.q = q.data;
    to.cu_seqlens_q = p.packed ? offsets.data : nullptr;
    to.cache = {.k = k.data,
                .block_table = columns > 1 ? table.data : nullptr,
                .seqused = p.packed_keys ? nullptr : lengths.data};
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
    to.batch = batch, to.num_heads_q = p.heads, to.num_heads_kv = 1;
    to.group = p.heads / p.groups, all.units = p.groups, all.chunk = p.chunk;
    to.seqlen_q = most, to.total_q = p.packed ? total : 0;
    to.head_dim_qk = kQk, to.head_dim_v = kV;
    const float scale = 1 / sqrtf(kQk), factor = scale * 1.4426950408889634f;
    to.scores = {nullptr, scale, factor, 1 / factor, 0, 0, {p.left, 0, 1}};
    all.lists = {entries.data, int64_t(total) * p.listed, p.listed, p.groups, total, p.listed,
                 p.log2};
    all.cu_seqlens_kv = p.packed_keys ? key_offsets.data : nullptr;
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
        const std::vector<int> keys = data.keys_of(b, i, h * p.groups / p.heads);
        std::vector<double> scores, o(kV);
        double largest = -INFINITY, sum = 0;
        for (int key : keys) {
          double s = 0;
          for (int c = 0; c < kQk; ++c)
            s += data.q.at((size_t(token) * p.heads + h) * kQk + c) *
                 Row::at(data.key_at(b, key), c);
          scores.push_back(s / sqrt(kQk)), largest = max(largest, scores.back());
        }
        for (size_t n = 0; n < keys.size(); ++n) {
          const double weight = exp(scores[n] - largest);
          sum += weight;
          for (int c = 0; c < kV; ++c) o[c] += weight * Row::at(data.key_at(b, keys[n]), c);
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
  blockflash_attention_decode_params& p = params.scaled.decode;
  const int splits = max((problem.listed << problem.log2) + problem.chunk - 1, 1) / problem.chunk;
  const int row_tiles = (p.group + Config::rows - 1) / Config::rows;
  const int rows = min(p.group, int{Config::rows});
  p.items = data.total * splits * row_tiles * params.units, p.partial_rows = rows;
  in_every_schedule(schedules, [&](Run& run) {
    const Tensor<Element> o(size_t(data.total) * problem.heads * kV, schedules, NAN);
    const Tensor<float> lse(data.total * problem.heads, schedules, NAN);
    const Tensor<float> sums(size_t(p.items) * rows * kV, schedules, NAN);
    const Tensor<float> logs(size_t(p.items) * rows * 2, schedules, NAN);
    const Tensor<uint64_t> arrivals(2 + p.items);
    p.o = o.data, p.lse = lse.data, p.partial_sums = sums.data;
    p.partial_logs = logs.data, p.arrivals = arrivals.data;
    run.launch(p.items, [] { VARIANT_SYMBOL(params); });
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
