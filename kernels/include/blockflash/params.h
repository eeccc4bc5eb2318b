/* The ABI between host and kernels: one parameter struct per kernel, valid C11 and C++.
 *
 * Strides count elements and are 64-bit; the innermost dimension is contiguous. A struct is
 * passed by value as the only kernel argument. `cargo xtask bindgen` turns this file into
 * crates/blockflash-sys/src/params.rs. Kernels include the files of their operation, so that a
 * change there leaves the images of the others as they are. */
#ifndef BLOCKFLASH_PARAMS_H
#define BLOCKFLASH_PARAMS_H

#include "blockflash/params/attention_bwd.h"
#include "blockflash/params/attention_fwd.h"
#include "blockflash/params/attention_fwd_e4m3.h"
#include "blockflash/params/attention_index.h"
#include "blockflash/params/attention_index_bwd.h"
#include "blockflash/params/attention_terms.h"
#include "blockflash/params/base.h"
#include "blockflash/params/block_bits.h"
#include "blockflash/params/block_mask_build.h"
#include "blockflash/params/bsr.h"
#include "blockflash/params/index_choice.h"
#include "blockflash/params/index_union.h"
#include "blockflash/params/kv_append.h"
#include "blockflash/params/kv_append_codes.h"
#include "blockflash/params/kv_cache.h"
#include "blockflash/params/kv_cache_latent.h"
#include "blockflash/params/kv_cache_runs.h"
#include "blockflash/params/kv_cache_scaled.h"
#include "blockflash/params/kv_cache_splits.h"
#include "blockflash/params/kv_cache_terms.h"
#include "blockflash/params/page_choice.h"
#include "blockflash/params/probe.h"
#include "blockflash/params/quantize.h"
#include "blockflash/params/row_copy.h"
#include "blockflash/params/score_terms.h"
#include "blockflash/params/scores.h"
#include "blockflash/params/tail_mask.h"

#endif
