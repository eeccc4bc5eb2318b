// Items of attention by an index to latent rows, for kernels with a CTA for each.
#pragma once

#include "blockflash/config/latent.cuh"
#include "blockflash/decode/items.cuh"
#include "blockflash/decode/listed_queries.cuh"

namespace blockflash {
namespace {

// A quotient for a thread that waits for nothing else. Mostly the divisor is 1.
__device__ __forceinline__ int early_quotient(int a, int b) { return b == 1 ? a : a / b; }

// A split of the positions of a list, for one row tile of one query, which is a sequence of its
// own. It follows from the parameters alone but for the sequence of packed queries, which loaders
// find.
struct ListItem : DecodeItem {
  int index;  // of the query, of all
  int key_head;
  int64_t list;  // its first entry, from the first one of all

  // Item `number` of a launch without clusters; or the split of a rank in cluster `number` of as
  // many CTAs as are given, whose splits are longer than asked for if they are too few.
  __device__ __forceinline__ ListItem(const blockflash_attention_index_params& params, int number,
                                      int cluster_size = 0, int rank = 0) {
    const blockflash_attention_decode_params& p = params.scaled.decode;
    const ListSplits all(params);
    const bool clustered = cluster_size > 0;
    const int row_tiles = ceil_div(p.group, AttentionLatentConfig::rows),
              of_split = row_tiles * params.units;
    const int of_query = clustered ? of_split : all.splits * of_split;
    index = early_quotient(number, of_query);
    const int within = number - index * of_query, of_run = early_quotient(within, of_split);
    const int of_tile = within - of_run * of_split;
    row_tile = early_quotient(of_tile, params.units);
    const int unit = of_tile - row_tile * params.units;
    sequence = p.cu_seqlens_q == nullptr ? early_quotient(index, p.seqlen_q) : 0;
    q_begin = p.cu_seqlens_q == nullptr ? index - sequence * p.seqlen_q : index, q_length = 1;
    head_kv = unit;
    split = clustered ? rank : of_run, count = 1;
    splits = clustered ? cluster_size : all.splits;
    slot = index * all.splits * of_split + of_tile, slot_step = of_split;
    key_head = early_quotient(unit * p.num_heads_kv, params.units);
    list = early_quotient(unit * params.lists.groups, params.units) * params.lists.stride_group +
           index * params.lists.stride_query;
    int length = params.chunk;
    if (clustered && all.splits > cluster_size)
      length = ((all.positions + cluster_size - 1) / cluster_size + 63) & ~63;
    positions.begin = min(split * length, all.positions);
    positions.end = min(positions.begin + length, all.positions);
  }
};

}  // namespace
}  // namespace blockflash
