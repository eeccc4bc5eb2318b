// Bits of partial blocks, held against the definition of each pair, and transposed.
#include "problem.h"

namespace {

blockflash_block_bits_params params;
void launch() { VARIANT_SYMBOL(params); }

struct Problem {
  int groups, seqlen_q, seqlen_kv, block_q, block_kv;
  int kind = BLOCKFLASH_PAIRS_BOOL;
  int ranges = 0;     // of BLOCKFLASH_PAIRS_RANGES
  int scale = 1;      // queries and keys of squares in which all pairs are alike
  int capacity = -1;  // partial blocks that have room, of those that there are; -1: all
  blockflash_window within = {BLOCKFLASH_WINDOW_UNBOUNDED, BLOCKFLASH_WINDOW_UNBOUNDED, 0};
  int stride = 1, diagonal = 0;
  std::vector<int> grid, window, dilation;
  int cols_of_cta = 5;
};

const blockflash_window kCausal = {BLOCKFLASH_WINDOW_UNBOUNDED, 0, 1};
const blockflash_window kWindow = {40, 10, 0};
constexpr int kBool = BLOCKFLASH_PAIRS_BOOL, kRanges = BLOCKFLASH_PAIRS_RANGES,
              kDocuments = BLOCKFLASH_PAIRS_DOCUMENTS, kTree = BLOCKFLASH_PAIRS_TREE,
              kStrided = BLOCKFLASH_PAIRS_STRIDED, kGrid = BLOCKFLASH_PAIRS_NEIGHBORHOOD;

const Problem kProblems[] = {
    {1, 64, 64, 64, 64, kBool},
    {2, 100, 150, 64, 64, kBool},
    {1, 200, 304, 128, 128, kBool, 0, 90},
    {2, 130, 256, 64, 128, kBool, 0, 70},
    {1, 256, 512, 256, 256, kBool, 0, 256},
    {1, 200, 336, 64, 64, kBool, 0, 30, -1, kWindow},
    {2, 150, 100, 128, 64, kRanges, 1, 40},
    {1, 300, 301, 64, 64, kRanges, 2, 64},
    {1, 65, 129, 64, 64, kRanges, 5, 1},
    {1, 256, 320, 64, 64, kRanges, 1, 200, -1, kCausal},
    {2, 128, 512, 64, 64, kBool, 0, 1, 3},
    {1, 200, 200, 64, 64, kBool, 0, 70, 0},
    {2, 300, 333, 64, 64, kDocuments, 0, 100},
    {1, 300, 320, 128, 64, kDocuments, 0, 70, -1, kCausal},
    {1, 200, 640, 64, 64, kDocuments, 0, 640, -1, kWindow},
    {1, 100, 100, 64, 64, kDocuments, 0, 1},
    {2, 200, 300, 64, 64, kTree, 0, 1},
    {1, 256, 256, 128, 128, kTree, 0, 2},
    {1, 1500, 1536, 64, 64, kTree, 0, 3},
    {1, 1400, 1400, 256, 256, kTree, 0, 4, -1, kWindow},
    {1, 200, 300, 64, 64, kStrided, 0, 1, -1, kWindow, 3, 0},
    {1, 300, 200, 64, 128, kStrided, 0, 1, -1, kCausal, 50, -100},
    {1, 150, 150, 64, 64, kStrided, 0, 1, -1, kCausal, 1, 7},
    {.groups = 1,
     .seqlen_q = 200,
     .seqlen_kv = 200,
     .block_q = 64,
     .block_kv = 64,
     .kind = kGrid,
     .grid = {200},
     .window = {70},
     .dilation = {1}},
    {.groups = 1,
     .seqlen_q = 320,
     .seqlen_kv = 320,
     .block_q = 64,
     .block_kv = 64,
     .kind = kGrid,
     .grid = {16, 20},
     .window = {3, 4},
     .dilation = {2, 3}},
    {.groups = 1,
     .seqlen_q = 336,
     .seqlen_kv = 336,
     .block_q = 128,
     .block_kv = 64,
     .kind = kGrid,
     .within = kCausal,
     .grid = {6, 7, 8},
     .window = {2, 3, 8},
     .dilation = {1, 2, 1}},
    {.groups = 1,
     .seqlen_q = 144,
     .seqlen_kv = 144,
     .block_q = 64,
     .block_kv = 64,
     .kind = kGrid,
     .grid = {72, 2},
     .window = {72, 1},
     .dilation = {1, 2},
     .cols_of_cta = 128},
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
  const bool is_bool = x.kind == kBool;
  const Tensor<uint8_t> pairs(is_bool ? visible.size() : 0);
  // Ranges of each query, ids of documents, or parents.
  const Tensor<int32_t> numbers(x.kind == kRanges ? queries * x.ranges * 2 : x.seqlen_q);
  const Tensor<int32_t> ids(x.seqlen_kv), jumps(4 * x.seqlen_q);
  const uint32_t seed = random();
  const auto noise = [seed](uint32_t a, uint32_t b, uint32_t c) {
    uint32_t hash = seed;
    for (uint32_t x : {a, b, c}) hash = (hash ^ x) * 0x9E3779B1u, hash ^= hash >> 15;
    return hash;
  };
  if (x.kind == kDocuments) {
    const auto id = [&](int at, int which) -> int32_t {
      const int number = noise(at / x.scale, 0, 0) % 4;
      // Padding, the highest id, and a token of another document than its neighbours.
      return number == 0                      ? (noise(at, which, 1) % 2 == 0 ? INT_MIN : -1)
             : noise(at, which, 2) % 150 == 0 ? INT_MAX
                                              : at / x.scale;
    };
    for (int i = 0; i < x.seqlen_q; ++i) numbers.data[i] = id(i, 0);
    for (int j = 0; j < x.seqlen_kv; ++j) ids.data[j] = id(j, 1);
  }
  for (int i = 0; x.kind == kTree && i < x.seqlen_q; ++i) {
    // Any node, even itself and later ones; a chain; the last few nodes; any number.
    const int any = static_cast<int>(noise(i, 3, 0) % (x.seqlen_q + 20)) - 10;
    const int near = i - 1 - static_cast<int>(noise(i, 4, 0) % 5);
    numbers.data[i] = x.scale == 1   ? any
                      : x.scale == 2 ? i - 1
                      : x.scale == 3
                          ? near
                          : (noise(i, 5, 0) % 8 == 0 ? static_cast<int>(noise(i, 6, 0)) : near);
  }
  // The definition of what a query sees.
  const auto shown = [&](int i, int j) {
    if (x.kind == kDocuments) return numbers.data[i] >= 0 && numbers.data[i] == ids.data[j];
    if (x.kind == kStrided) return (i + x.diagonal - j) % x.stride == 0;
    if (x.kind == kTree) {
      const int before = x.seqlen_kv - x.seqlen_q;
      if (j < before) return true;
      for (int node = i;;) {
        if (node == j - before) return true;
        const int parent = numbers.data[node];
        if (parent < 0 || parent >= node) return false;
        node = parent;
      }
    }
    for (int axis = x.grid.size() - 1; axis >= 0; --axis) {
      const int size = x.grid[axis], step = x.dilation[axis], count = x.window[axis];
      const int own = i % size, other = j % size;
      // Of the positions with the same remainder those around the own one.
      const int all = (size - own % step + step - 1) / step;
      const int start = min(max(own / step - count / 2, 0), all - count);
      if (other % step != own % step || other / step < start || other / step >= start + count)
        return false;
      i /= size, j /= size;
    }
    return true;
  };
  const auto inside = [&](int i, int j) {
    const int64_t away =
        int64_t{j} - i - (x.within.align_bottom_right ? x.seqlen_kv - x.seqlen_q : 0);
    return (x.within.left == BLOCKFLASH_WINDOW_UNBOUNDED || away >= -int64_t{x.within.left}) &&
           (x.within.right == BLOCKFLASH_WINDOW_UNBOUNDED || away <= x.within.right);
  };
  for (size_t query = 0; query < queries; ++query) {
    const int group = query / x.seqlen_q, i = query % x.seqlen_q;
    char* const row = visible.data() + query * x.seqlen_kv;
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
      numbers.data[(query * x.ranges + r) * 2] = begin;
      numbers.data[(query * x.ranges + r) * 2 + 1] = end;
      for (int j = max(begin, 0); j < min(end, x.seqlen_kv); ++j) row[j] = true;
    }
    for (int j = 0; j < x.seqlen_kv; ++j) {
      const uint32_t number = noise(group, i / x.scale, j / x.scale);
      if (is_bool) {
        row[j] = number % 3 == 0;
        pairs.data[query * x.seqlen_kv + j] = number % 3 == 0 ? 1 + number / 3 % 255 : 0;
      } else if (x.kind != kRanges) {
        row[j] = shown(i, j);
      }
      row[j] = row[j] && inside(i, j);
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
    p.source = is_bool ? static_cast<void*>(pairs.data) : numbers.data;
    p.source_kind = x.kind, p.ids_kv = ids.data, p.jumps = jumps.data, p.within = x.within;
    p.stride = x.stride, p.diagonal = x.diagonal, p.axes = x.grid.size();
    for (int axis = 0; axis < p.axes; ++axis)
      p.grid[axis] = x.grid[axis], p.window[axis] = x.window[axis],
      p.dilation[axis] = x.dilation[axis];
    p.ranges = x.ranges, p.visited = visited.data, p.first = first.data;
    p.counter = counter.data, p.bits = bits.data, p.bits_t = bits_t.data;
    p.batch = 1, p.heads = x.groups, p.seqlen_q = x.seqlen_q, p.seqlen_kv = x.seqlen_kv;
    p.block_q = x.block_q, p.block_kv = x.block_kv, p.rows = rows, p.cols = cols;
    p.capacity = room * tiles, p.cols_of_cta = x.cols_of_cta;
    counter.data[0] = 0;
    if (x.kind == kTree) {
      p.step = BLOCKFLASH_BLOCK_BITS_JUMPS;
      run.launch((x.seqlen_q + 1023) / 1024, launch);
    }
    p.step = BLOCKFLASH_BLOCK_BITS_CLASSIFY;
    run.launch(x.groups * rows * ((cols + x.cols_of_cta - 1) / x.cols_of_cta), launch);
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
