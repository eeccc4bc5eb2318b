//! The pages of a cache that a call visits, on its device: given ones, or those that are selected
//! before each call.

use super::decode_rows::Rows;
use crate::error::{Error, Result};
use crate::io::Array;
use blockflash_ops::{
    AttentionDecodeWorkspace, ChoosePages, KvCache, PageLists, Stream, SummarizePages, Tensor, View,
};
use blockflash_oracle::{Comparison, Elements, PageScore, page_choice, page_summary};
use std::collections::HashMap;
use std::ops::Range;

/// Pages of each sequence that its queries visit.
#[derive(Debug, Default)]
pub enum Chosen {
    /// All of them.
    #[default]
    All,
    /// These columns of the block table, ascending.
    Columns(Vec<Vec<usize>>),
    /// Those that are selected on the device before each call.
    Selected(PageSelection),
}

/// How pages are selected for each head of keys: the first and the last one of a sequence, and
/// those with the largest scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSelection {
    /// Most pages of a list, at least 2.
    pub room: usize,
    /// Rows that summarise the keys of a page: 1 for their mean, 2 for their minimum and maximum.
    pub statistics: usize,
}

/// Lists i32 `[batch, heads_kv, room]` and counts i32 `[batch]`, if not all pages are visited.
#[derive(Debug)]
pub(super) struct Pages {
    lists: Option<[Tensor; 2]>,
    selected: Option<Selected>,
}

/// What selection keeps between calls.
#[derive(Debug)]
struct Selected {
    by: PageSelection,
    summaries: Tensor,
    workspace: Option<AttentionDecodeWorkspace>,
    /// The block table, `[batch, columns]`.
    table: Array,
    /// What was selected at first, `[batch, heads_kv, room]`, and the pages of each sequence.
    first: Array,
    used: Vec<usize>,
    page_size: usize,
}

impl Pages {
    /// Places the lists, or makes room for them and summarises all pages.
    pub(super) fn new(
        chosen: Chosen,
        table: Option<Array>,
        counts: &[usize],
        (q, cache): (View<'_>, KvCache<'_>),
        stream: &Stream,
    ) -> Result<Self> {
        let sizes = cache.sizes()?;
        let (batch, heads) = (sizes.batch, sizes.num_heads_kv);
        let (columns, by) = match (chosen, table) {
            (Chosen::All, _) => return Ok(Self { lists: None, selected: None }),
            (Chosen::Columns(columns), _) => (columns, None),
            (Chosen::Selected(by), Some(table)) => {
                (vec![vec![0; by.room]; batch], Some((by, table)))
            }
            (Chosen::Selected(_), None) => {
                return Err(Error::Option("a contiguous cache has no pages to select".to_owned()));
            }
        };
        let room = columns.first().map_or(0, Vec::len);
        let entries = columns.iter().flat_map(|columns| columns.repeat(heads));
        let entries: Vec<_> = entries.map(|column| column as i32).collect();
        let lists = Some([
            Tensor::from_slice(stream, &entries, &[batch, heads, room])?,
            Tensor::from_slice(stream, &vec![room as i32; batch], &[batch])?,
        ]);
        let Some((by, table)) = by else { return Ok(Self { lists, selected: None }) };
        one_summary(table.as_i32().unwrap_or_default(), counts, sizes.page_size)?;
        let shape = [sizes.pages, by.statistics, heads, sizes.head_dims.qk];
        let mut summaries = Tensor::zeros(stream, sizes.dtype, &shape)?;
        SummarizePages { cache, tokens: sizes.capacity }
            .summarize_into(summaries.view_mut(), stream)?;
        let choice = ChoosePages::new(q, cache, summaries.view());
        let workspace = match choice.workspace_bytes(stream.device())? {
            0 => None,
            bytes => Some(AttentionDecodeWorkspace::new(stream, bytes)?),
        };
        let (first, page_size) = (Array::from(Vec::<i32>::new()), sizes.page_size);
        let used = counts.iter().map(|keys| keys.div_ceil(page_size)).collect();
        let selected = Selected { by, summaries, workspace, table, first, used, page_size };
        let mut pages = Self { lists, selected: Some(selected) };
        pages.select((q, cache), stream)?;
        if let (Some([lists, _]), Some(selected)) = (&pages.lists, &mut pages.selected) {
            selected.first = Array::download(lists, stream)?;
        }
        Ok(pages)
    }

    /// Before a call, selects pages as a step of decoding does: the last queries' keys are new.
    /// Nothing where pages are given.
    pub(super) fn select(
        &mut self,
        (q, cache): (View<'_>, KvCache<'_>),
        stream: &Stream,
    ) -> Result<()> {
        let (Some([lists, counts]), Some(selected)) = (&mut self.lists, &mut self.selected) else {
            return Ok(());
        };
        let summaries = &mut selected.summaries;
        SummarizePages { cache, tokens: q.shape()[1] }
            .summarize_into(summaries.view_mut(), stream)?;
        let workspace = selected.workspace.as_ref();
        let choice = ChoosePages { workspace, ..ChoosePages::new(q, cache, summaries.view()) };
        Ok(choice.choose_into(lists.view_mut(), counts.view_mut(), stream)?)
    }

    /// What a call is given.
    pub(super) fn lists(&self) -> Option<PageLists<'_>> {
        let [lists, counts] = self.lists.as_ref()?;
        Some(PageLists { lists: lists.view(), counts: counts.view() })
    }

    /// Whether other lists may be given to further copies of a cache.
    pub(super) fn are_given(&self) -> bool {
        self.lists.is_some() && self.selected.is_none()
    }

    /// How many of the visible keys of a sequence the queries of a head of keys see.
    pub(super) fn seen(&self, [entry, head]: [usize; 2], visible: Range<usize>) -> usize {
        let Some(Selected { by, first, used, page_size, .. }) = &self.selected else {
            return visible.len();
        };
        let pages = used[entry].min(by.room);
        let list = list(first, entry, head).get(..pages).unwrap_or_default();
        let keys = |&page: &i32| {
            let start = page as usize * page_size;
            (start + page_size).min(visible.end).saturating_sub(start.max(visible.start))
        };
        list.iter().map(keys).sum()
    }

    /// The block table, if pages are selected.
    pub(super) fn table(&self) -> &[i32] {
        self.selected.as_ref().and_then(|selected| selected.table.as_i32()).unwrap_or_default()
    }

    /// How pages are selected.
    pub(super) fn selection(&self) -> Option<PageSelection> {
        Some(self.selected.as_ref()?.by)
    }

    /// What was selected, in host memory: the lists, and the summaries by which they were chosen.
    pub(super) fn results(&self, stream: &Stream) -> Result<Vec<(&'static str, Array)>> {
        let (Some([lists, _]), Some(selected)) = (&self.lists, &self.selected) else {
            return Ok(Vec::new());
        };
        Ok(vec![
            ("pages", Array::download(lists, stream)?),
            ("summaries", Array::download(&selected.summaries, stream)?),
        ])
    }
}

/// Refuses sequences that share a page and have unequal numbers of keys in it: it has one summary.
fn one_summary(table: &[i32], counts: &[usize], page_size: usize) -> Result<()> {
    let (columns, mut used) = (table.len() / counts.len().max(1), HashMap::new());
    for (&keys, pages) in counts.iter().zip(table.chunks(columns.max(1))) {
        for (start, &page) in (0..keys).step_by(page_size.max(1)).zip(pages) {
            let keys = page_size.min(keys - start);
            let others = *used.entry(page).or_insert(keys);
            if others != keys {
                return Err(Error::Option(format!(
                    "sequences that share page {page} have {others} and {keys} keys in it, but it \
                     has one summary"
                )));
            }
        }
    }
    Ok(())
}

/// The list of a sequence and head of keys.
fn list(lists: &Array, entry: usize, head: usize) -> &[i32] {
    let &[_, heads, room] = lists.shape() else { return &[] };
    &lists.as_i32().unwrap_or_default()[(entry * heads + head) * room..][..room]
}

/// What a check of a selection looks at.
pub(super) struct SelectionCheck<'a> {
    /// `[batch, queries, heads, head_dim]`.
    pub(super) q: &'a Array,
    /// All keys of all sequences, one sequence behind the other.
    pub(super) k: &'a Rows<'a>,
    /// Keys of each sequence.
    pub(super) counts: &'a [usize],
    pub(super) page_size: usize,
    /// i32 `[batch, heads_kv, room]`.
    pub(super) lists: &'a Array,
    /// `[pages, 1 or 2, heads_kv, head_dim]`.
    pub(super) summaries: &'a Array,
}

impl SelectionCheck<'_> {
    /// The lists as blocks of keys that the queries of each sequence see: where each list begins,
    /// and its pages.
    pub(super) fn blocks(&self) -> (Vec<i32>, Vec<i32>) {
        let (heads, room) = (self.k.shape()[1], self.lists.shape().last().copied().unwrap_or(0));
        let (mut row_ptr, mut col_idx) = (vec![0], Vec::new());
        for (entry, keys) in self.counts.iter().enumerate() {
            let pages = keys.div_ceil(self.page_size).min(room);
            for head in 0..heads {
                col_idx.extend(&list(self.lists, entry, head)[..pages]);
                row_ptr.push(col_idx.len() as i32);
            }
        }
        (row_ptr, col_idx)
    }

    /// Compares lists and summaries with their definitions.
    pub(super) fn compare(&self, table: &[i32]) -> [Comparison; 2] {
        let (&[_, heads, d], &[batch, queries, heads_q, _]) = (self.k.shape(), self.q.shape())
        else {
            return Default::default();
        };
        let (group, columns) = (heads_q / heads.max(1), table.len() / batch.max(1));
        let unit = (d + 2) as f64 * 2f64.powi(-24);
        let (mut choices, mut summaries, mut first) = (Vec::new(), Vec::new(), 0);
        for (entry, &keys) in self.counts.iter().enumerate() {
            for head in 0..heads {
                let query = |row: usize| {
                    let row =
                        (entry * queries + row / group) * heads_q + head * group + row % group;
                    self.q.to_f32(row * d..(row + 1) * d)
                };
                let of_head: Vec<_> = (0..queries * group).map(query).collect();
                let mut scores = Vec::new();
                for (column, start) in (0..keys).step_by(self.page_size.max(1)).enumerate() {
                    let keys = (start..keys.min(start + self.page_size)).map(|key| {
                        let row = (first + key) * heads + head;
                        self.k.to_f32(row * d..(row + 1) * d)
                    });
                    let page = table[entry * columns + column] as usize;
                    let rows = self.summary(page, head);
                    let dtype = self.summaries.dtype();
                    summaries.push(page_summary(dtype, &keys.collect::<Vec<_>>(), &rows));
                    let rows: Vec<_> = rows.iter().map(|row| &row[..]).collect();
                    let of_head = of_head.iter().map(|query| &query[..]);
                    scores.push(PageScore::new(of_head, &rows, unit));
                }
                choices.push(page_choice(list(self.lists, entry, head), &scores));
            }
            first += keys;
        }
        let checked = |all: &[Comparison]| all.iter().map(|one| one.checked as usize).sum();
        [choices, summaries].map(|all| {
            let total = checked(&all);
            Comparison::of_parts(all.into_iter(), total)
        })
    }

    fn summary(&self, page: usize, head: usize) -> Vec<Vec<f32>> {
        let &[_, statistics, heads, d] = self.summaries.shape() else { return Vec::new() };
        let row = |statistic: usize| ((page * statistics + statistic) * heads + head) * d;
        (0..statistics).map(|at| self.summaries.to_f32(row(at)..row(at) + d)).collect()
    }
}
