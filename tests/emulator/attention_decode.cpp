// Attention to a cache: contiguous and paged, packed and not, with lengths and lists of pages, and
// in the variant with score terms a bias, ALiBi and a mask of the last keys, beside a reference in
// f64.
#include "problem.h"

namespace {

using blockflash::Config;
using blockflash::Element;
using blockflash::kHasTerms;

blockflash::Params params;

constexpr int kAll = BLOCKFLASH_WINDOW_UNBOUNDED, kD = Config::head_dim;
constexpr bool kHasCodes = blockflash::kHasCodes;
constexpr int kPart = kHasCodes ? 16 : 8;  // of head dimensions

// An element of a cache of codes.
struct Code {
  uint8_t bits;

  static double value_of(int bits) {
    if (blockflash::kCacheCodes == BLOCKFLASH_DTYPE_I8) return static_cast<int8_t>(bits);
    const bool is_e4m3 = blockflash::kCacheCodes == BLOCKFLASH_DTYPE_E4M3;
    const int fraction_bits = is_e4m3 ? 3 : 2, bias = is_e4m3 ? 7 : 15;
    const int exponent = (bits & 127) >> fraction_bits, unit = 1 << fraction_bits;
    const int fraction = bits & (unit - 1);
    if (is_e4m3 ? (bits & 127) == 127 : exponent == 31)
      return !is_e4m3 && fraction == 0 ? (bits & 128 ? -INFINITY : INFINITY) : NAN;
    const double magnitude =
        ldexp(fraction + (exponent > 0 ? unit : 0), max(exponent, 1) - bias - fraction_bits);
    return bits & 128 ? -magnitude : magnitude;
  }
  Code() = default;
  // The nearest number, of integers 40 times as many.
  explicit Code(float x) : bits(127) {
    if (!(fabsf(x) < INFINITY)) return;
    if (blockflash::kCacheCodes == BLOCKFLASH_DTYPE_I8) x *= 40;
    double best = INFINITY;
    for (int i = 0; i < 256; ++i)
      if (fabs(value_of(i) - x) < best) best = fabs(value_of(i) - x), bits = i;
  }
  explicit operator float() const { return static_cast<float>(value_of(bits)); }
};
using Cached = std::conditional_t<kHasCodes, Code, Element>;

// Which keys have scales of their own.
enum Scales { kNoScales, kOfHeads, kOfPages, kOfKeys };

struct Problem {
  std::vector<int> queries, lengths;  // of each sequence
  int capacity, page_size;            // a page of the capacity: no block table
  int heads_kv, group, qk, dv;
  int left, right;
  unsigned ctas;
  bool packed = false, lists = false;
  float softcap = 0;
  bool sink = false;
  int bias = -1;  // its element type, or none
  bool alibi = false;
  int tail = 0;            // columns of the mask of the last keys, or none
  bool one_mask = false;   // for all sequences
  bool nonfinite = false;  // values that are NaN, hidden by the tail from all queries or some
  int chunk_min = 64;      // keys of a split
  // Of caches of codes, which have queries of either type.
  Scales k_scales = kNoScales, v_scales = kNoScales;
  bool bf16 = false;
  bool hostile = false;  // whether some scales of V are infinite, NaN, 0 or negative
  float peak = 1;        // factor of the queries, which the scales of K undo
};

constexpr int kF16 = BLOCKFLASH_DTYPE_F16, kBf16 = BLOCKFLASH_DTYPE_BF16,
              kF32 = BLOCKFLASH_DTYPE_F32;

const std::vector<Problem> kPlain = {
    {{1, 1}, {200, 200}, 200, 200, 2, 3, kD, kD, kAll, 0, 4},
    {{5, 5, 5}, {0, 77, 160}, 160, 32, 1, 4, kD, kD - 3 * kPart, 40, 0, 2, false, false, 20, true},
    {{3, 0, 7}, {9, 30, 96}, 96, 16, 1, 2, kD - kPart, kD, kAll, 0, 3, true},
};
// Two groups of splits, for tiles whose threads take a row in several turns.
const Problem kGroups{{1}, {2100}, 2100, 2100, 1, 2, kD, kD, kAll, 0, 3};
Problem with_scales(Problem problem, Scales k, Scales v, bool bf16, bool hostile = false,
                    float peak = 1) {
  problem.k_scales = k, problem.v_scales = v, problem.bf16 = bf16;
  problem.hostile = hostile, problem.peak = peak;
  return problem;
}
const std::vector<Problem> kCodes = {
    with_scales({{1, 1}, {200, 200}, 200, 200, 2, 3, kD, kD, kAll, 0, 4}, kOfHeads, kOfHeads, true,
                false, 1e9f),
    with_scales({{1, 1}, {190, 77}, 192, 16, 2, 3, kD, kD, kAll, 0, 4}, kOfPages, kOfKeys, true),
    with_scales({{2, 2}, {190, 77}, 192, 192, 2, 3, kD, kD, kAll, kAll, 4}, kOfKeys, kOfKeys, false,
                false, 1e-3f),
    with_scales({{1, 1}, {190, 77}, 192, 192, 2, 2, kD, kD, kAll, 0, 4}, kOfHeads, kOfHeads, false,
                true),
    with_scales({{9, 9}, {190, 77}, 192, 16, 1, 2, kD, kD, 30, 0, 4, false, false, 20, true},
                kOfKeys, kOfPages, true, true),
    with_scales({{4}, {190}, 192, 16, 2, 4, kD, kD, kAll, 0, 2, false, true}, kNoScales, kOfKeys,
                true),
    with_scales({{4, 4}, {150, 150}, 160, 16, 1, 4, kD, kD, kAll, 0, 2}, kOfKeys, kNoScales, false),
};
const std::vector<Problem> kTerms = {
    {{9, 9},
     {150, 150},
     150,
     150,
     2,
     2,
     kD,
     kD,
     kAll,
     kAll,
     64,
     false,
     false,
     0,
     false,
     -1,
     false,
     30},
    {{7, 7, 7, 7},
     {0, 1, 33, 160},
     160,
     16,
     1,
     4,
     kD,
     kD,
     kAll,
     0,
     3,
     false,
     false,
     0,
     true,
     -1,
     false,
     160,
     true},
    {{6, 6}, {99, 160}, 160, 32, 1, 7, kD - 8, kD, 50, 0, 2, false, false, 20, true, kF32, true, 6},
    {{5, 0, 21},
     {40, 16, 128},
     128,
     16,
     1,
     4,
     kD,
     kD,
     kAll,
     0,
     3,
     true,
     false,
     0,
     false,
     -1,
     true,
     17},
    {{4, 4},
     {77, 128},
     128,
     128,
     2,
     1,
     kD,
     kD,
     kAll,
     kAll,
     2,
     false,
     false,
     0,
     false,
     kBf16,
     false,
     1},
    {{4}, {190}, 192, 16, 2, 4, kD, kD, kAll, 0, 2, false, true, 0, false, kF16, true, 20},
    {{4, 4}, {100, 31}, 128,   64, 1,     8,  kD,    kD, kAll,  0,
     5,      false,     false, 30, false, -1, false, 9,  false, true},
    {{1}, {300}, 300, 300, 1, 2, kD, kD, kAll, 0, 9, false, false, 0, false, kF16, true},
};

// Tensors of a problem.
struct Data {
  Problem problem;
  std::mt19937 random;
  int batch, most = 0, total = 0, heads, columns, pages;
  std::vector<int> starts = {0};
  Tensor<Element> q;
  Tensor<Cached> k, v;
  Tensor<float> k_scales, v_scales;  // [batch, heads_kv], [pages, slots or 1, heads_kv]
  Tensor<float> sink, alibi;
  Tensor<int32_t> table, lengths, offsets, lists, counts;
  Tensor<uint8_t> tail;
  Tensor<unsigned char> bias;

  static int total_of(const Problem& p) {
    int total = 0;
    for (int queries : p.queries) total += queries;
    return total;
  }
  static size_t columns_of(const Problem& p) { return p.capacity / p.page_size; }

  Data(const Problem& p, int number)
      : problem(p),
        random(number),
        batch(p.queries.size()),
        total(total_of(p)),
        heads(p.heads_kv * p.group),
        columns(columns_of(p)),
        pages(batch * columns + 1),
        q(total * heads * p.qk, random, p.bf16 ? 1 : p.peak),
        k(size_t(pages) * p.page_size * p.heads_kv * p.qk, random, 1),
        v(size_t(pages) * p.page_size * p.heads_kv * p.dv, random, 1),
        k_scales(scales_of(p.k_scales)),
        v_scales(scales_of(p.v_scales)),
        sink(heads, random, 1),
        alibi(batch * heads, random, 0.1),
        table(batch * columns),
        lengths(batch),
        offsets(batch + 1),
        lists(batch * p.heads_kv * columns),
        counts(batch),
        tail(size_t(p.one_mask && !p.packed ? p.queries[0] : total) * max(p.tail, 1)),
        bias(p.bias < 0 ? 0 : size_t(total) * heads * p.capacity * (p.bias == kF32 ? 4 : 2)) {
    for (int b = 0; b < batch; ++b) {
      most = max(most, p.queries[b]);
      starts.push_back(starts[b] + p.queries[b]);
      lengths.data[b] = p.lengths[b];
      counts.data[b] = (columns + 1) / 2;
      for (int c = 0; c < columns; ++c) table.data[b * columns + c] = (b + c * batch) % pages;
      for (int h = 0; h < p.heads_kv; ++h)
        for (int c = 0; c < columns; ++c)
          lists.data[(b * p.heads_kv + h) * columns + c] = min(2 * c + h % 2, columns - 1);
    }
    std::copy(starts.begin(), starts.end(), offsets.data);
    for (size_t i = 0; i < tail.size; ++i)
      tail.data[i] = random() % 3 != 0 ? 1 + random() % 255 : 0;
    if (p.bias >= 0)
      for (size_t i = 0; i < bias.size / (p.bias == kF32 ? 4 : 2); ++i) {
        const float x = std::normal_distribution<float>()(random);
        if (p.bias == kF32) memcpy(bias.data + 4 * i, &x, 4);
        const __half half = x;
        const __nv_bfloat16 bf16 = x;
        if (p.bias != kF32)
          memcpy(bias.data + 2 * i, p.bias == kF16 ? (void*)&half : (void*)&bf16, 2);
      }
    // Scales of V are far apart.
    for (size_t i = 0; i < k_scales.size; ++i) k_scales.data[i] = (random() % 9 + 4) / 8.f / p.peak;
    for (size_t i = 0; i < v_scales.size; ++i)
      v_scales.data[i] =
          ldexpf(random() % 9 + 4, static_cast<int>(random() % 40) - (p.bf16 ? 20 : 45));
    const float odd[] = {NAN, 0, -1, INFINITY, -3, 1e30f, 1e-30f};
    for (size_t i = 0; p.hostile && i < v_scales.size; i += 3) v_scales.data[i] = odd[i / 3 % 7];
    // bf16 has numbers that f16 has not.
    if (p.bf16)
      for (size_t i = 0; i < q.size; ++i)
        q.data[i] = bits_of<Element>(__nv_bfloat16(static_cast<float>(q.data[i]) * p.peak));
    // Slots behind the last key are nobody's.
    for (int b = 0; b < batch; ++b)
      for (int key = p.lengths[b]; key < p.capacity; ++key) spoil(b, key, NAN);
    if (!p.nonfinite) return;
    for (int b = 0; b < batch; ++b) {
      // No query sees one of the last keys, and some see another one. Sums that begin with an
      // infinity may be NaN in its place.
      for (int i = 0; i < p.queries[b]; ++i) tail_row(b, i)[p.tail - 2] = 0;
      spoil(b, p.lengths[b] - 2, NAN);
      for (int i = 0; i < p.queries[b]; ++i) tail_row(b, i)[p.tail - 4] = i % 2;
      v.data[row(b, p.lengths[b] - 4, 0) * p.dv + 5] = Cached(NAN);
    }
  }

  size_t row(int b, int key, int head) const {
    const int page = columns == 1 ? b : table.data[b * columns + key / problem.page_size];
    return (size_t(page) * problem.page_size + key % problem.page_size) * problem.heads_kv + head;
  }
  size_t scales_of(Scales kind) const {
    if (kind == kNoScales) return 0;
    const size_t of = kind == kOfHeads   ? batch
                      : kind == kOfPages ? pages
                                         : pages * problem.page_size;
    return of * problem.heads_kv;
  }
  double scale_of(Scales kind, const Tensor<float>& scales, int b, int key, int head) const {
    const size_t slot = row(b, key, head);  // of a key of a head
    if (kind == kNoScales) return 1;
    if (kind == kOfKeys) return scales.data[slot];
    const size_t page = slot / problem.heads_kv / problem.page_size;
    return scales.data[(kind == kOfHeads ? b : page) * problem.heads_kv + head];
  }
  double k_at(int b, int key, int head, int column) const {
    return k.at(row(b, key, head) * problem.qk + column) *
           scale_of(problem.k_scales, k_scales, b, key, head);
  }
  double v_at(int b, int key, int head, int column) const {
    return v.at(row(b, key, head) * problem.dv + column) *
           scale_of(problem.v_scales, v_scales, b, key, head);
  }
  double q_at(size_t i) const {
    return problem.bf16 ? static_cast<float>(bits_of<__nv_bfloat16>(q.data[i])) : q.at(i);
  }

  void spoil(int b, int key, float x) {
    for (int h = 0; h < problem.heads_kv; ++h) {
      for (int c = 0; c < problem.qk; ++c) k.data[row(b, key, h) * problem.qk + c] = Cached(x);
      for (int c = 0; c < problem.dv; ++c) v.data[row(b, key, h) * problem.dv + c] = Cached(x);
    }
  }
  uint8_t* tail_row(int b, int query) const {
    return tail.data + size_t((problem.one_mask ? 0 : starts[b]) + query) * problem.tail;
  }
  double bias_of(int b, int head, int query, int key) const {
    if (problem.bias < 0) return 0;
    const size_t at = ((size_t(b) * heads + head) * most + query) * problem.capacity + key;
    if (problem.bias == kF32) return bits_of<float>(reinterpret_cast<uint32_t*>(bias.data)[at]);
    const uint16_t x = reinterpret_cast<uint16_t*>(bias.data)[at];
    return problem.bias == kF16 ? static_cast<float>(bits_of<__half>(x))
                                : static_cast<float>(bits_of<__nv_bfloat16>(x));
  }
  bool sees(int b, int head_kv, int query, int key) const {
    const Problem& p = problem;
    const int length = p.lengths[b], center = length - p.queries[b] + query;
    if (p.left != kAll && key < center - p.left) return false;
    if (p.right != kAll && key > center + p.right) return false;
    if (p.lists) {
      const int column = key / p.page_size;
      bool listed = false;
      for (int i = 0; i < counts.data[b]; ++i)
        listed |= lists.data[(b * p.heads_kv + head_kv) * columns + i] == column;
      if (!listed) return false;
    }
    const int entry = key - (length - p.tail);
    return p.tail == 0 || entry < 0 || tail_row(b, query)[entry] != 0;
  }

  void write(blockflash_attention_decode_params& to) const {
    const Problem& p = problem;
    const bool paged = columns > 1;
    to.q = q.data;
    to.cu_seqlens_q = p.packed ? offsets.data : nullptr;
    to.cache = {k.data, v.data, paged ? table.data : nullptr, lengths.data};
    to.cache.k_stride_page = int64_t(p.page_size) * p.heads_kv * p.qk;
    to.cache.k_stride_slot = p.heads_kv * p.qk, to.cache.k_stride_head = p.qk;
    to.cache.v_stride_page = int64_t(p.page_size) * p.heads_kv * p.dv;
    to.cache.v_stride_slot = p.heads_kv * p.dv, to.cache.v_stride_head = p.dv;
    to.cache.block_table_stride = columns;
    to.cache.pages = pages, to.cache.page_size = p.page_size, to.cache.capacity = p.capacity;
    if (p.lists) to.page_list = lists.data, to.page_count = counts.data;
    to.page_list_capacity = columns;
    to.q_stride_batch = p.packed ? 0 : int64_t(most) * heads * p.qk;
    to.q_stride_seq = heads * p.qk, to.q_stride_head = p.qk;
    to.o_stride_batch = p.packed ? 0 : int64_t(most) * heads * p.dv;
    to.o_stride_seq = heads * p.dv, to.o_stride_head = p.dv;
    to.lse_stride_batch = p.packed ? 0 : heads * most;
    to.lse_stride_head = p.packed ? total : most;
    to.batch = batch, to.num_heads_q = heads, to.num_heads_kv = p.heads_kv, to.group = p.group;
    to.seqlen_q = most, to.total_q = p.packed ? total : 0;
    to.head_dim_qk = p.qk, to.head_dim_v = p.dv, to.most_queries = most;
    to.splits = 8, to.chunk_min = p.chunk_min, to.chunk_max = 128;
    const float scale = 1 / sqrtf(p.qk), log2e = 1.4426950408889634f;
    const float factor = p.softcap > 0 || p.bias >= 0 || p.alibi ? log2e : scale * log2e;
    to.scores = {p.sink ? sink.data : nullptr,
                 scale,
                 factor,
                 1 / factor,
                 p.softcap > 0 ? scale / p.softcap : 0,
                 p.softcap,
                 {p.left, p.right, 1}};
  }
  void write(blockflash_score_terms& to, blockflash_tail_mask& mask) const {
    const Problem& p = problem;
    if (p.bias >= 0) {
      to.bias = bias.data, to.bias_type = p.bias;
      to.bias_stride_kv = 1, to.bias_stride_q = p.capacity;
      to.bias_stride_head = int64_t(most) * p.capacity;
      to.bias_stride_batch = int64_t(heads) * most * p.capacity;
    }
    if (p.alibi) to.alibi = alibi.data, to.alibi_stride_batch = heads, to.alibi_stride_head = 1;
    if (p.tail == 0) return;
    mask = {tail.data, p.packed || p.one_mask ? 0 : int64_t(most) * p.tail, p.tail, p.tail};
  }
};

struct Expected {
  std::vector<double> o, lse, sizes;  // sizes: of what is summed in o
};

Expected reference(const Data& data) {
  const Problem& p = data.problem;
  Expected expected = {std::vector<double>(data.total * data.heads * p.dv),
                       std::vector<double>(data.total * data.heads),
                       std::vector<double>(data.total * data.heads * p.dv)};
  for (int b = 0; b < data.batch; ++b)
    for (int i = 0; i < p.queries[b]; ++i)
      for (int h = 0; h < data.heads; ++h) {
        const int head_kv = h / p.group, token = data.starts[b] + i;
        std::vector<double> scores(p.lengths[b], -INFINITY);
        double largest = p.sink ? data.sink.data[h] : -INFINITY;
        for (int key = 0; key < p.lengths[b]; ++key) {
          if (!data.sees(b, head_kv, i, key)) continue;
          double s = 0;
          for (int c = 0; c < p.qk; ++c)
            s += data.q_at((size_t(token) * data.heads + h) * p.qk + c) *
                 data.k_at(b, key, head_kv, c);
          s /= sqrt(p.qk);
          if (p.softcap > 0) s = p.softcap * tanh(s / p.softcap);
          s += data.bias_of(b, h, i, key);
          if (p.alibi)
            s -= data.alibi.data[b * data.heads + h] * abs(i + p.lengths[b] - p.queries[b] - key);
          scores[key] = s, largest = max(largest, s);
        }
        double sum = p.sink ? exp(data.sink.data[h] - largest) : 0;
        std::vector<double> o(p.dv), size(p.dv);
        for (int key = 0; key < p.lengths[b]; ++key) {
          if (!data.sees(b, head_kv, i, key)) continue;
          const double weight = exp(scores[key] - largest);
          sum += weight;
          for (int c = 0; c < p.dv; ++c)
            o[c] += weight * data.v_at(b, key, head_kv, c),
                size[c] += fabs(weight * data.v_at(b, key, head_kv, c));
        }
        for (int c = 0; c < p.dv; ++c) {
          const size_t at = (size_t(token) * data.heads + h) * p.dv + c;
          expected.o[at] = sum > 0 ? o[c] / sum : 0;
          if (kHasCodes && sum > 0) expected.sizes[at] = size[c] / sum;
        }
        const size_t at = p.packed ? size_t(h) * data.total + token
                                   : (size_t(b) * data.heads + h) * data.most + i;
        expected.lse[at] = sum > 0 ? largest + log(sum) : -INFINITY;
      }
  return expected;
}

void write(const Data& data, blockflash_cache_scales& to) {
  const Problem& p = data.problem;
  const auto strides = [&](Scales kind, int64_t& sequence, int64_t& page, int64_t& slot,
                           int64_t& head) {
    const int64_t heads = p.heads_kv;
    sequence = kind == kOfHeads ? heads : 0, slot = kind == kOfKeys ? heads : 0;
    page = kind == kOfKeys ? heads * p.page_size : kind == kOfPages ? heads : 0;
    head = kind == kNoScales ? 0 : 1;
  };
  to.k = p.k_scales == kNoScales ? nullptr : data.k_scales.data;
  to.v = p.v_scales == kNoScales ? nullptr : data.v_scales.data;
  strides(p.k_scales, to.k_stride_sequence, to.k_stride_page, to.k_stride_slot, to.k_stride_head);
  strides(p.v_scales, to.v_stride_sequence, to.v_stride_page, to.v_stride_slot, to.v_stride_head);
}

template <class Output>
void check(const Problem& problem, int number, std::mt19937& schedules) {
  const Data data(problem, number);
  const Expected expected = reference(data);
  params = {};
  data.write(params);
  const auto write_more = [&](auto& to) {
    if constexpr (requires { to.terms; }) data.write(to.terms, to.tail_mask);
    if constexpr (requires { to.scales; }) {
      write(data, to.scales);
      to.q_dtype = problem.bf16 ? kBf16 : kF16;
    }
  };
  write_more(params);
  const int rows = min(data.most * problem.group, int{Config::rows});
  const int row_tiles = (data.most * problem.group + Config::rows - 1) / Config::rows;
  params.items = data.batch * row_tiles * problem.heads_kv * 20, params.partial_rows = rows;
  in_every_schedule(schedules, [&](Run& run) {
    const Tensor<Output> o(data.total * data.heads * problem.dv, schedules, NAN);
    const Tensor<float> lse(data.total * data.heads, schedules, NAN);
    const Tensor<float> sums(size_t(params.items) * rows * problem.dv, schedules, NAN);
    const Tensor<float> logs(size_t(params.items) * rows * 2, schedules, NAN);
    const Tensor<uint64_t> arrivals(2 + params.items);
    const Tensor<uint32_t> counter(2);
    params.o = o.data, params.lse = lse.data, params.partial_sums = sums.data;
    params.partial_logs = logs.data, params.arrivals = arrivals.data;
    params.tile_counter = counter.data;
    run.launch(problem.ctas, [] { VARIANT_SYMBOL(params); });
    run.compare(number, "o", o, expected.o, kHasCodes ? 0.004 : 0.03, expected.sizes);
    run.compare(number, "lse", lse, expected.lse, 0.01);
  });
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int number = 0;
  for (const Problem& problem : kPlain) check<Element>(problem, number++, random);
  if constexpr (kD > 256) check<Element>(kGroups, number++, random);
  if constexpr (kHasTerms)
    for (const Problem& problem : kTerms) check<Element>(problem, number++, random);
  if constexpr (kHasCodes)
    for (const Problem& problem : kCodes)
      problem.bf16 ? check<__nv_bfloat16>(problem, number++, random)
                   : check<Element>(problem, number++, random);
}
