// What the programs of attention share: problems with and without score terms, their tensors, and
// scores in f64.
#pragma once

#include "problem.h"

namespace {

using blockflash::Config;
using blockflash::Element;
using blockflash::kHasTerms;

constexpr int kHeads = 2;  // of queries; they share the keys of one
constexpr int kAll = BLOCKFLASH_WINDOW_UNBOUNDED;
constexpr int kQ = Config::block_q, kKv = Config::block_kv, kD = Config::head_dim;

struct Problem {
  int seqlen_q, seqlen_kv;
  int qk, dv;       // columns of q and k, and of v and o
  int left, right;  // sides of the window, from the last query and the last key on
  float peak;       // factor of the queries: peaked rows move the reference of the softmax
  float softcap;
  bool sink, nonfinite;
  int bias = -1;         // its element type, or none
  int strides = 0b1111;  // which of batch, head, query and key the bias has; 0b10000: transposed
  bool alibi = false;
  int block = 0;  // queries and keys of the blocks of a mask with bits, or none
  int batch = 1;
  bool hostile = false;  // whether places of bits are garbage
};

// A number that follows from others and looks like any.
inline uint32_t hash(uint32_t a, uint32_t b, uint32_t c = 0) {
  uint32_t x = a * 0x9E3779B9u ^ b * 0x85EBCA6Bu ^ c * 0xC2B2AE35u;
  x = (x ^ x >> 15) * 0x2C1B3C6Du;
  x = (x ^ x >> 12) * 0x297A2D39u;
  return x ^ x >> 15;
}

template <class T>
Tensor<T> tensor_of(const std::vector<T>& values) {
  Tensor<T> tensor(values.size());
  std::copy(values.begin(), values.end(), tensor.data);
  return tensor;
}

// The blocks of a mask with bits, the same for all batch entries and heads: a third is not listed,
// a third is full.
struct Blocks {
  int block = 0, rows = 0, cols = 0;

  bool is_listed(int row, int col) const { return (row + col) % 3 != 2; }
  bool is_partial(int row, int col) const { return (row + col) % 3 == 1; }
  bool is_visible(int query, int key) const {
    if (block == 0) return true;
    const int row = query / block, col = key / block;
    return is_listed(row, col) && (!is_partial(row, col) || hash(query, key) % 3 != 0);
  }
};

// The lists of blocks, transposed or not, with their bits.
struct Lists {
  Tensor<int32_t> row_ptr, col_idx, row_order, block_bits;
  Tensor<uint32_t> bits;

  static Lists of(const Blocks& blocks, bool transposed) {
    const int rows = transposed ? blocks.cols : blocks.rows,
              cols = transposed ? blocks.rows : blocks.cols, tiles = blocks.block / 64;
    std::vector<int32_t> row_ptr = {0}, col_idx, row_order, block_bits;
    std::vector<uint32_t> bits;
    for (int row = 0; row < rows; ++row) {
      row_order.push_back(rows - 1 - row);
      for (int col = 0; col < cols; ++col) {
        const auto [r, c] = transposed ? std::pair(col, row) : std::pair(row, col);
        if (!blocks.is_listed(r, c)) continue;
        col_idx.push_back(col);
        const int tile = static_cast<int>(bits.size() / BLOCKFLASH_BIT_TILE_WORDS);
        block_bits.push_back(blocks.is_partial(r, c) ? tile : -1);
        if (!blocks.is_partial(r, c)) continue;
        for (int at = 0; at < tiles * tiles; ++at) {
          const size_t first = bits.size();
          bits.resize(first + BLOCKFLASH_BIT_TILE_WORDS);
          for (int i = 0; i < 64; ++i)
            for (int j = 0; j < 64; ++j) {
              const int of_row = row * blocks.block + at / tiles * 64 + i,
                        of_col = col * blocks.block + at % tiles * 64 + j;
              const bool visible = transposed ? blocks.is_visible(of_col, of_row)
                                              : blocks.is_visible(of_row, of_col);
              if (visible)
                bits[first + 32 * (i / 16) + 4 * (i % 8) + j % 8 / 2] |=
                    1u << (16 * (i % 16 / 8) + 2 * (j / 8) + j % 2);
            }
        }
      }
      row_ptr.push_back(static_cast<int32_t>(col_idx.size()));
    }
    return {tensor_of(row_ptr), tensor_of(col_idx), tensor_of(row_order), tensor_of(block_bits),
            tensor_of(bits)};
  }

  // Places of bits that nobody has validated: kernels clamp them, whatever they compute then.
  void spoil() const {
    const int32_t tiles = static_cast<int32_t>(bits.size / BLOCKFLASH_BIT_TILE_WORDS);
    const int32_t garbage[] = {INT32_MIN, tiles - 1, INT32_MAX, -2, tiles, INT32_MAX - 1, 1 << 24};
    for (size_t i = 0; i < block_bits.size; ++i) block_bits.data[i] = garbage[i % 7];
  }

  blockflash_block_mask mask(const Blocks& blocks) const {
    return {.row_ptr = row_ptr.data,
            .col_idx = col_idx.data,
            .row_order = row_order.data,
            .cu_rows = nullptr,
            .rows = static_cast<int32_t>(row_order.size),
            .block_q = blocks.block,
            .block_kv = blocks.block,
            .groups_per_batch = 0,
            .heads_per_group = kHeads};
  }
};

struct Data {
  Problem problem;
  int number;
  std::mt19937 random;  // of its own, so that the data do not depend on how often threads meet
  Blocks blocks;
  Tensor<Element> q, k, v;
  Tensor<float> sink, alibi;
  Lists lists, lists_t;
  Tensor<unsigned char> bias;
  int64_t bias_strides[4] = {};
  int bias_sizes[4];

  Data(const Problem& of, int number)
      : problem(of),
        number(number),
        random(number),
        blocks{of.block, of.block ? (of.seqlen_q + of.block - 1) / of.block : 0,
               of.block ? (of.seqlen_kv + of.block - 1) / of.block : 0},
        q(of.batch * of.seqlen_q * kHeads * of.qk, random, of.peak),
        k(of.batch * of.seqlen_kv * of.qk, random, 1),
        v(of.batch * of.seqlen_kv * of.dv, random, 1),
        sink(kHeads, random, 2),
        alibi(of.batch * kHeads, random, .02f),
        lists(Lists::of(blocks, false)),
        lists_t(Lists::of(blocks, true)),
        bias(bias_elements() * bias_bytes()) {
    if (problem.nonfinite) {
      v.data[(problem.seqlen_kv - 2) * problem.dv + 5] = Element(INFINITY);
      v.data[(problem.seqlen_kv - 40) * problem.dv + 7] = Element(-INFINITY);
      v.data[problem.seqlen_kv / 2 * problem.dv + 9] = Element(NAN);
    }
    fill_bias();
    if (problem.hostile) lists.spoil(), lists_t.spoil();
  }

  size_t bias_bytes() const { return problem.bias == BLOCKFLASH_DTYPE_F32 ? 4 : 2; }
  size_t bias_elements() {
    const int full[4] = {problem.batch, kHeads, problem.seqlen_q, problem.seqlen_kv};
    size_t count = problem.bias < 0 ? 0 : 1;
    for (int i = 0; i < 4; ++i) {
      bias_sizes[i] = problem.strides >> (3 - i) & 1 ? full[i] : 1;
      count *= bias_sizes[i];
    }
    return count;
  }
  // Values that no pair sees are NaN.
  void fill_bias() {
    if (problem.bias < 0) return;
    const bool transposed = problem.strides & 0b10000;
    const int order[4] = {0, 1, transposed ? 3 : 2, transposed ? 2 : 3};
    int64_t stride = 1;
    for (int i = 3; i >= 0; --i) {
      bias_strides[order[i]] = bias_sizes[order[i]] == 1 ? 0 : stride;
      stride *= bias_sizes[order[i]];
    }
    for (int b = 0; b < bias_sizes[0]; ++b)
      for (int h = 0; h < bias_sizes[1]; ++h)
        for (int i = 0; i < bias_sizes[2]; ++i)
          for (int j = 0; j < bias_sizes[3]; ++j) {
            const bool full = bias_sizes[2] > 1 && bias_sizes[3] > 1;
            const float x =
                full && !is_visible(i, j) ? NAN : hash(b * 2 + h, i, j) % 1000 / 500.f - 1.f;
            unsigned char* const to = bias.data + bias_at(b, h, i, j) * bias_bytes();
            if (problem.bias == BLOCKFLASH_DTYPE_F32)
              *reinterpret_cast<float*>(to) = x;
            else if (problem.bias == BLOCKFLASH_DTYPE_F16)
              *reinterpret_cast<__half*>(to) = __half(x);
            else
              *reinterpret_cast<__nv_bfloat16*>(to) = __nv_bfloat16(x);
          }
  }
  int64_t bias_at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return b * bias_strides[0] + h * bias_strides[1] + i * bias_strides[2] + j * bias_strides[3];
  }
  double bias_of(int b, int h, int i, int j) const {
    if (problem.bias < 0) return 0;
    return blockflash::load_element(bias.data, bias_at(b, h, i, j), problem.bias);
  }

  bool is_visible(int query, int64_t key) const {
    const int64_t diagonal = query + problem.seqlen_kv - problem.seqlen_q;
    return key >= diagonal - problem.left && key <= diagonal + problem.right &&
           blocks.is_visible(query, static_cast<int>(key));
  }

  float scale() const { return 1 / sqrtf(problem.qk); }
  double scaled(int b, int h, int i, int j) const {
    double sum = 0;
    for (int d = 0; d < problem.qk; ++d)
      sum += q.at(((b * problem.seqlen_q + i) * kHeads + h) * problem.qk + d) *
             k.at((b * problem.seqlen_kv + j) * problem.qk + d);
    return sum * scale();
  }
  double score(int b, int h, int i, int j) const {
    double x = scaled(b, h, i, j);
    if (problem.softcap > 0) x = problem.softcap * tanh(x / problem.softcap);
    x += bias_of(b, h, i, j);
    if (problem.alibi)
      x -= alibi.at(b * kHeads + h) * fabs(i + problem.seqlen_kv - problem.seqlen_q - j);
    return x;
  }

  // Everything but outputs.
  void write(blockflash_attention_fwd_params& p) const {
    const auto [seqlen_q, seqlen_kv, qk, dv, left, right, peak, cap, has_sink, nonfinite, bias,
                strides, has_alibi, block, batch, hostile] = problem;
    p.q = q.data, p.k = k.data, p.v = v.data;
    p.q_stride_batch = seqlen_q * kHeads * qk, p.o_stride_batch = seqlen_q * kHeads * dv;
    p.k_stride_batch = seqlen_kv * qk, p.v_stride_batch = seqlen_kv * dv;
    p.q_stride_seq = kHeads * qk, p.o_stride_seq = kHeads * dv;
    p.q_stride_head = qk, p.o_stride_head = dv;
    p.k_stride_seq = qk, p.v_stride_seq = dv;
    p.lse_stride_batch = kHeads * seqlen_q, p.lse_stride_head = seqlen_q;
    p.batch = batch, p.num_heads_kv = 1, p.num_heads_q = kHeads;
    p.seqlen_q = seqlen_q, p.seqlen_kv = seqlen_kv;
    p.head_dim_qk = qk, p.head_dim_v = dv;
    blockflash_scores& scores = p.scores;
    scores.sink = has_sink ? sink.data : nullptr;
    scores.scale = scale(), scores.softcap = cap;
    const bool is_scaled = cap > 0 || bias >= 0 || has_alibi;
    scores.scale_log2 = blockflash::kLog2e * (is_scaled ? 1 : scores.scale);
    scores.inverse_scale_log2 = 1 / scores.scale_log2;
    scores.scale_over_cap = cap > 0 ? scores.scale / cap : 0;
    scores.window = {left, right, 1};
    if (block > 0) p.block_mask = lists.mask(blocks);
  }
  void write(blockflash_score_terms& terms) const {
    terms = {};
    if (problem.bias >= 0) terms.bias = bias.data, terms.bias_type = problem.bias;
    terms.bias_stride_batch = bias_strides[0], terms.bias_stride_head = bias_strides[1];
    terms.bias_stride_q = bias_strides[2], terms.bias_stride_kv = bias_strides[3];
    if (problem.alibi) terms.alibi = alibi.data;
    terms.alibi_stride_batch = kHeads, terms.alibi_stride_head = 1;
    if (problem.block > 0) {
      terms.block_bits = lists.block_bits.data, terms.bits = lists.bits.data;
      terms.bit_tiles = static_cast<int32_t>(lists.bits.size / BLOCKFLASH_BIT_TILE_WORDS);
    }
  }

  unsigned query_tiles() const {
    if (problem.block > 0) return blocks.rows * (problem.block / kQ);
    return (problem.seqlen_q + kQ - 1) / kQ;
  }
};

struct Expected {
  std::vector<double> o, lse;
};

Expected forward(const Data& data) {
  const auto& [seqlen_q, seqlen_kv, qk, dv, left, right, peak, cap, has_sink, nonfinite, bias,
               strides, has_alibi, block, batch, hostile] = data.problem;
  Expected expected{std::vector<double>(batch * seqlen_q * kHeads * dv),
                    std::vector<double>(batch * kHeads * seqlen_q)};
  for (int b = 0; b < batch; ++b)
    for (int h = 0; h < kHeads; ++h)
      for (int i = 0; i < seqlen_q; ++i) {
        std::vector<double> scores(seqlen_kv, -INFINITY), o(dv);
        double largest = has_sink ? data.sink.at(h) : -INFINITY;
        for (int j = 0; j < seqlen_kv; ++j) {
          if (!data.is_visible(i, j)) continue;
          scores[j] = data.score(b, h, i, j);
          largest = std::max(largest, scores[j]);
        }
        double sum = has_sink ? exp(data.sink.at(h) - largest) : 0;
        for (int j = 0; j < seqlen_kv; ++j) {
          if (scores[j] == -INFINITY) continue;
          const double weight = exp(scores[j] - largest);
          sum += weight;
          for (int d = 0; d < dv; ++d) o[d] += weight * data.v.at((b * seqlen_kv + j) * dv + d);
        }
        for (int d = 0; d < dv; ++d)
          expected.o[((b * seqlen_q + i) * kHeads + h) * dv + d] = sum == 0 ? 0 : o[d] / sum;
        expected.lse[(b * kHeads + h) * seqlen_q + i] = sum == 0 ? -INFINITY : largest + log(sum);
      }
  return expected;
}

// Problems of kernels with score terms.
const Problem kTermProblems[] = {
    {kQ + 6, 2 * kKv + 2, kD, kD, kAll, 0, 1, 0, false, false, BLOCKFLASH_DTYPE_F16},
    {kQ + 6, 2 * kKv + 1, kD, kD, kAll, kAll, 30, 0, true, false, BLOCKFLASH_DTYPE_BF16, 0b0111,
     false, 0, 2},
    {40, 2 * kKv + 30, kD, kD - 24, 70, 5, 3, 20, true, false, BLOCKFLASH_DTYPE_F32, 0b11011, true},
    {40, kKv + 30, kD - 8, kD, kAll, 0, 3, 0, false, false, BLOCKFLASH_DTYPE_F16, 0b0001, true, 0,
     2},
    {kQ + 9, 190, kD, kD, kAll, kAll, 1, 0, false, false, -1, 0, false, 64},
    {kQ + 9, 190, kD, kD, kAll, 0, 1, 0, true, false, BLOCKFLASH_DTYPE_F16, 0b1011, true, 64, 2},
    {150, 260, kD, kD, 100, kAll, 3, 30, true, false, BLOCKFLASH_DTYPE_F32, 0b0010, false, 128},
    {9, 70, kD, kD, kAll, kAll, 1000, 0, false, false, BLOCKFLASH_DTYPE_F32, 0, true},
    {kQ + 9, 190, kD, kD, kAll, kAll, 1, 0, false, false, -1, 0, false, 64, 1, true},
    {150, 260, kD, kD, 100, kAll, 1, 0, true, false, -1, 0, true, 128, 2, true},
};

// Of problems with garbage it matters only that a result is finite, and the same each time.
double tolerance_of(const Problem& problem, double usual) {
  return problem.hostile ? INFINITY : usual;
}

}  // namespace
