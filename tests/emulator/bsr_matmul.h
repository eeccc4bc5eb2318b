// Products of block-sparse and dense matrices: a few problems beside a reference in f64. `Params`
// are those of the kernel, which `launch` calls, and `kStrips` of its tiles are a block row.
#pragma once

#include "problem.h"

namespace {

using blockflash::Element;
Params params;
void launch();

constexpr int kBlock = blockflash::kBlock, kN = blockflash::Config::block_n;

struct Problem {
  int block_rows, block_columns;
  int short_m, short_k;  // rows and columns that the last block has too many
  int n, ldb;            // ldb that is no multiple of 8: elements of b are copied one by one
  double density;
  float alpha, beta;
  int activation, bias;  // bias: 0 none, 1 along columns, 2 along rows
};

const Problem kProblems[] = {
    {3, 5, 0, 0, kN, kN, 0.5, 1, 0, BLOCKFLASH_ACTIVATION_NONE, 0},
    {2, 9, 5, 3, kN + 24, kN + 32, 0.6, 0.5, 2, BLOCKFLASH_ACTIVATION_SILU, 1},
    {2, 4, 1, 7, kN - 5, kN + 1, 0.7, 1, 0, BLOCKFLASH_ACTIVATION_RELU, 2},
    {2, 12, 0, 0, 8, 8, 0.9, 1, 0, BLOCKFLASH_ACTIVATION_NONE, 0},
};

void check(const Problem& problem, int number, std::mt19937& random) {
  const int m = problem.block_rows * kBlock - problem.short_m, n = problem.n;
  const int k = problem.block_columns * kBlock - problem.short_k;
  // One row in three has no block.
  std::vector<int32_t> row_ptr = {0}, col_idx;
  std::bernoulli_distribution stored(problem.density);
  for (int row = 0; row < problem.block_rows; ++row) {
    for (int column = 0; column < problem.block_columns; ++column)
      if (row != 1 && stored(random)) col_idx.push_back(column);
    row_ptr.push_back(col_idx.size());
  }
  const Tensor<Element> values(col_idx.size() * kBlock * kBlock, random, 1);
  const Tensor<Element> b((k - 1) * problem.ldb + n, random, 1), c0(m * n, random, 1);
  const Tensor<Element> bias(problem.bias == 2 ? m : n, random, 1);
  const Tensor<int32_t> columns(col_idx.size());
  std::copy(col_idx.begin(), col_idx.end(), columns.data);
  // In the order of the rows from the last to the first.
  const Tensor<int4> rows(problem.block_rows);
  for (int i = 0; i < problem.block_rows; ++i) {
    const int row = problem.block_rows - 1 - i, begin = row_ptr[row], end = row_ptr[row + 1];
    rows.data[i] = {row, begin, end, begin < end ? col_idx[begin] : 0};
  }
  std::vector<double> expected(m * n);
  for (int row = 0; row < problem.block_rows; ++row)
    for (int i = row_ptr[row]; i < row_ptr[row + 1]; ++i)
      for (int y = 0; y < kBlock; ++y)
        for (int x = 0; x < kBlock; ++x) {
          const int to = row * kBlock + y, from = col_idx[i] * kBlock + x;
          Element& value = values.data[(static_cast<size_t>(i) * kBlock + y) * kBlock + x];
          if (to >= m || from >= k) {
            value = Element(0.f);
            continue;
          }
          for (int j = 0; j < n; ++j)
            expected[to * n + j] += static_cast<float>(value) * b.at(from * problem.ldb + j);
        }
  for (int i = 0; i < m * n; ++i) {
    double& x = expected[i];
    x = problem.alpha * x + (problem.beta != 0 ? problem.beta * c0.at(i) : 0);
    if (problem.bias != 0) x += bias.at(problem.bias == 2 ? i / n : i % n);
    if (problem.activation == BLOCKFLASH_ACTIVATION_RELU) x = max(x, 0.0);
    if (problem.activation == BLOCKFLASH_ACTIVATION_SILU) x /= 1 + exp(-x);
  }
  params = {};
  blockflash_bsr_matmul_params& p = params.base;
  p.row_ptr = row_ptr.data(), p.col_idx = columns.data, p.values = values.data;
  p.b = b.data, p.ldb = problem.ldb, p.ldc = n;
  p.bias = problem.bias != 0 ? bias.data : nullptr, p.bias_per_row = problem.bias == 2;
  p.m = m, p.n = n, p.k = k;
  p.c_dtype = std::is_same_v<Element, __half> ? BLOCKFLASH_DTYPE_F16 : BLOCKFLASH_DTYPE_BF16;
  p.activation = problem.activation;
  const auto is_aligned = [](const void* data, int row) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row % 8 == 0;
  };
  p.b_vectorized = is_aligned(b.data, problem.ldb);
  p.alpha = problem.alpha, p.beta = problem.beta;
  params.rows = reinterpret_cast<const int32_t*>(rows.data);
  const unsigned ctas = problem.block_rows * kStrips * ((n + kN - 1) / kN);
  in_every_schedule(random, [&](Run& run) {
    const Tensor<Element> c(m * n, random, NAN);
    if (problem.beta != 0) std::copy_n(c0.data, c.size, c.data);
    p.c = c.data, p.c_vectorized = is_aligned(c.data, n);
    run.launch(ctas, launch);
    run.compare(number, "c", c, expected, 0.05);
  });
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int number = 0;
  for (const Problem& problem : kProblems) check(problem, number++, random);
}
