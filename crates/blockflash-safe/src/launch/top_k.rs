//! The choice of the largest scores of each row.

use super::bsr_parts::BsrPartsMemory;
use super::checked::{Launch, Operands};
use super::fit::{Fit, fits, narrow, optional, pointer, require, strides};
use super::index_rows::{IndexOffsets, IndexRowsPlan, MOST_KEYS};
use crate::view::Used;
use crate::{DType, Kernel, View, ViewMut};
use blockflash_sys::manifest::{IndexKernel, Variant};
use blockflash_sys::params::{BLOCKFLASH_TOP_K_MOST, blockflash_kv_cache, blockflash_top_k_params};

/// The most columns of a row.
const MOST_COLUMNS: i64 = 1 << 20;
/// The most CTAs of a launch that counts arrivals, and of a row.
const MOST_CTAS: i128 = 1 << 24;
const MOST_PARTS: i64 = 128;

/// Tensors of a launch.
#[derive(Debug)]
pub struct TopKOperands<'a> {
    /// f32 `[groups, rows, blocks]`.
    pub scores: View<'a>,
    /// Set for what is packed.
    pub offsets: IndexOffsets<'a>,
    /// i32 `[batch]`: keys of each sequence, clamped to the capacity.
    pub seqused: Option<View<'a>>,
    /// i32 `[groups, rows, k]`.
    pub chosen: ViewMut<'a>,
    /// For rows in parts: what each part leaves, and a counter for each row.
    pub workspace: Option<&'a BsrPartsMemory>,
}

impl Operands for TopKOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let [of_q, of_kv, seqused] =
            [&self.offsets.q, &self.offsets.kv, &self.seqused].map(|x| x.as_ref().map(View::used));
        let workspace = self.workspace.map(BsrPartsMemory::used);
        [Some(self.scores.used()), of_q, of_kv, seqused, Some(self.chosen.used()), workspace]
    }
}

/// What a launch knows beside its tensors.
#[derive(Clone, Copy, Debug)]
pub struct TopKPlan {
    /// Queries and what they see.
    pub rows: IndexRowsPlan,
    /// Columns that are always chosen, at the start and at the end.
    pub forced: [i32; 2],
    /// CTAs that share a row.
    pub parts: i32,
}

/// A kernel that chooses scores.
#[derive(Clone, Copy, Debug)]
pub struct TopK {
    /// The most columns of a row.
    columns: i64,
    /// Rows of a CTA.
    rows: i64,
}

// SAFETY:
// 1. This is the parameter struct of the kernels that choose scores.
// 2. All pointers come from views. Addresses follow from the sizes and strides in the struct, which
//    `fit` wrote from the views, and from offsets and lengths, each of which a CTA or a warp reads
//    once and clamps to these sizes. Lists are written below their capacity only, whatever scores
//    and workspace hold.
// 3. The lists are a `ViewMut`. The workspace is used in turns, by kernels only. Whatever its
//    counters hold, they decide only which CTA chooses: nobody waits for them, and no address
//    follows from them.
unsafe impl Launch for TopK {
    type Operands<'a> = TopKOperands<'a>;
    type Plan = TopKPlan;
    type Params = blockflash_top_k_params;
    const FAMILY: &'static str = "the choice of the largest scores";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::Index(IndexKernel::TopKWarps { columns }) => {
                Some(Self { columns: columns.into(), rows: (kernel.threads() / 32).into() })
            }
            Variant::Index(IndexKernel::TopK { .. }) => {
                Some(Self { columns: MOST_COLUMNS, rows: 1 })
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
        let TopKOperands { scores, offsets, seqused, chosen, workspace } = operands;
        let chosen = chosen.as_view();
        let &[groups, rows, k] = chosen.shape() else {
            return Err(format!("chosen has {} dimensions, expected 3", chosen.shape().len()));
        };
        let [groups, rows, k] = [groups, rows, k].map(|size| size as i64);
        p.rows.fit(rows, offsets, &mut params.rows)?;
        let (batch, capacity) = (i64::from(p.rows.batch), i64::from(p.rows.capacity));
        require(
            (0..=MOST_KEYS).contains(&capacity),
            format_args!("the capacity is {capacity}, the limit is {MOST_KEYS}"),
        )?;
        seqused.as_ref().map_or(Ok(()), |x| fits("seqused", x, DType::I32, [(batch, 1)]))?;
        params.rows.cache = blockflash_kv_cache {
            seqused: optional(seqused.as_ref()).cast(),
            // Offsets of packed keys are clamped to it; only their differences count.
            page_size: MOST_KEYS as i32,
            capacity: p.rows.capacity,
            ..params.rows.cache
        };
        let blocks = p.rows.blocks(p.rows.capacity);
        require(
            groups > 0 && blocks <= self.columns,
            format_args!("{groups} groups of {blocks} blocks, the limit is {}", self.columns),
        )?;
        let most = i64::from(BLOCKFLASH_TOP_K_MOST);
        require(
            (1..=most).contains(&k),
            format_args!("lists have room for {k} blocks, expected 1 to {most}"),
        )?;
        let [first, last] = p.forced.map(i64::from);
        require(
            first >= 0 && last >= 0 && first + last <= k,
            format_args!("{first} first and {last} last blocks, the limit is {k}"),
        )?;
        let of_scores = strides("scores", scores, DType::F32, [groups, rows, blocks])?;
        let of_chosen = strides("chosen", &chosen, DType::I32, [groups, rows, k])?;
        let (all, parts) = (i128::from(groups) * i128::from(rows), i64::from(p.parts));
        require(all <= i32::MAX.into(), format_args!("{all} rows, the limit is {}", i32::MAX))?;
        let ctas = all * i128::from(parts);
        let most_parts = if self.rows == 1 && ctas < MOST_CTAS { MOST_PARTS } else { 1 };
        require(
            (1..=most_parts).contains(&parts),
            format_args!("{parts} parts, expected 1 to {most_parts}"),
        )?;
        *params = blockflash_top_k_params {
            rows: params.rows,
            scores: pointer(scores).cast(),
            chosen: pointer(&chosen).cast_mut().cast(),
            scores_stride_group: of_scores[0],
            scores_stride_row: of_scores[1],
            chosen_stride_group: of_chosen[0],
            chosen_stride_row: of_chosen[1],
            groups: narrow("groups", groups)?,
            granularity: p.rows.granularity,
            blocks: narrow("blocks", blocks)?,
            k: narrow("k", k)?,
            first: p.forced[0],
            last: p.forced[1],
            parts: p.parts,
            ..*params
        };
        if parts > 1 {
            let Some(workspace) = workspace else {
                return Err(format!("{parts} parts of a row, and no workspace"));
            };
            let [sums, counters] = [ctas * (2 * i128::from(k) + 1), all];
            require(
                sums <= workspace.sums() as i128 && counters <= workspace.counters() as i128,
                format_args!(
                    "the workspace has {} sums and {} counters, expected {sums} and {counters}",
                    workspace.sums(),
                    workspace.counters()
                ),
            )?;
            params.candidates = workspace.sums_pointer().cast();
            // Two numbers of 32 bits each.
            let behind = (ctas * 2 * i128::from(k)) as usize;
            params.counts = workspace.sums_pointer().wrapping_add(behind).cast();
            params.arrivals = workspace.counters_pointer();
        }
        let of_cta = i128::from(self.rows);
        Ok((ctas + of_cta - 1) / of_cta)
    }
}
