// Bits of partial blocks, held against the definition of each pair, and transposed.
#include "problem.h"

namespace {

blockflash_block_bits_params params;
void launch() { VARIANT_SYMBOL(params); }

struct Problem {
  int groups, seqlen_q, seqlen_kv, block_q, block_kv;
  int ranges;    // 0: booleans
  int scale;     // queries and keys of squares in which all pairs are alike
  int capacity;  // partial blocks that have room, of those that there are; -1: all
};

const Problem kProblems[] = {
    {1, 64, 64, 64, 64, 0, 1, -1},       {2, 100, 150, 64, 64, 0, 1, -1},
    {1, 200, 300, 128, 128, 0, 90, -1},  {2, 130, 256, 64, 128, 0, 70, -1},
    {1, 256, 512, 256, 256, 0, 256, -1}, {2, 150, 100, 128, 64, 1, 40, -1},
    {1, 300, 301, 64, 64, 2, 64, -1},    {1, 65, 129, 64, 64, 5, 1, -1},
    {2, 128, 512, 64, 64, 0, 1, 3},      {1, 200, 200, 64, 64, 0, 70, 0},
};

bool at(const uint32_t* words, int row, int col) {
  const uint32_t word = words[32 * (row / 16) + 4 * (row % 8) + col % 8 / 2];
  return word >> (16 * (row % 16 / 8) + 2 * (col / 8) + col % 2) & 1;
}

void check(const Problem& x, int number, std::mt19937& random) {
  const int rows = (x.seqlen_q + x.block_q - 1) / x.block_q;
  const int cols = (x.seqlen_kv + x.block_kv - 1) / x.block_kv;
  const int down = x.block_q / 64, across = x.block_kv / 64, tiles = down * across;
  const int blocks = x.groups * rows * cols;
  const size_t queries = static_cast<size_t>(x.groups) * x.seqlen_q;
  std::vector<char> visible(queries * x.seqlen_kv);
  const Tensor<uint8_t> pairs(visible.size());
  const Tensor<int32_t> ranges(queries * x.ranges * 2);
  const uint32_t seed = random();
  const auto noise = [seed](uint32_t a, uint32_t b, uint32_t c) {
    uint32_t hash = seed;
    for (uint32_t x : {a, b, c}) hash = (hash ^ x) * 0x9E3779B1u, hash ^= hash >> 15;
    return hash;
  };
  for (size_t query = 0; query < queries; ++query) {
    const int group = query / x.seqlen_q, i = query % x.seqlen_q;
    for (int r = 0; r < x.ranges; ++r) {
      int begin = static_cast<int>(noise(group, i / x.scale, r) % (x.seqlen_kv + 40)) - 20;
      int end = begin + static_cast<int>(noise(group, i / x.scale, ~r) % 200) - 10;
      switch (noise(group, i / x.scale, r + 100) % 8) {
        case 0:
          begin = INT_MIN;
          break;
        case 1:
          begin = INT_MAX;
          break;
        case 2:
          end = INT_MIN;
          break;
        case 3:
          end = INT_MAX;
          break;
      }
      ranges.data[(query * x.ranges + r) * 2] = begin;
      ranges.data[(query * x.ranges + r) * 2 + 1] = end;
      for (int j = max(begin, 0); j < min(end, x.seqlen_kv); ++j)
        visible[query * x.seqlen_kv + j] = true;
    }
    for (int j = 0; x.ranges == 0 && j < x.seqlen_kv; ++j) {
      const uint32_t number = noise(group, i / x.scale, j / x.scale);
      visible[query * x.seqlen_kv + j] = number % 3 == 0;
      pairs.data[query * x.seqlen_kv + j] = number % 3 == 0 ? 1 + number / 3 % 255 : 0;
    }
  }
  // Whether a pair of a block exists, and whether it is visible.
  const auto pair = [&](int block, int i, int j) -> std::pair<bool, bool> {
    const int query = block / cols % rows * x.block_q + i, key = block % cols * x.block_kv + j;
    if (query >= x.seqlen_q || key >= x.seqlen_kv) return {false, false};
    const size_t row = static_cast<size_t>(block / cols / rows) * x.seqlen_q + query;
    return {true, visible[row * x.seqlen_kv + key]};
  };
  std::vector<double> classes(blocks);
  int partial = 0;
  for (int block = 0; block < blocks; ++block) {
    bool all = true, any = false;
    for (int i = 0; i < x.block_q; ++i)
      for (int j = 0; j < x.block_kv; ++j) {
        const auto [exists, sees] = pair(block, i, j);
        all &= !exists || sees, any |= sees;
      }
    classes[block] = any;
    partial += any && !all;
  }
  const int room = x.capacity < 0 ? partial : x.capacity;
  const Tensor<uint32_t> bits(room * tiles * 128), bits_t(bits.size);
  const Tensor<int32_t> first(blocks), counter(2);
  // Lists of every block, and transposed.
  std::vector<int32_t> row_ptr, row_ptr_t, col_idx, col_idx_t;
  for (int group = 0; group < x.groups; ++group) {
    row_ptr.push_back(group * rows * cols), row_ptr_t.push_back(group * rows * cols);
    for (int row = 0; row < rows; ++row) {
      for (int col = 0; col < cols; ++col) col_idx.push_back(col);
      row_ptr.push_back(col_idx.size());
    }
    for (int col = 0; col < cols; ++col) {
      for (int row = 0; row < rows; ++row) col_idx_t.push_back(row);
      row_ptr_t.push_back(col_idx_t.size());
    }
  }
  in_every_schedule(random, [&](Run& run) {
    const Tensor<uint8_t> visited(blocks);
    const Tensor<int32_t> block_bits(blocks), block_bits_t(blocks);
    params = {};
    blockflash_block_bits_params& p = params;
    p.source = x.ranges == 0 ? static_cast<void*>(pairs.data) : ranges.data;
    p.source_kind = x.ranges == 0 ? BLOCKFLASH_PAIRS_BOOL : BLOCKFLASH_PAIRS_RANGES;
    p.ranges = x.ranges, p.visited = visited.data, p.first = first.data;
    p.counter = counter.data, p.bits = bits.data, p.bits_t = bits_t.data;
    p.batch = 1, p.heads = x.groups, p.seqlen_q = x.seqlen_q, p.seqlen_kv = x.seqlen_kv;
    p.block_q = x.block_q, p.block_kv = x.block_kv, p.rows = rows, p.cols = cols;
    p.capacity = room * tiles;
    counter.data[0] = 0;
    p.step = BLOCKFLASH_BLOCK_BITS_CLASSIFY;
    const int count = x.ranges == 0 ? 1 : blockflash::Config::range_cols;
    run.launch(x.groups * rows * ((cols + count - 1) / count), launch);
    const auto gather = [&](int step, const std::vector<int32_t>& ends,
                            const std::vector<int32_t>& columns, const Tensor<int32_t>& out) {
      p.step = step, p.row_ptr = ends.data(), p.col_idx = columns.data(), p.block_bits = out.data;
      const int lines = step == BLOCKFLASH_BLOCK_BITS_GATHER ? rows : cols;
      run.launch((x.groups * lines + 3) / 4, launch);
    };
    gather(BLOCKFLASH_BLOCK_BITS_GATHER, row_ptr, col_idx, block_bits);
    gather(BLOCKFLASH_BLOCK_BITS_GATHER_T, row_ptr_t, col_idx_t, block_bits_t);
    if (counter.data[0] != partial * tiles || counter.data[1] != partial * tiles)
      simt::fail("the counter is wrong");
    if (x.capacity < 0) run.compare(number, "visited", visited, classes, 0);
    int shown = 0;
    for (int block = 0; block < blocks; ++block) {
      if (!visited.data[block]) continue;
      const int place = first.data[block];
      if (place < -1 || (place >= 0 && (place > (room - 1) * tiles || place % tiles != 0)))
        simt::fail("a block has no tiles");
      const int group = block / cols / rows, row = block / cols % rows, col = block % cols;
      if (block_bits.data[block] != place ||
          block_bits_t.data[(group * cols + col) * rows + row] != place)
        simt::fail("a list has other tiles");
      shown += place >= 0;
      for (int i = 0; i < x.block_q; ++i)
        for (int j = 0; j < x.block_kv; ++j) {
          const int tile = i / 64 * across + j / 64, turned = j / 64 * down + i / 64;
          const bool found = place < 0 || at(bits.data + (place + tile) * 128, i % 64, j % 64);
          const bool found_t =
              place < 0 || at(bits_t.data + (place + turned) * 128, j % 64, i % 64);
          const auto [exists, sees] = pair(block, i, j);
          if (exists ? found != sees || found_t != sees : place >= 0 && (found || found_t))
            simt::fail("a pair is wrong");
        }
    }
    if (shown != room && x.capacity >= 0 && partial >= room) simt::fail("room is left");
  });
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int number = 0;
  for (const Problem& problem : kProblems) check(problem, number++, random);
}
