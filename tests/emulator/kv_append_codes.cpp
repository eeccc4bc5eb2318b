// Appends to caches of codes, held against the nearest of all codes, and queries that are turned.
#include "codes.h"

namespace {

blockflash_kv_append_codes_params params;
void launch() { VARIANT_SYMBOL(params); }

// Scales that a tensor has: none, of sequences and heads, of pages and heads, or chosen ones.
enum Scaled { kNone, kOfHeads, kOfPages, kChosen };

struct Problem {
  int codes, of_new, of_q, batch, tokens, columns, page_size, heads_q, heads_kv, dim_qk, dim_v;
  int rotary;  // dimension, or 0
  bool interleaved, packed, paged;
  Scaled k, v;
  bool hostile;
};

const Problem kProblems[] = {
    {kE4m3, kHalf, kHalf, 2, 3, 3, 16, 4, 2, 128, 64, 128, false, false, true, kChosen, kChosen},
    {kE5m2, kBrain, kHalf, 3, 1, 2, 16, 2, 1, 64, 64, 32, true, false, true, kChosen, kOfHeads},
    {kI8, kHalf, kBrain, 2, 5, 4, 32, 3, 3, 80, 96, 80, false, true, true, kOfPages, kChosen},
    {kE4m3, kBrain, kBrain, 3, 4, 1, 21, 0, 2, 256, 16, 0, false, false, false, kNone, kOfPages},
    {kI8, kBrain, kBrain, 1, 7, 2, 16, 2, 2, 16, 16, 8, true, true, true, kChosen, kChosen},
    {kE5m2, kHalf, kHalf, 2, 2, 1, 9, 1, 1, 528, 272, 512, false, true, false, kChosen, kChosen},
    {kE4m3, kHalf, kBrain, 4, 3, 3, 16, 2, 2, 32, 32, 32, true, true, true, kChosen, kOfHeads,
     true},
    {kI8, kBrain, kHalf, 4, 2, 2, 16, 1, 3, 64, 48, 0, false, false, true, kOfHeads, kChosen, true},
};

float element(int dtype, uint16_t bits) {
  return dtype == kHalf ? static_cast<float>(bits_of<__half>(bits))
                        : static_cast<float>(bits_of<__nv_bfloat16>(bits));
}

uint16_t rounded(int dtype, float x) {
  return dtype == kHalf ? bits_of<uint16_t>(__float2half_rn(x))
                        : bits_of<uint16_t>(__float2bfloat16_rn(x));
}

Tensor<uint16_t> numbers(int dtype, size_t rows, int columns, std::mt19937& random) {
  Tensor<uint16_t> all(rows * columns);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < all.size; ++i) {
    const float odd[] = {NAN, INFINITY, -INFINITY, -0.f, 1e-7f, 3e4f};
    const size_t row = i / columns;
    // A row of zeros, and rows with odd elements.
    const float x = row % 7 == 3                 ? 0.f
                    : row % 5 == 1 && i % 9 == 0 ? odd[random() % 6]
                                                 : normal(random);
    all.data[i] = rounded(dtype, x);
  }
  return all;
}

void check(const Problem& x, int number, std::mt19937& random) {
  const int pages = x.paged ? x.batch * x.columns : x.batch, capacity = x.columns * x.page_size;
  const int half = x.rotary / 2;
  const auto any = [&] { return static_cast<int32_t>(random() % 2 ? random() : random() % 20); };
  const Tensor<int32_t> table(x.batch * x.columns), lengths(x.batch), offsets(x.batch + 1);
  for (size_t i = 0; i < table.size; ++i) table.data[i] = (i * 5 + 2) % pages;
  std::shuffle(table.data, table.data + table.size, random);
  if (x.paged && !x.hostile)
    for (size_t i = 0; i < table.size; ++i) table.data[i] = i;
  for (int b = 0; b < x.batch; ++b) {
    // Some rows are before or behind the cache.
    lengths.data[b] = static_cast<int>(random() % (capacity + 3));
    offsets.data[b + 1] = min<int>(offsets.data[b] + random() % (x.tokens + 1), x.batch * x.tokens);
  }
  if (x.hostile) {
    for (size_t i = 0; i < table.size; ++i) table.data[i] = any();
    for (int b = 0; b < x.batch; ++b) lengths.data[b] = any(), offsets.data[b + 1] = any();
  }
  const int rows = x.batch * x.tokens;
  const auto k_new = numbers(x.of_new, rows * x.heads_kv, x.dim_qk, random);
  const auto v_new = numbers(x.of_new, rows * x.heads_kv, x.dim_v, random);
  const auto q = numbers(x.of_q, rows * max(x.heads_q, 1), x.dim_qk, random);
  const Tensor<float> cos(capacity * half, random, 1), sin(capacity * half, random, 1);
  const size_t slots = static_cast<size_t>(pages) * x.page_size * x.heads_kv;
  const auto scales = [&](Scaled kind) {
    const size_t size = kind == kOfHeads   ? x.batch * x.heads_kv
                        : kind == kOfPages ? pages * x.heads_kv
                        : kind == kChosen  ? slots
                                           : 0;
    Tensor<float> all(size, random, 0.1f);
    for (size_t i = 3; i < size; i += 4) all.data[i] = i % 8 == 3 ? 0.f : INFINITY;
    return all;
  };
  const auto given_k = scales(x.k), given_v = scales(x.v);

  in_every_schedule(random, [&](Run& run) {
    const Tensor<uint8_t> k(slots * x.dim_qk), v(slots * x.dim_v);
    const Tensor<uint16_t> turned(q.size);
    Tensor<float> scale_k(given_k.size), scale_v(given_v.size);
    memset(k.data, 0x5a, k.size), memset(v.data, 0x5a, v.size);
    std::copy_n(given_k.data, given_k.size, scale_k.data);
    std::copy_n(given_v.data, given_v.size, scale_v.data);
    params = {};
    blockflash_kv_append_params& p = params.append;
    blockflash_kv_cache& c = p.cache;
    c.k = k.data, c.v = v.data, c.block_table = x.paged ? table.data : nullptr;
    c.seqused = lengths.data, c.block_table_stride = x.columns;
    c.k_stride_head = x.dim_qk, c.k_stride_slot = x.heads_kv * x.dim_qk;
    c.v_stride_head = x.dim_v, c.v_stride_slot = x.heads_kv * x.dim_v;
    c.k_stride_page = c.k_stride_slot * x.page_size;
    c.v_stride_page = c.v_stride_slot * x.page_size;
    c.pages = pages, c.page_size = x.page_size, c.capacity = capacity;
    p.k_new = k_new.data, p.v_new = v_new.data;
    p.cu_seqlens_new = p.cu_seqlens_q = x.packed ? offsets.data : nullptr;
    p.k_new_stride_head = x.dim_qk, p.k_new_stride_seq = x.heads_kv * x.dim_qk;
    p.v_new_stride_head = x.dim_v, p.v_new_stride_seq = x.heads_kv * x.dim_v;
    p.k_new_stride_batch = x.tokens * p.k_new_stride_seq;
    p.v_new_stride_batch = x.tokens * p.v_new_stride_seq;
    p.q_stride_head = p.q_turned_stride_head = x.dim_qk;
    p.q_stride_seq = p.q_turned_stride_seq = x.heads_q * x.dim_qk;
    p.q_stride_batch = p.q_turned_stride_batch = x.tokens * p.q_stride_seq;
    p.batch = x.batch, p.num_heads_q = x.heads_q, p.num_heads_kv = x.heads_kv;
    p.head_dim_qk = x.dim_qk, p.head_dim_v = x.dim_v;
    p.seqlen_new = p.seqlen_q = x.tokens, p.total_new = p.total_q = rows;
    if (half > 0) {
      p.rotary_new = {cos.data, sin.data, half,          half,
                      capacity, x.rotary, x.interleaved, BLOCKFLASH_DTYPE_F32};
      p.rotary_q = p.rotary_new;
      if (x.heads_q > 0) p.q = q.data, p.q_turned = turned.data;
    }
    blockflash_cache_scales& s = params.scales;
    const auto strides = [&](Scaled kind, int64_t& sequence, int64_t& page, int64_t& slot,
                             int64_t& head) {
      if (kind == kNone) return;
      head = 1;
      if (kind == kOfHeads) sequence = x.heads_kv;
      if (kind == kOfPages) page = x.heads_kv;
      if (kind == kChosen) slot = x.heads_kv, page = x.page_size * x.heads_kv;
    };
    strides(x.k, s.k_stride_sequence, s.k_stride_page, s.k_stride_slot, s.k_stride_head);
    strides(x.v, s.v_stride_sequence, s.v_stride_page, s.v_stride_slot, s.v_stride_head);
    s.k = x.k == kNone ? nullptr : scale_k.data, s.v = x.v == kNone ? nullptr : scale_v.data;
    params.chooses_k = x.k == kChosen, params.chooses_v = x.v == kChosen;
    params.cache_dtype = x.codes, params.new_dtype = x.of_new, params.q_dtype = x.of_q;
    int lanes = 1;
    while (lanes < 32 && lanes * 8 < max(x.dim_qk, x.dim_v)) lanes *= 2;
    const int all = rows * (x.heads_kv + (p.q == nullptr ? 0 : x.heads_q));
    run.launch((all * lanes + 255) / 256, launch);
    if (x.hostile) return;

    std::vector<double> want_k(k.size, 0x5a), want_v(v.size, 0x5a);
    std::vector<double> want_scale_k(given_k.data, given_k.data + given_k.size);
    std::vector<double> want_scale_v(given_v.data, given_v.data + given_v.size);
    std::vector<double> want_q(turned.size);
    const auto turn = [&](std::vector<float>& row, int64_t position) {
      position = min<int64_t>(max<int64_t>(position, 0), capacity - 1);
      for (int i = 0; i < half; ++i) {
        const int a = x.interleaved ? 2 * i : i, b = x.interleaved ? 2 * i + 1 : i + half;
        const float c = cos.data[position * half + i], s = sin.data[position * half + i];
        const float first = row[a], second = row[b];
        row[a] = first * c - second * s, row[b] = first * s + second * c;
      }
    };
    for (int b = 0; b < x.batch; ++b) {
      const int first = x.packed ? offsets.data[b] : b * x.tokens;
      const int count = x.packed ? offsets.data[b + 1] - first : x.tokens;
      for (int i = 0; i < count; ++i) {
        const int64_t position = lengths.data[b] - count + i, row = first + i;
        for (int h = 0; h < x.heads_q && half > 0; ++h) {
          const size_t start = (row * x.heads_q + h) * x.dim_qk;
          std::vector<float> wide(x.dim_qk);
          for (int j = 0; j < x.dim_qk; ++j) wide[j] = element(x.of_q, q.data[start + j]);
          turn(wide, position);
          for (int j = 0; j < x.dim_qk; ++j)
            want_q[start + j] = j < x.rotary ? rounded(x.of_q, wide[j]) : double(q.data[start + j]);
        }
        if (position < 0 || position >= capacity) continue;
        const int column = position / x.page_size, slot = position % x.page_size;
        const int page = x.paged ? table.data[b * x.columns + column] : b;
        for (int h = 0; h < x.heads_kv; ++h) {
          const auto store = [&](const Tensor<uint16_t>& from, int dim, bool turns, Scaled kind,
                                 std::vector<double>& to, std::vector<double>& scale) {
            std::vector<float> wide(dim);
            for (int j = 0; j < dim; ++j)
              wide[j] = element(x.of_new, from.data[(row * x.heads_kv + h) * dim + j]);
            if (turns) turn(wide, position);
            const size_t place = (page * x.page_size + slot) * x.heads_kv + h;
            float by = kind == kOfHeads   ? scale[b * x.heads_kv + h]
                       : kind == kOfPages ? scale[page * x.heads_kv + h]
                                          : 1;
            if (kind == kChosen) {
              float most = 0;
              for (float y : wide) most = std::isnan(y) ? most : max(most, fabsf(y));
              by = most / static_cast<float>(greatest(x.codes));
              scale[place] = by = by == 0 ? 1 : by;
            }
            for (int j = 0; j < dim; ++j) to[place * dim + j] = nearest(x.codes, wide[j] / by);
          };
          store(k_new, x.dim_qk, half > 0, x.k, want_k, want_scale_k);
          store(v_new, x.dim_v, false, x.v, want_v, want_scale_v);
        }
      }
    }
    run.compare(number, "k", k, want_k, 0);
    run.compare(number, "v", v, want_v, 0);
    run.compare(number, "k_scale", scale_k, want_scale_k, 0);
    run.compare(number, "v_scale", scale_v, want_scale_v, 0);
    for (size_t i = 0; i < turned.size; ++i)
      // Signs of NaN are nobody's business.
      if (turned.data[i] != want_q[i] && !std::isnan(element(x.of_q, turned.data[i])))
        simt::fail("a query is wrong");
  });
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int number = 0;
  for (const Problem& problem : kProblems) check(problem, number++, random);
}
