// Unions of lists, held against sets of what each query lists and sees.
#include <map>

#include "problem.h"

namespace {

blockflash_index_union_params params;
void launch() { VARIANT_SYMBOL(params); }

constexpr int kUnbounded = BLOCKFLASH_WINDOW_UNBOUNDED;

struct Problem {
  std::vector<int> queries, keys;  // of each sequence
  int group, units, groups, granularity_log2, capacity;
  blockflash_window window = {kUnbounded, 0, 1};
  bool packed = false, packed_keys = false;
  int rows_behind = 0;  // packed rows that are in no sequence
  int alike = 0;        // of 8 entries, how many are those of the query before
};

const Problem kProblems[] = {
    {{40}, {300}, 16, 1, 1, 7, 3},
    {{37, 37}, {310, 141}, 4, 2, 2, 6, 9, {kUnbounded, 0, 1}, false, false, 0, 6},
    {{33, 0, 1, 70}, {33, 5, 90, 250}, 7, 1, 1, 4, 12, {kUnbounded, 0, 1}, true, true, 9, 4},
    {{130}, {500}, 1, 2, 1, 4, 40, {kUnbounded, kUnbounded, 1}, false, false, 0, 5},
    {{5, 4}, {100, 90}, 71, 1, 1, 4, 5, {kUnbounded, 0, 1}, true, false, 3, 2},
    {{3}, {700}, 130, 2, 2, 6, 30, {200, 100, 1}},
    {{200}, {90000}, 1, 1, 1, 4, 30, {kUnbounded, 0, 1}, false, false, 0, 3},
    {{20}, {50000}, 16, 1, 1, 4, 9, {kUnbounded, 0, 1}},
    {{90}, {50}, 16, 1, 1, 4, 4},
    {{20}, {0}, 16, 1, 1, 4, 4},
    {{20}, {64}, 16, 1, 1, 6, 0},
    {std::vector<int>(70, 3),
     std::vector<int>(70, 40),
     4,
     2,
     1,
     4,
     6,
     {kUnbounded, 0, 1},
     true,
     true,
     50},
};

// What a tile lists for its queries: how often each of them lists a block.
using Listed = std::map<int, std::map<int, int>>;

void check(const Problem& x, int number, std::mt19937& random) {
  const int batch = x.queries.size(), packs = (x.group + 63) / 64;
  const int pack = (x.group + packs - 1) / packs, pack_queries = 64 / pack;
  const int words = (2 * pack_queries + 31) / 32, log2 = x.granularity_log2;
  const int heads = x.group * x.units, columns = 16;
  int total = 0, longest = 0, all_keys = 0, capacity_keys = 0;
  const Tensor<int32_t> cu_q(batch + 1), cu_kv(batch + 1), lengths(batch);
  for (int b = 0; b < batch; ++b) {
    cu_q.data[b] = total, cu_kv.data[b] = all_keys, lengths.data[b] = x.keys[b];
    total += x.queries[b], all_keys += x.keys[b];
    longest = max(longest, x.queries[b]), capacity_keys = max(capacity_keys, x.keys[b]);
  }
  cu_q.data[batch] = total, cu_kv.data[batch] = all_keys;
  const int in_sequences = total;
  total += x.rows_behind;
  const Tensor<int32_t> entries(static_cast<size_t>(x.groups) * total * x.capacity);
  for (size_t i = 0; i < entries.size; ++i) {
    const int blocks = (capacity_keys >> log2) + 2;
    const int any = static_cast<int>(random());
    entries.data[i] = any % 10 == 0 ? any : static_cast<int>(random() % blocks) - 1;
    if (static_cast<int>(random() % 8) < x.alike && i >= static_cast<size_t>(x.capacity))
      entries.data[i] = entries.data[i - x.capacity];
    if (random() % 6 == 0 && i > 0) entries.data[i] = entries.data[i - 1];
  }
  const auto tiles_of = [&](int queries) {
    return ((queries + pack_queries - 1) / pack_queries * packs + 1) / 2;
  };
  const int tiles = x.packed
                        ? x.units * ((total * packs + 2 * pack_queries - 1) / (2 * pack_queries) +
                                     batch * (packs / 2 + 1))
                        : batch * x.units * tiles_of(longest);
  const size_t room = static_cast<size_t>(tiles) * 2 * pack_queries * x.capacity;
  in_every_schedule(random, [&](Run& run) {
    const Tensor<int32_t> described(tiles * BLOCKFLASH_INDEX_TILE_WORDS), united(room);
    const Tensor<uint32_t> members(room * words);
    const Tensor<uint16_t> o(static_cast<size_t>(total) * heads * columns);
    const Tensor<float> lse(static_cast<size_t>(total) * heads);
    std::fill_n(o.data, o.size, 7), std::fill_n(lse.data, lse.size, 7.f);
    params = {};
    blockflash_attention_decode_params& d = params.index.scaled.decode;
    d.o = o.data, d.lse = lse.data, d.batch = batch, d.seqlen_q = longest, d.total_q = total;
    d.cu_seqlens_q = x.packed ? cu_q.data : nullptr;
    d.num_heads_q = heads, d.num_heads_kv = x.units, d.group = x.group, d.head_dim_v = columns;
    d.o_stride_seq = heads * columns, d.o_stride_head = columns, d.lse_stride_head = total;
    d.scores.window = x.window;
    d.cache.seqused = x.packed_keys ? nullptr : lengths.data;
    d.cache.capacity = capacity_keys, d.cache.pages = batch;
    d.cache.page_size = x.packed_keys ? all_keys : capacity_keys;
    params.index.cu_seqlens_kv = x.packed_keys ? cu_kv.data : nullptr;
    params.index.units = x.units;
    params.index.lists = {entries.data, static_cast<int64_t>(total) * x.capacity,
                          x.capacity,   x.groups,
                          total,        x.capacity,
                          log2};
    params.unions = {described.data, united.data, members.data, pack, pack_queries, packs,
                     words,          0,           tiles};
    run.launch(tiles, launch);
    int tile = 0;
    for (int b = 0; b < batch; ++b)
      for (int unit = 0; unit < x.units; ++unit)
        for (int left = tiles_of(x.queries[b]); left-- > 0; ++tile) {
          const auto& its = reinterpret_cast<blockflash::IndexTile*>(described.data)[tile];
          if (its.sequence != b || its.unit != unit || its.row_group != 2 * left ||
              its.q_begin != (x.packed ? cu_q.data[b] : 0) || its.q_length != x.queries[b] ||
              its.kv_begin != (x.packed_keys ? cu_kv.data[b] : 0) || its.kv_length != x.keys[b])
            simt::fail("a tile is another one");
          Listed expected;
          for (int i = 0; i < 2 * pack_queries; ++i) {
            const int query =
                packs > 1 ? (its.row_group + i) / packs : its.row_group * pack_queries + i;
            if (query >= x.queries[b]) continue;
            const int64_t row = cu_q.data[b] + query, center = query + x.keys[b] - x.queries[b];
            const int64_t group = unit * x.groups / x.units;
            for (int at = 0; at < x.capacity; ++at) {
              const int64_t block = entries.data[(group * total + row) * x.capacity + at];
              const int64_t begin = block << log2,
                            end = min<int64_t>(begin + (1 << log2), x.keys[b]);
              bool seen = false;
              for (int64_t key = begin; block >= 0 && key < end; ++key)
                seen |= (x.window.left == kUnbounded || key >= center - x.window.left) &&
                        (x.window.right == kUnbounded || key <= center + x.window.right);
              if (seen) ++expected[block][i];
            }
          }
          Listed found;
          for (int kind = 0; kind < 3; ++kind) {
            const blockflash::ListedPlaces places(params.unions, x.capacity, tile);
            for (int i = 0; i < its.listed[kind]; ++i) {
              const int64_t place = places.of(kind, i);
              const uint32_t* const bits = members.data + place * words;
              bool of[2] = {false, false};
              for (int query = 0; query < 32 * words; ++query) {
                if (!(bits[query / 32] >> query % 32 & 1)) continue;
                if (query >= 2 * pack_queries) simt::fail("a member does not exist");
                of[query >= pack_queries] = true;
                ++found[united.data[place]][query];
              }
              if (of[0] + 2 * of[1] != kind + 1) simt::fail("an entry is of another kind");
            }
          }
          if (found != expected) simt::fail("a union is wrong");
        }
    for (; tile < tiles; ++tile)
      if (described.data[tile * BLOCKFLASH_INDEX_TILE_WORDS] != -1)
        simt::fail("there are too many tiles");
    for (int row = 0; row < total; ++row)
      for (int head = 0; head < heads; ++head) {
        const bool clears = x.packed && row >= in_sequences;
        const float log = lse.data[head * static_cast<size_t>(total) + row];
        for (int column = 0; column < columns; ++column)
          if (o.data[(static_cast<size_t>(row) * heads + head) * columns + column] !=
              (clears ? 0 : 7))
            simt::fail("a row of the output is wrong");
        if (log != (clears ? -INFINITY : 7.f)) simt::fail("a log-sum-exp is wrong");
      }
  });
}

}  // namespace

int main() {
  std::mt19937 random(11);
  int number = 0;
  for (const Problem& problem : kProblems) check(problem, number++, random);
}
