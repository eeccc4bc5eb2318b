/* Parameters of attention to listed keys on Hopper, where neighbouring queries visit the union of
 * their lists, and of the kernel before it, which unites them. */
#ifndef BLOCKFLASH_PARAMS_INDEX_UNION_H
#define BLOCKFLASH_PARAMS_INDEX_UNION_H

#include <stdint.h>

#include "blockflash/params/attention_index.h"
#include "blockflash/params/base.h"

/* Words of a tile in the workspace. */
#define BLOCKFLASH_INDEX_TILE_WORDS 16

/* Tiles of queries and what each of them visits, which one kernel leaves in a workspace for the
 * next.
 *
 * The `group` heads of a unit are divided into packs:
 *
 *   packs        = ceil(group / 64)
 *   pack         = ceil(group / packs)      heads of a pack; the last one may have fewer
 *   pack_queries = floor(64 / pack)         1 with several packs
 *
 * Row group i · packs + j of a sequence and unit are its queries [i · pack_queries, (i + 1) ·
 * pack_queries) times the heads of pack j, the rows of a warpgroup. A tile has two neighbouring row
 * groups. The tiles of a unit are numbered from its last queries to its first ones, then come those
 * of the next unit, then those of the next sequence. So there are, whatever offsets of packed
 * queries hold, as many as are computed:
 *
 *   all = batch · units · ceil(ceil(seqlen_q / pack_queries) · packs / 2)
 *   all = units · (ceil(total_q · packs / (2 · pack_queries)) + batch · (floor(packs / 2) + 1))
 *
 * the second one for packed queries, of which some tiles have none. A launch takes the tiles
 * [first, first + count); a call may be several pairs of launches one after another, so that the
 * workspace stays small. */
typedef struct blockflash_index_unions {
  int32_t* tiles;    /* [count, BLOCKFLASH_INDEX_TILE_WORDS], aligned to 16 bytes */
  int32_t* entries;  /* [count, 2 · pack_queries · capacity] */
  uint32_t* members; /* [count, 2 · pack_queries · capacity, member_words]: bit i is query i of the
                        tile, with several packs row group i */
  int32_t pack, pack_queries, packs;
  int32_t member_words; /* ceil(2 · pack_queries / 32), 1 to 4 */
  int32_t first, count;
} blockflash_index_unions;

/* Unites the lists of the queries of each tile, by a CTA for each. Rows of packed queries that are
 * in no sequence become 0, and their log-sum-exp -inf. In `index`, the tensors of q, k and v and
 * the scales are not read, and of the element types only the size, which is 2. */
typedef struct blockflash_index_union_params {
  blockflash_attention_index_params index;
  blockflash_index_unions unions;
} blockflash_index_union_params;

/* Attention to the keys that the tiles visit, for granularities from 16 on.
 *
 * The map of q has the dimensions (head_dim_qk, head, query, batch), of packed queries with a batch
 * of 1, and boxes of 64 columns, `pack` heads and `pack_queries` queries. Those of k and v have the
 * dimensions (head_dim_qk or head_dim_v, slot, head, page) and boxes of 64 columns and `box_rows`
 * slots. All have a swizzle of 128 bytes. Maps of k and v are zeros when there are no keys.
 *
 * In `index`, `decode.tile_counter` is used if it is not null, and what divides items and splits
 * is not read. */
typedef struct blockflash_attention_index_tma_params {
  blockflash_tensor_map q, k, v;
  blockflash_attention_index_params index;
  blockflash_index_unions unions;
  int32_t box_rows; /* 16, 32, 64 or 128: a divisor of the granularity and of the tile's keys of a
                       step and, with several pages per sequence, of page_size */
} blockflash_attention_index_tma_params;

#endif
