//! Lists of visited blocks on their way to the plans of all ranks.

use crate::band::Part;
use crate::mask_sizes::Sizes;
use crate::pattern::Pattern;
use crate::plan::{Plan, Slots, Together, Visit, union};
use crate::{Density, Error, Result, Shard};
use blockflash_ops::{BlockGeometry, BlockMask, Stream};
use std::ops::Range;

/// Ascending block columns of the whole sequence, `[batch, heads, rows]`.
#[derive(Debug, Hash)]
pub(crate) struct Lists {
    heads: usize,
    rows: usize,
    columns: Vec<Vec<i32>>,
}

impl Lists {
    fn empty(batch: usize, heads: usize, rows: usize) -> Lists {
        Lists { heads, rows, columns: vec![Vec::new(); batch * heads * rows] }
    }

    /// The lists of the queries of a rank, without blocks that the token mask hides.
    pub(crate) fn of(sizes: &Sizes, mask: &BlockMask) -> Result<Lists> {
        let mut lists = Lists::empty(sizes.batch, sizes.heads, mask.rows());
        for batch in 0..sizes.batch {
            for (head, row) in (0..sizes.heads).flat_map(|h| (0..mask.rows()).map(move |r| (h, r)))
            {
                let block_q = mask.block_q();
                let place = sizes.grid.shard.position(row * block_q) / block_q;
                let visible = sizes.geometry.visible_cols(place, sizes.mask);
                let columns = mask.row(batch, head, row)?.filter(|col| visible.contains(col));
                *lists.row(batch, head, row) = columns.map(|col| col as i32).collect();
            }
        }
        Ok(lists)
    }

    fn row(&mut self, batch: usize, head: usize, row: usize) -> &mut Vec<i32> {
        &mut self.columns[(batch * self.heads + head) * self.rows + row]
    }

    /// The lists of some rows of a head of an entry.
    fn rows(&self, batch: usize, head: usize, rows: Range<usize>) -> &[Vec<i32>] {
        let first = (batch * self.heads + head) * self.rows;
        &self.columns[first + rows.start..first + rows.end]
    }

    /// What another rank, or this one, has to know, each list behind its length: a rank of the same
    /// group the lists of its heads, any other one which blocks of its keys they visit.
    pub(crate) fn write(&self, sizes: &Sizes, rank: usize, message: &mut Vec<i32>) {
        let group = rank / sizes.grid.scheme.heads;
        let columns = Columns::of(&sizes.grid.rows_of(group), sizes.geometry.block_kv());
        for batch in 0..sizes.batch {
            let lists = sizes.heads_of(rank).flat_map(|h| self.rows(batch, h, 0..self.rows));
            let mut write = |list: &[i32]| {
                message.push(list.len() as i32);
                message.extend(list);
            };
            if group == sizes.grid.group() {
                lists.for_each(|list| write(list));
            } else {
                write(&sorted(lists.flat_map(|list| columns.of_sequence(list)).copied().collect()));
            }
        }
    }
}

/// What a rank knows of the lists: all of its group and its heads, and which blocks of its keys any
/// other group visits.
pub(crate) struct Visits {
    own: Lists,
    /// `[groups, batch]`
    theirs: Vec<Vec<Vec<i32>>>,
}

impl Visits {
    pub(crate) fn new(sizes: &Sizes) -> Visits {
        let grid = &sizes.grid;
        let rows = grid.rows_of(grid.group()).rows().div_ceil(sizes.geometry.block_q());
        let heads = sizes.heads_of(grid.shard.rank()).len();
        let theirs = vec![vec![Vec::new(); sizes.batch]; grid.scheme.keys];
        Visits { own: Lists::empty(sizes.batch, heads, rows), theirs }
    }

    /// Takes what a rank has [written](Lists::write).
    pub(crate) fn read(&mut self, sizes: &Sizes, rank: usize, message: &[i32]) -> Result<()> {
        let (grid, mut rest) = (&sizes.grid, message);
        let mut next = || {
            let cols = sizes.geometry.cols() as i32;
            let error = |found: String| {
                Error::message(rank, &format!("lists of blocks that ascend below {cols}"), &found)
            };
            let (&length, lists) = rest.split_first().ok_or_else(|| error("an end".into()))?;
            let list = usize::try_from(length).ok().and_then(|at| lists.split_at_checked(at));
            let left = lists.len();
            let (list, after) =
                list.ok_or_else(|| error(format!("a list of {length}, with {left} numbers left")))?;
            rest = after;
            let mut before = -1;
            for &col in list {
                if col <= before || col >= cols {
                    return Err(error(format!("block {col} after {before}")));
                }
                before = col;
            }
            Ok(list.to_vec())
        };
        let (group, member) = (rank / grid.scheme.heads, rank % grid.scheme.heads);
        let block = sizes.geometry.block_q();
        let pieces = grid.pieces();
        for batch in 0..sizes.batch {
            if group != grid.group() {
                self.theirs[group][batch].extend(next()?);
                continue;
            }
            for head in 0..self.own.heads {
                for piece in pieces.iter().filter(|piece| piece.member == member) {
                    for row in (0..piece.common.len()).step_by(block) {
                        *self.own.row(batch, head, (piece.common.start + row) / block) = next()?;
                    }
                }
            }
        }
        match rest {
            [] => Ok(()),
            more => {
                let found = format!("{} numbers after them", more.len());
                Err(Error::message(rank, "lists of blocks", &found))
            }
        }
    }

    /// The plans of the batch entries, with masks on the device of the stream, and how much is
    /// visited. `parts`: of the heads, in which keys are gathered; 0 if they come by steps.
    pub(crate) fn plans(
        &self,
        sizes: &Sizes,
        parts: usize,
        stream: &Stream,
    ) -> Result<(Vec<Plan>, Density)> {
        let (grid, band) = (&sizes.grid, sizes.band);
        let shard = grid.rows_of(grid.group());
        // One call for the whole batch where one group has all keys.
        let step = if grid.scheme.keys == 1 { sizes.batch.max(1) } else { 1 };
        let mut plans = Vec::new();
        let (mut pairs, mut received) = (0, 0);
        for first in (0..sizes.batch).step_by(step) {
            let entries = first..first + step;
            let mut together = match parts {
                0 => None,
                parts => self.together(sizes, first, parts)?,
            };
            // Lists of parts for single ranks are not needed beside those for all.
            let parts = if together.is_some() { 1 } else { parts.max(1) };
            let visits = |group: usize| {
                let source = grid.rows_of(group);
                let visit = |part| self.visit(sizes, entries.clone(), part, &source, parts);
                let calls = band.parts(&shard, &source).into_iter();
                calls.map(visit).filter_map(Result::transpose).collect()
            };
            let columns = Columns::of(&shard, sizes.geometry.block_kv());
            let returned = |group: usize| {
                // Of several ranks, one list after the other.
                let lists = sorted(self.theirs[group][first].clone());
                let visited: Vec<_> = columns.within(&lists).collect();
                visited.first().map(|_| columns.rows(&visited)).into_iter().collect()
            };
            let turns: Vec<_> = (0..grid.scheme.keys).collect();
            let mut plan = Plan::new(grid, &turns, visits, returned)?;
            if let (Some(together), false) = (&mut together, stream.device().is_cpu()) {
                for mask in &mut together.masks {
                    *mask = mask.to(stream)?;
                }
            }
            plan.together = together;
            received += plan.steps.iter().map(|step| step.received).sum::<usize>();
            for call in plan.steps.iter_mut().flat_map(|step| &mut step.calls) {
                let Some(mask) = &mut call.block_mask else { continue };
                pairs += mask.visited_pairs(call.part.mask)?;
                if !stream.device().is_cpu() {
                    *mask = mask.to(stream)?;
                    for mask in &mut call.part_masks {
                        *mask = mask.to(stream)?;
                    }
                }
            }
            plans.push(plan);
        }
        let parts = (0..grid.scheme.keys).flat_map(|g| band.parts(&shard, &grid.rows_of(g)));
        let all = parts.map(|part| part.pairs()).sum::<f64>();
        let dense = Plan::dense(grid, &Pattern { band, cu_seqlens: None })?;
        let keys = dense.steps.iter().map(|step| step.received).sum::<usize>();
        let ratio = |some: f64, all: f64| if all == 0.0 { 1.0 } else { some / all };
        let lists = (sizes.batch * self.own.heads) as f64;
        let density = Density {
            pairs: ratio(pairs as f64, all * lists),
            keys: ratio(received as f64, (keys * plans.len()) as f64),
        };
        Ok((plans, density))
    }

    /// What one call visits of the keys of all other ranks, in this many parts of the heads: `None`
    /// where rows are not a whole number of blocks, since a block would reach into other rows of
    /// the window, or where the window has too many rows for one call.
    fn together(&self, sizes: &Sizes, entry: usize, parts: usize) -> Result<Option<Together>> {
        let (grid, block) = (&sizes.grid, sizes.geometry.block_kv());
        let (shard, most) = (grid.rows_of(grid.group()), grid.most_rows());
        let world = grid.scheme.keys;
        let whole = most.is_multiple_of(block) && shard.seqlen().is_multiple_of(block);
        if !whole || shard.rows() == 0 {
            return Ok(None);
        }
        let ranks = (0..world).filter(|rank| *rank != grid.group());
        let first = |rank: usize| (2 * most * rank / block) as i32;
        let of_ranks = ranks.map(|rank| (Columns::of(&grid.rows_of(rank), block), first(rank)));
        let of_ranks: Vec<_> = of_ranks.collect();
        let columns = |list: &[i32]| -> Vec<i32> {
            let of_rank = |(columns, first): &(Columns, i32)| -> Vec<i32> {
                columns.within(list).map(|column| column + first).collect()
            };
            of_ranks.iter().flat_map(of_rank).collect()
        };
        let (rows, keys) = (shard.rows(), (2 * world - 1) * most);
        let Ok(geometry) = BlockGeometry::new(rows, keys, sizes.geometry.block_q(), block) else {
            return Ok(None);
        };
        let heads = self.own.heads / parts;
        let mask = |part: usize| {
            let heads_of_part = part * heads..(part + 1) * heads;
            let lists = heads_of_part.map(|head| self.own.rows(entry, head, 0..self.own.rows));
            mask_of(geometry, [1, heads], lists, columns)
        };
        let masks = (0..parts).map(mask).collect::<Result<_>>()?;
        let slots = Slots { count: 2, ranges: vec![(0..rows, 0..2)] };
        Ok(Some(Together { masks, slots }))
    }

    /// A call of some entries, if it visits any block or counts the queries' own keys.
    fn visit(
        &self,
        sizes: &Sizes,
        entries: Range<usize>,
        part: Part,
        source: &Shard,
        parts: usize,
    ) -> Result<Option<Visit>> {
        let (block_q, block_kv) = (sizes.geometry.block_q(), sizes.geometry.block_kv());
        let rows = part.queries.start / block_q..part.queries.end.div_ceil(block_q);
        let columns = Columns::of(source, block_kv);
        let heads = || 0..self.own.heads;
        let groups = entries.clone().flat_map(|entry| heads().map(move |head| (entry, head)));
        let lists = |(entry, head)| self.own.rows(entry, head, rows.clone());
        // Those that come, or all.
        let (visited, keys) = match part.own {
            true => {
                ((0..part.keys.end.div_ceil(block_kv) as i32).collect(), vec![part.keys.clone()])
            }
            false => {
                let visited = groups.clone().flat_map(lists).flat_map(|list| columns.within(list));
                let visited: Vec<i32> = sorted(visited.collect());
                let keys = columns.rows(&visited);
                (visited, keys)
            }
        };
        if visited.is_empty() {
            return Ok(None);
        }
        let count = keys.iter().map(|rows| rows.len()).sum();
        let geometry = BlockGeometry::new(part.queries.len(), count, block_q, block_kv)?;
        let of_heads = |heads: Range<usize>| {
            let sizes = [entries.len(), heads.len()];
            let groups = groups.clone().filter(move |(_, head)| heads.contains(head));
            let place = |col| visited.partition_point(|&before| before < col) as i32;
            let places = |list: &[i32]| columns.within(list).map(place).collect();
            mask_of(geometry, sizes, groups.map(lists), places)
        };
        // Gradients need the transpose on a GPU.
        let block_mask = Some(of_heads(heads())?.with_transpose()?);
        let of_part = self.own.heads / parts;
        // Each query attends its own keys before any are gathered.
        let of_parts = if parts > 1 && !part.own { 0..parts } else { 0..0 };
        let part_masks = of_parts.map(|at| of_heads(at * of_part..(at + 1) * of_part));
        let part_masks = part_masks.collect::<Result<_>>()?;
        Ok(Some(Visit { part, keys, block_mask, part_masks }))
    }
}

/// A mask of the rows of each entry and head, with the columns that are made of their lists.
fn mask_of<'a>(
    geometry: BlockGeometry,
    [batch, heads]: [usize; 2],
    groups: impl Iterator<Item = &'a [Vec<i32>]>,
    columns: impl Fn(&[i32]) -> Vec<i32>,
) -> Result<BlockMask> {
    let (mut row_ptr, mut col_idx) = (Vec::new(), Vec::new());
    for lists in groups {
        row_ptr.push(col_idx.len() as i32);
        for list in lists {
            col_idx.extend(columns(list));
            row_ptr.push(col_idx.len() as i32);
        }
    }
    Ok(BlockMask::from_parts(geometry, batch, heads, &row_ptr, &col_idx)?)
}

/// The block columns of a group: of the whole sequence, and the first of them among its own.
struct Columns {
    ranges: [(Range<i32>, i32); 2],
    block: usize,
    rows: usize,
}

impl Columns {
    fn of(shard: &Shard, block: usize) -> Columns {
        let [first, second] = shard.ranges();
        let columns = |range: Range<usize>, row: usize| match range.is_empty() {
            true => (0..0, 0),
            false => {
                let columns = range.start / block..range.end.div_ceil(block);
                (columns.start as i32..columns.end as i32, (row / block) as i32)
            }
        };
        let row = first.len();
        Columns { ranges: [columns(first, 0), columns(second, row)], block, rows: shard.rows() }
    }

    /// Those of an ascending list of the whole sequence that are columns of the group, as such.
    fn within<'a>(&self, list: &'a [i32]) -> impl Iterator<Item = i32> + use<'a> {
        let part = |(columns, local): (Range<i32>, i32)| {
            let shift = local - columns.start;
            between(list, columns).iter().map(move |column| column + shift)
        };
        let [first, second] = self.ranges.clone().map(part);
        first.chain(second)
    }

    /// The same as columns of the sequence.
    fn of_sequence<'a>(&self, list: &'a [i32]) -> impl Iterator<Item = &'a i32> + use<'a> {
        let [first, second] = self.ranges.clone().map(|(columns, _)| between(list, columns));
        first.iter().chain(second)
    }

    /// The rows of columns of the group.
    fn rows(&self, columns: &[i32]) -> Vec<Range<usize>> {
        let rows = |&column: &i32| {
            let start = column as usize * self.block;
            start..(start + self.block).min(self.rows)
        };
        union(columns.iter().map(rows).collect())
    }
}

/// Those of an ascending list that are in a range.
fn between(list: &[i32], columns: Range<i32>) -> &[i32] {
    let until = |end: i32| list.partition_point(|&column| column < end);
    &list[until(columns.start)..until(columns.end)]
}

/// Ascending, each once.
fn sorted(mut columns: Vec<i32>) -> Vec<i32> {
    columns.sort_unstable();
    columns.dedup();
    columns
}

#[cfg(test)]
#[path = "block_lists_tests.rs"]
mod tests;
