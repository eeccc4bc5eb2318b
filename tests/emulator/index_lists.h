// Problems of the gradients of attention by lists, and their transposed lists by definition.
#pragma once

#include "problem.h"

namespace {

struct Problem {
  int batch, seqlen_q, seqlen_kv;  // of the longest sequences when packed
  int heads_q, heads_kv, lists, capacity, granularity_log2;
  int left, right;  // of the window, negative: unbounded
  float softcap;
  bool packed, hostile;      // hostile: garbage in the offsets, so that results are not compared
  int first_query, queries;  // of the pass; 0 queries: all
  int item_visits;
};

const Problem kProblems[] = {
    {1, 40, 130, 4, 1, 1, 2, 6, -1, 0, 0, false, false, 0, 0, 512},
    {2, 20, 141, 4, 2, 2, 4, 4, -1, 0, 0, false, false, 0, 0, 40},
    {2, 17, 200, 2, 2, 1, 3, 7, 90, 5, 20, false, false, 0, 0, 12},
    {3, 30, 100, 6, 2, 6, 3, 6, -1, 0, 0, true, false, 12, 20, 20},
    {3, 20, 100, 6, 2, 2, 3, 4, -1, 0, 0, true, true, 0, 0, 30},
    {3, 20, 170, 6, 2, 6, 2, 7, -1, 0, 0, true, true, 0, 0, 30},
};

// A problem with its lists, and how its visits are numbered.
struct Lists {
  const Problem& problem;
  std::vector<int> of_q{0}, of_kv{0};  // offsets of sequences, also where they are not packed
  int total_q, total_kv;
  int sets, set_lists, group, width_log2, bins, first_query, queries, entries;
  Tensor<int32_t> listed, cu_q, cu_kv;

  static int longest_of(const Problem& p, int batch, int longest) {
    return p.packed ? longest - batch * 7 : longest;
  }
  // Packed tensors end with rows of no sequence.
  static int total(const Problem& p, int longest) {
    int sum = p.packed ? 3 : 0;
    for (int b = 0; b < p.batch; ++b) sum += longest_of(p, b, longest);
    return sum;
  }

  Lists(const Problem& p, int number)
      : problem(p),
        total_q(total(p, p.seqlen_q)),
        total_kv(total(p, p.seqlen_kv)),
        listed(p.lists * total_q * p.capacity),
        cu_q(p.batch + 1),
        cu_kv(p.batch + 1) {
    std::mt19937 random(number + 5);
    for (int b = 0; b < p.batch; ++b) {
      of_q.push_back(of_q.back() + longest_of(p, b, p.seqlen_q));
      of_kv.push_back(of_kv.back() + longest_of(p, b, p.seqlen_kv));
    }
    const auto garbage = [&](int x) {
      return !p.hostile ? x : static_cast<int>(random() % 3 == 0 ? random() : random() % 300 - 9);
    };
    for (int b = 0; b <= p.batch; ++b)
      cu_q.data[b] = garbage(of_q[b]), cu_kv.data[b] = garbage(of_kv[b]);
    const int blocks = (p.seqlen_kv >> p.granularity_log2) + 3;
    for (size_t i = 0; i < listed.size; ++i) {
      const unsigned kind = random() % 12, entry = random();
      listed.data[i] = kind == 0 ? -1 : kind == 1 ? entry : kind == 2 ? 0 : entry % blocks;
    }
    sets = min(p.lists, p.heads_kv), set_lists = p.lists / sets;
    group = p.heads_q / max(p.lists, p.heads_kv);
    width_log2 = max(6, p.granularity_log2);
    bins = p.packed ? (total_kv >> width_log2) + p.batch
                    : p.batch * ((p.seqlen_kv + (1 << width_log2) - 1) >> width_log2);
    first_query = p.first_query, queries = p.queries > 0 ? p.queries : total_q;
    entries = set_lists * queries * p.capacity;
  }

  int sequence_of(int query) const {
    for (int b = 0; b < problem.batch; ++b)
      if (query >= of_q[b] && query < of_q[b + 1]) return b;
    return -1;
  }
  int first_bin(int b) const {
    return problem.packed ? (of_kv[b] >> width_log2) + b : b * (bins / problem.batch);
  }

  // Keys of its sequence that a query sees.
  void range_of(int query, int b, int& begin, int& end) const {
    const int keys = of_kv[b + 1] - of_kv[b], of = of_q[b + 1] - of_q[b];
    const int center = query - of_q[b] + keys - of;
    begin = problem.left < 0 ? 0 : max(0, center - problem.left);
    end = problem.right < 0 ? keys : min(keys, center + problem.right + 1);
  }

  // Calls visit(entry of the set, its query among those of the set, query, sequence, first and last
  // key of the entry that the query sees) for each entry of a set that is seen, in order.
  template <class Visit>
  void each_visit(int set, const Visit& visit) const {
    const int log2 = problem.granularity_log2;
    for (int v = 0; v < set_lists * queries; ++v) {
      const int query = first_query + v % queries, b = sequence_of(query);
      if (b < 0) continue;
      int begin, end;
      range_of(query, b, begin, end);
      for (int i = 0; i < problem.capacity; ++i) {
        const int64_t list = set * set_lists + v / queries;
        const int64_t entry = listed.data[(list * total_q + query) * problem.capacity + i];
        const int64_t from = max<int64_t>(entry << log2, begin);
        const int64_t to = min<int64_t>((entry + 1) << log2, end);
        if (entry >= 0 && from < to)
          visit(v * problem.capacity + i, v, query, b, static_cast<int>(from),
                static_cast<int>(to));
      }
    }
  }

  int bin_of(int b, int key) const { return first_bin(b) + (key >> width_log2); }
  int slabs() const {
    return (set_lists * queries + BLOCKFLASH_INDEX_SLAB - 1) / BLOCKFLASH_INDEX_SLAB;
  }

  // Everything but operands and workspace.
  void write(blockflash_attention_index_bwd_params& p) const {
    blockflash_attention_fwd_params& fwd = p.bwd.base;
    p = {};
    fwd.batch = problem.batch, fwd.seqlen_q = problem.seqlen_q, fwd.seqlen_kv = problem.seqlen_kv;
    fwd.total_q = total_q, fwd.total_kv = total_kv;
    fwd.num_heads_q = problem.heads_q, fwd.num_heads_kv = problem.heads_kv;
    if (problem.packed) fwd.cu_seqlens_q = cu_q.data, fwd.cu_seqlens_kv = cu_kv.data;
    const auto side = [](int x) { return x < 0 ? BLOCKFLASH_WINDOW_UNBOUNDED : x; };
    fwd.scores.window = {side(problem.left), side(problem.right), 1};
    p.lists = {listed.data,
               int64_t{total_q} * problem.capacity,
               problem.capacity,
               problem.lists,
               total_q,
               problem.capacity,
               problem.granularity_log2};
    p.sets = sets, p.set_lists = set_lists, p.group = group, p.bins = bins;
    p.first_query = first_query, p.queries = queries, p.slabs = slabs();
    p.item_visits = problem.item_visits;
    p.max_items = bins + entries / problem.item_visits;
    p.max_parts = 2 * (entries / problem.item_visits);
    p.first_pass = p.last_pass = 1;
  }
};

// What the transposition of a set gives, by definition.
struct Transpose {
  std::vector<int> lengths, begins, places;
  std::vector<uint32_t> visits;  // in the place of unseen entries
  std::vector<blockflash_index_item> items;
  std::vector<int> first_part;

  Transpose(const Lists& lists, int set) : lengths(lists.bins), places(lists.entries, -1) {
    const Problem& p = lists.problem;
    const int bits = max(6 - p.granularity_log2, 0);
    std::vector<std::vector<std::pair<int, uint32_t>>> of_bin(lists.bins);
    lists.each_visit(set, [&](int entry, int v, int, int b, int from, int) {
      const uint32_t run = from >> p.granularity_log2 & ((1 << bits) - 1);
      of_bin[lists.bin_of(b, from)].push_back({entry, static_cast<uint32_t>(v) << bits | run});
    });
    int parts = 0;
    for (int bin = 0; bin < lists.bins; ++bin) {
      const int count = static_cast<int>(of_bin[bin].size());
      lengths[bin] = count;
      begins.push_back(static_cast<int>(visits.size()));
      first_part.push_back(parts);
      for (int at = 0; at < count; at += p.item_visits) {
        const bool several = count > p.item_visits;
        items.push_back(
            {bin, begins[bin] + at, min(count - at, p.item_visits), several ? parts : -1});
        parts += several;
      }
      for (const auto& [entry, word] : of_bin[bin]) {
        places[entry] = static_cast<int>(visits.size());
        visits.push_back(word);
      }
    }
  }
};

}  // namespace
