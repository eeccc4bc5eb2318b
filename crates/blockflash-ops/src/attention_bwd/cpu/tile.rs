use super::{BLOCK, Operands, Task};
use crate::Result;
use crate::attention::AttentionProblem;
use crate::attention::cpu::sequence::{Sequence, clip, load, row_stride, steps, visited};
use crate::float::Float;
use blockflash_safe::{View, ViewMut, host_gemm};
use blockflash_sys::HeadDims;
use std::ops::Range;

/// Rows of the other operands per step, chosen so that all panels stay in the L2 cache.
const STEP: usize = 256;

/// The f32 panels of one thread: a block of queries against a block of keys.
pub(super) struct Tile {
    head_dims: HeadDims,
    /// `[queries, head_dims.qk]`
    q: Vec<f32>,
    /// `[queries, head_dims.v]`
    d_o: Vec<f32>,
    /// `[keys, head_dims.qk]`
    k: Vec<f32>,
    /// `[keys, head_dims.v]`
    v: Vec<f32>,
    /// Scores and then probabilities, `[queries, keys]`.
    p: Vec<f32>,
    /// `d_o · v` and then the gradients of `q · k · scale`, `[queries, keys]`.
    ds: Vec<f32>,
    /// `dq`, or `dk` and `dv`, `[rows, head_dims.qk]` and `[rows, head_dims.v]`.
    sums: [Vec<f32>; 2],
}

impl Tile {
    pub(super) fn new(problem: &AttentionProblem) -> Self {
        let AttentionProblem { head_dims, seqlen_q, seqlen_kv, .. } = *problem;
        let (queries, keys) = (STEP.min(seqlen_q), STEP.min(seqlen_kv));
        let pairs = (BLOCK.min(seqlen_q) * keys).max(queries * BLOCK.min(seqlen_kv));
        let panel = |elements: usize| vec![0.0; elements];
        Self {
            head_dims,
            q: panel(queries * row_stride(head_dims.qk)),
            d_o: panel(queries * row_stride(head_dims.v)),
            k: panel(keys * row_stride(head_dims.qk)),
            v: panel(keys * row_stride(head_dims.v)),
            p: panel(pairs),
            ds: panel(pairs),
            sums: [Vec::new(), Vec::new()],
        }
    }

    /// The gradients of the last task.
    pub(super) fn sums(&self) -> &[Vec<f32>; 2] {
        &self.sums
    }

    /// Computes `dq` of some queries.
    pub(super) fn dq<T: Float>(&mut self, operands: &Operands<'_, T>, task: &Task) -> Result<()> {
        let Task { sequence, head, rows: queries } = task;
        let forward = &operands.problem.forward;
        self.clear(queries.len());
        self.load_queries(operands, sequence, *head, queries);
        let head_kv = head / (forward.num_heads_q / forward.num_heads_kv);
        let visible =
            |query| forward.scores.mask.visible(query, sequence.seqlen_q, sequence.seqlen_kv);
        // Both ends of the visible range are nondecreasing from query to query.
        let within = visible(queries.start).start..visible(queries.end - 1).end;
        let at = [sequence.entry, *head];
        let visited = visited(operands.block_mask, forward, at, queries.start, sequence.seqlen_kv)?;
        for keys in steps(visited, within, STEP) {
            self.load_keys(operands, sequence, head_kv, &keys);
            self.differentiate(operands, sequence, *head, [queries, &keys])?;
            let ds = pairs(&self.ds, queries.len(), keys.len())?;
            add(&mut self.sums[0], forward.scores.softmax_scale, ds, &self.k, self.head_dims.qk)?;
        }
        Ok(())
    }

    /// Computes `dk` and `dv` of some keys, from all query heads of their group.
    pub(super) fn dk_dv<T: Float>(
        &mut self,
        operands: &Operands<'_, T>,
        task: &Task,
    ) -> Result<()> {
        let Task { sequence, head: head_kv, rows: keys } = task;
        let forward = &operands.problem.forward;
        self.clear(keys.len());
        self.load_keys(operands, sequence, *head_kv, keys);
        let group = forward.num_heads_q / forward.num_heads_kv;
        let attending = forward.scores.mask.attending(keys, sequence.seqlen_q, sequence.seqlen_kv);
        for head in head_kv * group..(head_kv + 1) * group {
            let (mask, at) = (operands.transposed.as_ref(), [sequence.entry, head]);
            let visited = visited(mask, forward, at, keys.start, sequence.seqlen_q)?;
            for queries in steps(visited, attending.clone(), STEP) {
                self.load_queries(operands, sequence, head, &queries);
                self.differentiate(operands, sequence, head, [&queries, keys])?;
                let [p, ds] = [&self.p, &self.ds]
                    .map(|panel| pairs(panel, queries.len(), keys.len())?.permute(&[1, 0]));
                let [dk, dv] = &mut self.sums;
                add(dk, forward.scores.softmax_scale, ds?, &self.q, self.head_dims.qk)?;
                add(dv, 1.0, p?, &self.d_o, self.head_dims.v)?;
            }
        }
        Ok(())
    }

    fn clear(&mut self, rows: usize) {
        let HeadDims { qk, v } = self.head_dims;
        for (sums, head_dim) in self.sums.iter_mut().zip([qk, v]) {
            sums.clear();
            sums.resize(rows * head_dim, 0.0);
        }
    }

    fn load_queries<T: Float>(
        &mut self,
        operands: &Operands<'_, T>,
        sequence: &Sequence,
        head: usize,
        queries: &Range<usize>,
    ) {
        let (problem, HeadDims { qk, v }) = (operands.problem, self.head_dims);
        for (panel, source, strides, head_dim) in [
            (&mut self.q, operands.q, problem.forward.q, qk),
            (&mut self.d_o, operands.d_o, problem.d_o, v),
        ] {
            let start = |query| sequence.q_row(strides, head, query);
            load(panel, source, queries.clone(), head_dim, start);
        }
    }

    fn load_keys<T: Float>(
        &mut self,
        operands: &Operands<'_, T>,
        sequence: &Sequence,
        head_kv: usize,
        keys: &Range<usize>,
    ) {
        let (forward, HeadDims { qk, v }) = (&operands.problem.forward, self.head_dims);
        for (panel, source, strides, head_dim) in
            [(&mut self.k, operands.k, forward.k, qk), (&mut self.v, operands.v, forward.v, v)]
        {
            let start = |key| sequence.kv_row(strides, head_kv, key);
            load(panel, source, keys.clone(), head_dim, start);
        }
    }

    /// Probabilities and gradients of scores of the loaded queries and keys. They are 0 where a
    /// pair is masked, whatever its products are.
    fn differentiate<T: Float>(
        &mut self,
        operands: &Operands<'_, T>,
        sequence: &Sequence,
        head: usize,
        [queries, keys]: [&Range<usize>; 2],
    ) -> Result<()> {
        let forward = &operands.problem.forward;
        let (columns, HeadDims { qk, v }) = (keys.len(), self.head_dims);
        let shape = |head_dim| [queries.len(), columns, head_dim];
        multiply(&mut self.p, forward.scores.softmax_scale, &self.q, &self.k, shape(qk))?;
        multiply(&mut self.ds, 1.0, &self.d_o, &self.v, shape(v))?;
        let visible =
            |query| forward.scores.mask.visible(query, sequence.seqlen_q, sequence.seqlen_kv);
        let panels = self.p.chunks_exact_mut(columns).zip(self.ds.chunks_exact_mut(columns));
        for (query, (p, ds)) in queries.clone().zip(panels) {
            let [lse, delta] = operands.statistics(sequence, head, query);
            let nothing = lse == f32::NEG_INFINITY;
            let visible = if nothing { 0..0 } else { clip(visible(query), keys) };
            for row in [&mut *p, &mut *ds] {
                row[..visible.start].fill(0.0);
                row[visible.end..].fill(0.0);
            }
            let (p, ds) = (&mut p[visible.clone()], &mut ds[visible]);
            forward.scores.gradients(p, ds, [lse, delta]);
        }
        Ok(())
    }
}

/// A panel of pairs.
fn pairs(panel: &[f32], rows: usize, columns: usize) -> blockflash_safe::Result<View<'_>> {
    View::from_slice(&panel[..rows * columns], &[rows, columns])
}

/// `target = scale·a·bᵀ` of the first rows of `a` and `b`.
fn multiply(
    target: &mut [f32],
    scale: f32,
    a: &[f32],
    b: &[f32],
    [rows, columns, head_dim]: [usize; 3],
) -> Result<()> {
    let a = View::from_slice_strided(a, &[rows, head_dim], &[row_stride(head_dim), 1])?;
    let b_t = View::from_slice_strided(b, &[head_dim, columns], &[1, row_stride(head_dim)])?;
    let target = ViewMut::from_slice(&mut target[..rows * columns], &[rows, columns])?;
    Ok(host_gemm(scale, a, b_t, false, target)?)
}

/// `sums += scale·factors·rows` of the first rows of `rows`.
fn add(
    sums: &mut [f32],
    scale: f32,
    factors: View<'_>,
    rows: &[f32],
    head_dim: usize,
) -> Result<()> {
    let (count, terms) = (factors.shape()[0], factors.shape()[1]);
    let rows = View::from_slice_strided(rows, &[terms, head_dim], &[row_stride(head_dim), 1])?;
    let sums = ViewMut::from_slice(sums, &[count, head_dim])?;
    Ok(host_gemm(scale, factors, rows, true, sums)?)
}
