//! Making partial blocks of block masks on the GPU.

use super::checked::{Launch, Operands};
use super::fit::{Fit, absent, ceil_div, fits, pointer, require, starts_at, unknown};
use crate::view::Used;
use crate::{BlockBitsScratch, BlockLists, DType, Kernel, View};
use blockflash_sys::BlockMaskKernel;
use blockflash_sys::manifest::Variant;
use blockflash_sys::params::{
    BLOCKFLASH_BLOCK_BITS_CLASSIFY, BLOCKFLASH_BLOCK_BITS_GATHER, BLOCKFLASH_BLOCK_BITS_GATHER_T,
    BLOCKFLASH_BLOCK_BITS_JUMPS, BLOCKFLASH_PAIRS_BOOL, BLOCKFLASH_PAIRS_DOCUMENTS,
    BLOCKFLASH_PAIRS_NEIGHBORHOOD, BLOCKFLASH_PAIRS_RANGES, BLOCKFLASH_PAIRS_STRIDED,
    BLOCKFLASH_PAIRS_TREE, BLOCKFLASH_WINDOW_UNBOUNDED, blockflash_block_bits_params,
};
use std::ptr::{null, null_mut};

/// Rows of lists per CTA of the steps that gather.
const GATHERED_ROWS: u32 = 4;

/// Nodes of trees per CTA of the step that links them.
const LINKED_NODES: u32 = 1024;

/// The longest sequence, side of a window, and stride: sums of two stay within 32 bits.
const LONGEST: i32 = 1 << 30;

/// Pairs of tokens, intermediate memory, and the lists whose bits are made.
#[derive(Debug)]
pub struct BlockBitsOperands<'a> {
    /// Contiguous, by the kind of source: booleans u8 `[batch, heads, seqlen_q, seqlen_kv]`; ranges
    /// i32 `[batch, heads, seqlen_q, 2 * ranges]`; ids of the queries' documents or parents of
    /// nodes, i32 `[batch, seqlen_q]`; patterns have none.
    pub source: Option<View<'a>>,
    /// i32 `[batch, seqlen_kv]`, contiguous: ids of the keys' documents, for documents only.
    pub ids_kv: Option<View<'a>>,
    /// Results of the first step for the other ones, and for the lists that are built between.
    pub scratch: &'a mut BlockBitsScratch,
    /// The lists, `[batch, heads, rows]`, with room for as many tiles of bits as `scratch` has.
    pub lists: &'a mut BlockLists,
    /// Their transpose `[batch, heads, cols]`, with as much room.
    pub transpose: Option<&'a mut BlockLists>,
}

impl Operands for BlockBitsOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let [a, b, ..] = self.lists.used();
        let [c, d] = self.lists.used_bits();
        let transpose = self.transpose.as_deref();
        let [e, f, ..] = transpose.map_or([None; 4], BlockLists::used);
        let [g, h] = transpose.map_or([None; 2], BlockLists::used_bits);
        let [i, j, k, l] = self.scratch.views().map(|view| Some(view.used()));
        let [m, n] = [&self.source, &self.ids_kv].map(|view| view.as_ref().map(View::used));
        [a, b, c, d, e, f, g, h, i, j, k, l, m, n]
    }
}

/// A kernel that makes bits of blocks.
#[derive(Clone, Copy, Debug)]
pub struct BlockBitsBuild {
    /// Tiles of 64 × 64 pairs that a block may have.
    max_tiles: u32,
    /// The most blocks that a CTA classifies.
    threads: u32,
}

// SAFETY:
// 1. This is the parameter struct of these kernels.
// 2. All pointers come from views. A block takes tiles only where the counter says one that is in
//    the capacity and a multiple of its tiles; so are the values in `first`, which nothing else
//    writes, and those that are gathered. The steps that gather follow entries of `row_ptr`, which
//    stay within `col_idx`, and compare columns with their number before they use them. Jumps are
//    written by the step that links nodes alone: from a node to a lower one or to -1, also where a
//    parent is anything else; they begin as zeros.
// 3. All tensors except `source` are borrowed exclusively.
unsafe impl Launch for BlockBitsBuild {
    type Operands<'a> = BlockBitsOperands<'a>;
    type Plan = blockflash_block_bits_params;
    type Params = blockflash_block_bits_params;
    const FAMILY: &'static str = "making bits of blocks";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::BlockMask(BlockMaskKernel::Bits { max_tiles }) => {
                Some(Self { max_tiles, threads: kernel.threads() })
            }
            _ => None,
        }
    }

    fn fit(
        &self,
        p: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let [batch, heads, rows, cols] = [p.batch, p.heads, p.rows, p.cols].map(i64::from);
        let lengths = [p.seqlen_q, p.seqlen_kv, p.ranges, p.capacity];
        require(
            [batch, heads, rows, cols].iter().all(|&size| size > 0)
                && lengths.iter().all(|&size| size >= 0),
            format_args!(
                "batch {batch}, {heads} heads, {rows} × {cols} blocks, and lengths, ranges and \
                 capacity {lengths:?}: a size is not positive"
            ),
        )?;
        let [block_q, block_kv] = [p.block_q, p.block_kv];
        let divides = |size: i32| size > 0 && size % 64 == 0;
        let tiles = i64::from(block_q / 64) * i64::from(block_kv / 64);
        require(
            divides(block_q) && divides(block_kv) && tiles <= i64::from(self.max_tiles),
            format_args!(
                "blocks of {block_q} × {block_kv}, expected multiples of 64 with at most {} tiles",
                self.max_tiles
            ),
        )?;
        for (what, found, length, size) in
            [("rows", rows, p.seqlen_q, block_q), ("columns", cols, p.seqlen_kv, block_kv)]
        {
            let expected = ceil_div(length.into(), size.unsigned_abs());
            require(
                i128::from(found) == expected,
                format_args!("{found} block {what}, expected {expected}"),
            )?;
        }
        // The kernel counts tiles of all blocks, and queries and keys in whole blocks, in 32 bits.
        let limit = i128::from(i32::MAX);
        let groups = i128::from(batch) * i128::from(heads);
        // Five factors below 2^31 may exceed i128.
        let all = [groups, rows.into(), cols.into(), tiles.into()];
        let all = all.into_iter().try_fold(1i128, i128::checked_mul).unwrap_or(i128::MAX);
        let [queries, keys] = [(rows, block_q), (cols, block_kv)]
            .map(|(count, size)| i128::from(count) * i128::from(size));
        require(
            all <= limit
                && queries <= limit
                && keys <= limit
                && groups * i128::from(rows.max(cols) + 1) <= limit,
            format_args!(
                "{all} tiles of blocks, {queries} queries and {keys} keys in whole blocks, the \
                 limit is {limit}"
            ),
        )?;

        require(
            [p.seqlen_q, p.seqlen_kv].iter().all(|&length| length <= LONGEST)
                && [p.within.left, p.within.right].iter().all(|side| {
                    (0..=LONGEST).contains(side) || *side == BLOCKFLASH_WINDOW_UNBOUNDED
                }),
            format_args!(
                "{} queries, {} keys and a window of {} and {} keys, the limit is {LONGEST}",
                p.seqlen_q, p.seqlen_kv, p.within.left, p.within.right
            ),
        )?;
        check_source(p, operands)?;
        let [visited, first, counter, jumps] = operands.scratch.views();
        let of_blocks = dense([batch, heads, rows, cols]);
        fits("visited", &visited, DType::U8, of_blocks)?;
        fits("first", &first, DType::I32, of_blocks)?;
        fits("jumps", &jumps, DType::I32, dense([batch, p.seqlen_q.into(), 4]))?;
        starts_at(16, "jumps", &jumps)?;
        let room = [i64::from(p.capacity), tiles];
        let expected = format_args!("room for {} tiles, {} a block", room[0], room[1]);
        require(operands.scratch.room() == room, format_args!("the scratch has no {expected}"))?;

        let lists = Some(&*operands.lists);
        let transpose = operands.transpose.as_deref();
        for (lists, rows, cols) in [(lists, rows, cols), (transpose, cols, rows)]
            .into_iter()
            .filter_map(|(l, r, c)| Some((l?, r, c)))
        {
            let packed = lists.cu_rows().is_some();
            absent("cu_rows of the mask", packed, "the kernel takes no packed masks")?;
            require(
                lists.may_be_filled(cols.into()),
                format_args!("the lists are {}", lists.fill_refusal(cols.into())),
            )?;
            require(
                lists.room_for_bits() == Some(room),
                format_args!("the lists have no {expected}"),
            )?;
            let dims = dense([batch, heads, rows + 1]);
            fits("row_ptr", &lists.row_ptr().view(), DType::I32, dims)?;
        }
        let blocks = match p.step {
            BLOCKFLASH_BLOCK_BITS_CLASSIFY => {
                let of_cta = p.cols_of_cta.unsigned_abs();
                require(
                    p.cols_of_cta > 0 && of_cta <= self.threads,
                    format_args!(
                        "cols_of_cta is {}, expected 1 to {}",
                        p.cols_of_cta, self.threads
                    ),
                )?;
                groups * i128::from(rows) * ceil_div(cols, of_cta)
            }
            BLOCKFLASH_BLOCK_BITS_GATHER => {
                ceil_div((groups * i128::from(rows)) as i64, GATHERED_ROWS)
            }
            BLOCKFLASH_BLOCK_BITS_GATHER_T => {
                require(transpose.is_some(), format_args!("there is no transpose to gather for"))?;
                ceil_div((groups * i128::from(cols)) as i64, GATHERED_ROWS)
            }
            BLOCKFLASH_BLOCK_BITS_JUMPS => {
                require(
                    p.source_kind == BLOCKFLASH_PAIRS_TREE,
                    format_args!("source_kind is {}, but only trees have nodes", p.source_kind),
                )?;
                i128::from(batch) * ceil_div(p.seqlen_q.into(), LINKED_NODES)
            }
            step => {
                let known = [
                    BLOCKFLASH_BLOCK_BITS_CLASSIFY,
                    BLOCKFLASH_BLOCK_BITS_GATHER,
                    BLOCKFLASH_BLOCK_BITS_GATHER_T,
                    BLOCKFLASH_BLOCK_BITS_JUMPS,
                ];
                return unknown("step", step, &known);
            }
        };
        let gathered = if p.step == BLOCKFLASH_BLOCK_BITS_GATHER_T { transpose } else { lists };
        let words = |lists: Option<&BlockLists>| {
            let words = lists.and_then(BlockLists::bits).map(|[_, words]| pointer(&words.view()));
            words.map_or(null_mut(), |words| words.cast_mut().cast())
        };
        let of =
            |array: Option<View<'_>>| array.map_or(null_mut(), |view| pointer(&view).cast_mut());
        *params = blockflash_block_bits_params {
            source: operands.source.as_ref().map_or(null(), pointer),
            ids_kv: operands.ids_kv.as_ref().map_or(null(), pointer).cast(),
            jumps: pointer(&jumps).cast_mut().cast(),
            visited: pointer(&visited).cast_mut().cast(),
            first: pointer(&first).cast_mut().cast(),
            counter: pointer(&counter).cast_mut().cast(),
            bits: words(lists),
            bits_t: words(transpose),
            row_ptr: of(gathered.map(|lists| lists.row_ptr().view())).cast(),
            col_idx: of(gathered.map(|lists| lists.col_idx().view())).cast(),
            block_bits: of(gathered.and_then(BlockLists::bits).map(|[bits, _]| bits.view())).cast(),
            ..*p
        };
        Ok(blocks)
    }
}

/// Checks the tensors of a source and its numbers.
fn check_source(p: &blockflash_block_bits_params, operands: &BlockBitsOperands<'_>) -> Fit {
    let [batch, heads, queries, keys] = [p.batch, p.heads, p.seqlen_q, p.seqlen_kv].map(i64::from);
    let is_documents = p.source_kind == BLOCKFLASH_PAIRS_DOCUMENTS;
    match (&operands.ids_kv, is_documents) {
        (Some(ids), true) => {
            fits("ids_kv", ids, DType::I32, dense([batch, keys]))?;
            starts_at(4, "ids_kv", ids)?;
        }
        (None, true) => return Err("documents have no ids_kv".into()),
        (ids, false) => absent("ids_kv", ids.is_some(), "the source is no documents")?,
    }
    let numbers = |what: &str| match &operands.source {
        Some(source) => {
            fits("source", source, DType::I32, dense([batch, queries]))?;
            starts_at(4, "source", source)
        }
        None => Err(format!("{what} have no source")),
    };
    let nothing = || absent("source", operands.source.is_some(), "a pattern has no tensor");
    match (p.source_kind, &operands.source) {
        (BLOCKFLASH_PAIRS_BOOL, Some(source)) => {
            fits("source", source, DType::U8, dense([batch, heads, queries, keys]))
        }
        (BLOCKFLASH_PAIRS_RANGES, Some(source)) => {
            let dims = dense([batch, heads, queries, 2 * i64::from(p.ranges)]);
            fits("source", source, DType::I32, dims)?;
            starts_at(4, "source", source)
        }
        (BLOCKFLASH_PAIRS_BOOL | BLOCKFLASH_PAIRS_RANGES, None) => {
            Err("booleans and ranges have no source".into())
        }
        (BLOCKFLASH_PAIRS_DOCUMENTS, _) => numbers("documents"),
        (BLOCKFLASH_PAIRS_TREE, _) => {
            require(
                queries <= keys,
                format_args!("{keys} keys, fewer than the {queries} queries of trees"),
            )?;
            numbers("trees")
        }
        (BLOCKFLASH_PAIRS_STRIDED, _) => {
            // Positions of the first and the last query, less the last and the first key.
            let diagonal = i64::from(p.diagonal);
            let ends = [diagonal - keys, diagonal + queries];
            require(
                (1..=LONGEST).contains(&p.stride)
                    && ends.iter().all(|&end| i32::try_from(end).is_ok()),
                format_args!(
                    "a stride of {}, expected 1 to {LONGEST}, and distances from {} to {}",
                    p.stride, ends[0], ends[1]
                ),
            )?;
            nothing()
        }
        (BLOCKFLASH_PAIRS_NEIGHBORHOOD, _) => {
            check_grid(p)?;
            nothing()
        }
        (kind, _) => unknown(
            "source_kind",
            kind,
            &[
                BLOCKFLASH_PAIRS_BOOL,
                BLOCKFLASH_PAIRS_RANGES,
                BLOCKFLASH_PAIRS_DOCUMENTS,
                BLOCKFLASH_PAIRS_TREE,
                BLOCKFLASH_PAIRS_STRIDED,
                BLOCKFLASH_PAIRS_NEIGHBORHOOD,
            ],
        ),
    }
}

/// Checks the grid of a neighbourhood: the kernel divides by its numbers, and tokens are its
/// positions.
fn check_grid(p: &blockflash_block_bits_params) -> Fit {
    let axes = usize::try_from(p.axes).unwrap_or(0);
    require(
        (1..=p.grid.len()).contains(&axes),
        format_args!("axes is {}, expected 1 to {}", p.axes, p.grid.len()),
    )?;
    let mut tokens = 1i64;
    for axis in 0..axes {
        let [size, window, dilation] =
            [p.grid[axis], p.window[axis], p.dilation[axis]].map(i64::from);
        require(
            window > 0 && dilation > 0 && window * dilation <= size,
            format_args!("axis {axis} has {size} positions, a window of {window} × {dilation}"),
        )?;
        tokens = tokens.saturating_mul(size);
    }
    let lengths = [p.seqlen_q, p.seqlen_kv];
    require(
        lengths.iter().all(|&length| i64::from(length) == tokens),
        format_args!("a grid of {tokens} tokens, but queries and keys are {lengths:?}"),
    )
}

/// The sizes and strides of a contiguous tensor.
fn dense<const N: usize>(sizes: [i64; N]) -> [(i64, i64); N] {
    let (mut dims, mut stride) = (sizes.map(|size| (size, 1)), 1i64);
    for dim in dims.iter_mut().rev() {
        dim.1 = stride;
        stride = stride.saturating_mul(dim.0);
    }
    dims
}

#[cfg(test)]
#[path = "block_bits_tests.rs"]
mod tests;
