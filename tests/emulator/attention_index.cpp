// Attention to keys that lists name, in caches, contiguous and paged, and packed, beside a
// reference in f64. Whatever no query sees is NaN.
#include "codes.h"
#include "problem.h"

namespace {

using blockflash::Config;
using blockflash::Element;

constexpr bool kHasCodes = blockflash::kHasCodes;
constexpr int kPart = kHasCodes ? 16 : 8;  // of head dimensions

// An element of a cache of codes.
struct Code {
  uint8_t bits;

  Code() = default;
  explicit Code(float x) : bits(nearest(blockflash::kCacheCodes, x)) {}
  explicit operator float() const {
    return static_cast<float>(value_of(blockflash::kCacheCodes, bits));
  }
};
using Cached = std::conditional_t<kHasCodes, Code, Element>;

blockflash::Params params;

constexpr int kAll = BLOCKFLASH_WINDOW_UNBOUNDED, kD = Config::head_dim;

enum class Keys { kContiguous, kPaged, kPacked };

struct Problem {
  std::vector<int> queries, lengths;  // of each sequence
  Keys keys;
  int page_size;               // of pages
  int heads_kv, group, lists;  // heads of q that share one of k, and lists of a query
  int qk, dv;
  int granularity_log2, entries;
  int chunk, run_log2;
  unsigned ctas;
  int left = kAll, right = 0;
  bool packed = false;
  float softcap = 0;
};

const std::vector<Problem> kProblems = {
    {{1, 1}, {200, 77}, Keys::kPaged, 32, 2, 5, 2, kD, kD, 6, 6, 64, 0, 4},
    {{2, 2}, {150, 0}, Keys::kContiguous, 0, 2, 3, 6, kD, kD - kPart, 2, 50, 1024, 0, 64},
    {{3, 0, 2},
     {90, 50, 33},
     Keys::kPacked,
     0,
     1,
     20,
     1,
     kD - 3 * kPart,
     kD,
     0,
     70,
     64,
     1,
     3,
     40,
     3,
     true,
     20},
    {{1}, {1000}, Keys::kPaged, 64, 1, 2, 1, kD, kD, 7, 9, 64, 2, 2},
    {{2, 1}, {300, 16}, Keys::kPaged, 16, 1, 16, 1, kD, kD, 4, 9, 128, 0, 5, kAll, kAll, true},
};

// Tensors of a problem.
struct Data {
  Problem problem;
  std::mt19937 random;
  int batch, most, rows, heads, units, group, columns, capacity, pages, page_size;
  std::vector<int> starts = {0}, key_starts = {0};
  Tensor<Element> q;
  Tensor<Cached> k, v;
  Tensor<float> k_scales, v_scales;  // of each key and head; of codes
  Tensor<int32_t> table, lengths, offsets, key_offsets, entries;

  static int sum(const std::vector<int>& numbers) {
    int sum = 0;
    for (int number : numbers) sum += number;
    return sum;
  }
  static int largest(const std::vector<int>& numbers) {
    return *std::max_element(numbers.begin(), numbers.end());
  }

  Data(const Problem& p, int number)
      : problem(p),
        random(number),
        batch(p.queries.size()),
        most(largest(p.queries)),
        rows(sum(p.queries)),
        heads(p.heads_kv * p.group),
        units(max(p.lists, p.heads_kv)),
        group(heads / units),
        columns(p.keys == Keys::kPaged ? largest(p.lengths) / p.page_size + 1 : 1),
        capacity(p.keys == Keys::kPaged ? columns * p.page_size : largest(p.lengths)),
        pages(p.keys == Keys::kPaged    ? batch * columns + 1
              : p.keys == Keys::kPacked ? 1
                                        : batch),
        page_size(p.keys == Keys::kPaged    ? p.page_size
                  : p.keys == Keys::kPacked ? sum(p.lengths)
                                            : capacity),
        q(size_t(rows) * heads * p.qk, random, 1),
        k(size_t(pages) * page_size * p.heads_kv * p.qk, random, 1),
        v(size_t(pages) * page_size * p.heads_kv * p.dv, random, 1),
        k_scales(size_t(pages) * page_size * p.heads_kv),
        v_scales(k_scales.size),
        table(batch * columns),
        lengths(batch),
        offsets(batch + 1),
        key_offsets(batch + 1),
        entries(size_t(p.lists) * rows * p.entries) {
    for (int b = 0; b < batch; ++b) {
      starts.push_back(starts[b] + p.queries[b]);
      key_starts.push_back(key_starts[b] + p.lengths[b]);
      lengths.data[b] = p.lengths[b];
      for (int c = 0; c < columns; ++c) table.data[b * columns + c] = (b + c * batch) % pages;
    }
    std::copy(starts.begin(), starts.end(), offsets.data);
    std::copy(key_starts.begin(), key_starts.end(), key_offsets.data);
    const int blocks = (capacity >> p.granularity_log2) + 1;
    const int odd[] = {-1, INT32_MAX, INT32_MIN, 1 << 30, blocks + 5};
    for (size_t i = 0; i < entries.size; ++i)
      entries.data[i] = random() % 4 == 0 ? odd[random() % 5] : random() % blocks;
    for (size_t i = 0; i < k_scales.size; ++i)
      k_scales.data[i] = (random() % 9 + 4) / 8.f, v_scales.data[i] = (random() % 9 + 4) / 8.f;
    hide();
  }

  // Makes NaN of keys and values that no query sees.
  void hide() {
    const Problem& p = problem;
    std::vector<bool> seen(size_t(pages) * page_size * p.heads_kv);
    for (int b = 0; b < batch; ++b)
      for (int i = 0; i < p.queries[b]; ++i)
        for (int h = 0; h < heads; ++h)
          for (int key : keys_of(b, i, h)) seen[row(b, key, h / p.group)] = true;
    for (size_t i = 0; i < seen.size(); ++i) {
      if (seen[i]) continue;
      std::fill_n(k.data + i * p.qk, p.qk, Cached(NAN));
      std::fill_n(v.data + i * p.dv, p.dv, Cached(NAN));
      k_scales.data[i] = v_scales.data[i] = NAN;
    }
  }

  // The row of k or v.
  size_t row(int b, int key, int head) const {
    const size_t slot =
        problem.keys == Keys::kPacked ? key_starts[b] + key
        : problem.keys == Keys::kPaged
            ? size_t(table.data[b * columns + key / page_size]) * page_size + key % page_size
            : size_t(b) * page_size + key;
    return slot * problem.heads_kv + head;
  }

  double k_at(size_t row, int column) const {
    return k.at(row * problem.qk + column) * (kHasCodes ? k_scales.data[row] : 1);
  }
  double v_at(size_t row, int column) const {
    return v.at(row * problem.dv + column) * (kHasCodes ? v_scales.data[row] : 1);
  }

  // In the order of the list, as often as they are listed.
  std::vector<int> keys_of(int b, int query, int head) const {
    const Problem& p = problem;
    const int list = head / group * p.lists / units, center = p.lengths[b] - p.queries[b] + query;
    const int32_t* const of = entries.data + (size_t(list) * rows + starts[b] + query) * p.entries;
    std::vector<int> keys;
    for (int e = 0; e < p.entries; ++e)
      for (int64_t i = 0; i < 1 << p.granularity_log2; ++i) {
        const int64_t key = (int64_t(of[e]) << p.granularity_log2) + i;
        if (key < 0 || key >= p.lengths[b]) continue;
        if (p.left != kAll && key < center - p.left) continue;
        if (p.right != kAll && key > center + p.right) continue;
        keys.push_back(key);
      }
    return keys;
  }

  void write() const {
    const Problem& p = problem;
    params = {};
    blockflash_attention_decode_params& to = params;
    to.q = q.data;
    to.cu_seqlens_q = p.packed ? offsets.data : nullptr;
    const bool paged = p.keys == Keys::kPaged, packed_keys = p.keys == Keys::kPacked;
    to.cache = {k.data, v.data, paged ? table.data : nullptr, packed_keys ? nullptr : lengths.data};
    to.cache.k_stride_page = int64_t(page_size) * p.heads_kv * p.qk;
    to.cache.k_stride_slot = p.heads_kv * p.qk, to.cache.k_stride_head = p.qk;
    to.cache.v_stride_page = int64_t(page_size) * p.heads_kv * p.dv;
    to.cache.v_stride_slot = p.heads_kv * p.dv, to.cache.v_stride_head = p.dv;
    to.cache.block_table_stride = columns;
    to.cache.pages = pages, to.cache.page_size = page_size, to.cache.capacity = capacity;
    params.cu_seqlens_kv = packed_keys ? key_offsets.data : nullptr;
    to.q_stride_batch = p.packed ? 0 : int64_t(most) * heads * p.qk;
    to.q_stride_seq = heads * p.qk, to.q_stride_head = p.qk;
    to.o_stride_batch = p.packed ? 0 : int64_t(most) * heads * p.dv;
    to.o_stride_seq = heads * p.dv, to.o_stride_head = p.dv;
    to.lse_stride_batch = p.packed ? 0 : heads * most;
    to.lse_stride_head = p.packed ? rows : most;
    to.batch = batch, to.num_heads_q = heads, to.num_heads_kv = p.heads_kv, to.group = group;
    to.seqlen_q = most, to.total_q = rows, to.head_dim_qk = p.qk, to.head_dim_v = p.dv;
    params.lists = {entries.data, int64_t(rows) * p.entries, p.entries, p.lists, rows,
                    p.entries,    p.granularity_log2};
    params.units = units, params.chunk = p.chunk;
    const float scale = 1 / sqrtf(p.qk), log2e = 1.4426950408889634f;
    const float factor = p.softcap > 0 ? log2e : scale * log2e;
    to.scores = {nullptr,
                 scale,
                 factor,
                 1 / factor,
                 p.softcap > 0 ? scale / p.softcap : 0,
                 p.softcap,
                 {p.left, p.right, 1}};
    if constexpr (requires { params.scales; }) {
      const int64_t heads_kv = p.heads_kv, of_page = page_size * heads_kv;
      params.scales = {k_scales.data, v_scales.data, 0, of_page, heads_kv, 1, 0,
                       of_page,       heads_kv,      1};
      params.q_dtype = BLOCKFLASH_DTYPE_F16;
    }
    to.run_log2 = p.run_log2;
    to.items = rows * runs() * row_tiles() * units;
    to.partial_rows = min(group, int{Config::rows});
  }
  int splits() const {
    return max(1,
               ((problem.entries << problem.granularity_log2) + problem.chunk - 1) / problem.chunk);
  }
  int runs() const { return (splits() - 1 >> problem.run_log2) + 1; }
  int row_tiles() const { return (group + Config::rows - 1) / Config::rows; }
};

struct Expected {
  std::vector<double> o, lse;
};

Expected reference(const Data& data) {
  const Problem& p = data.problem;
  Expected expected = {std::vector<double>(size_t(data.rows) * data.heads * p.dv),
                       std::vector<double>(size_t(data.rows) * data.heads)};
  for (int b = 0; b < data.batch; ++b)
    for (int i = 0; i < p.queries[b]; ++i)
      for (int h = 0; h < data.heads; ++h) {
        const size_t token = data.starts[b] + i, of_q = token * data.heads + h;
        const std::vector<int> keys = data.keys_of(b, i, h);
        std::vector<double> scores, o(p.dv);
        double largest = -INFINITY, sum = 0;
        for (int key : keys) {
          double s = 0;
          for (int c = 0; c < p.qk; ++c)
            s += data.q.at(of_q * p.qk + c) * data.k_at(data.row(b, key, h / p.group), c);
          s /= sqrt(p.qk);
          if (p.softcap > 0) s = p.softcap * tanh(s / p.softcap);
          scores.push_back(s), largest = max(largest, s);
        }
        for (size_t j = 0; j < keys.size(); ++j) {
          const double weight = exp(scores[j] - largest);
          sum += weight;
          for (int c = 0; c < p.dv; ++c)
            o[c] += weight * data.v_at(data.row(b, keys[j], h / p.group), c);
        }
        for (int c = 0; c < p.dv; ++c) expected.o[of_q * p.dv + c] = sum > 0 ? o[c] / sum : 0;
        const size_t at =
            p.packed ? size_t(h) * data.rows + token : (size_t(b) * data.heads + h) * data.most + i;
        expected.lse[at] = sum > 0 ? largest + log(sum) : -INFINITY;
      }
  return expected;
}

void check(const Problem& problem, int number, std::mt19937& schedules) {
  const Data data(problem, number);
  const Expected expected = reference(data);
  data.write();
  const size_t slots = size_t(params.items) << params.run_log2, rows = params.partial_rows;
  in_every_schedule(schedules, [&](Run& run) {
    const Tensor<Element> o(size_t(data.rows) * data.heads * problem.dv, schedules, NAN);
    const Tensor<float> lse(size_t(data.rows) * data.heads, schedules, NAN);
    const Tensor<float> sums(slots * rows * problem.dv, schedules, NAN);
    const Tensor<float> logs(slots * rows * 2, schedules, NAN);
    const Tensor<uint64_t> arrivals(2 + slots);
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
