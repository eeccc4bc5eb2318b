/* Parameters of attention in which lists tell each query the keys that it attends to. */
#ifndef BLOCKFLASH_PARAMS_ATTENTION_INDEX_H
#define BLOCKFLASH_PARAMS_ATTENTION_INDEX_H

#include <stdint.h>

#include "blockflash/params/kv_cache_scaled.h"

/* The keys of each query, as runs of 2^granularity_log2 neighbours: entry e of a query stands for
 * keys [e · 2^granularity_log2, (e + 1) · 2^granularity_log2) of its sequence.
 *
 * A list is in any order and may hold anything: negative entries, which pad it, and keys that do
 * not exist or that the window hides are skipped, and an entry that is listed twice counts
 * twice. */
typedef struct blockflash_index_lists {
  const int32_t* entries; /* [groups, queries, capacity]; not read if capacity is 0 */
  int64_t stride_group, stride_query;
  int32_t groups;  /* 1, num_heads_kv or num_heads_q */
  int32_t queries; /* total_q when packed, else batch · seqlen_q, sequence by sequence */
  int32_t capacity;
  int32_t granularity_log2; /* 0, 2, 4, 6 or 7; capacity · 2^granularity_log2 is below 2^30 */
} blockflash_index_lists;

/* Attention to the keys of a cache, or packed ones, that lists name.
 *
 * Heads that share a list and a key head are a unit: units = max(groups, num_heads_kv). Unit u has
 * the query heads [u · group, (u + 1) · group), the key head u · num_heads_kv / units and the list
 * u · groups / units. Its rows are those heads of one query, in row tiles of the tile's `rows`.
 *
 * Position i of a list is key i % 2^granularity_log2 of entry i / 2^granularity_log2. Positions
 * [0, capacity · 2^granularity_log2) are divided into splits of `chunk`, so whatever lists and
 * lengths hold:
 *
 *   splits    = max(1, ceil(capacity · 2^granularity_log2 / chunk))
 *   row_tiles = ceil(group / rows)
 *
 * An item is a run of 2^run_log2 splits, or the rest of them, for one row tile of one unit. The
 * items of a query are numbered as (run · row_tiles + row_tile) · units + unit, those of the next
 * query follow. A launch has
 *
 *   items = queries · ceil(splits / 2^run_log2) · row_tiles · units    (in `decode`)
 *   slots = items · 2^run_log2
 *
 * and needs no workspace with one split. Split s of query t, row tile r and unit u has the slot
 *
 *   ((t · runs · row_tiles · units) << run_log2) + (s · row_tiles + r) · units + u
 *
 * with runs = ceil(splits / 2^run_log2). The word of a group of 16 splits in `arrivals` is that of
 * the slot of its first split, behind the first two words; that of split 1 counts groups. The order
 * of sums depends on `chunk` alone.
 *
 * On Hopper a launch of clusters of n CTAs, n <= 16, has run_log2 = 0 and CTAs for
 * ceil(splits / 16) clusters of each row tile and unit of each query, numbered as the items of runs
 * of 16 are; n is min(splits, 16), and with more than 16 splits it is 16. It leaves `items` at the
 * number of single splits. */
typedef struct blockflash_attention_index_params {
  blockflash_attention_decode_scaled_params
      scaled; /* In `decode`, group is num_heads_q / units, partial_rows is min(rows, group), and
                 run_log2 at most 4; page_list and page_count are null; splits, chunk_min, chunk_max
                 and most_queries are not read. Rows of packed queries that are in no sequence
                 become 0. Scales and q_dtype are read beside codes alone */
  blockflash_index_lists lists;
  const int32_t* cu_seqlens_kv; /* [batch + 1] offsets into the slots of page 0 of the cache, which
                                   has one page, no table and no seqused; its page_size is
                                   the number of all packed keys, and its capacity the most of a
                                   sequence. Clamped like offsets of queries. Null: the cache tells
                                   the keys of each sequence */
  int32_t units;
  int32_t chunk; /* positions of a split, a multiple of 64 */
} blockflash_attention_index_params;

#endif
