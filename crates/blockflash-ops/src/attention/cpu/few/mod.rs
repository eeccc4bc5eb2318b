//! Attention of few queries to many keys, as in decoding: rows of queries are too few to be lanes,
//! so elements of heads are, and f32 keys and values are read where they are.
//!
//! Heads of a sequence go together, some keys of each at a time: their rows are side by side in
//! memory, which is then read in its order. What is computed of a head does not depend on which
//! heads go with it.

mod vectors;

use super::Operands;
use super::sequence::{QueryRows, clip, steps, visited};
use super::softmax::finish;
use crate::Result;
use crate::attention::AttentionProblem;
use crate::float::Float;
use crate::panels::vectorized;
use blockflash_sys::HeadDims;
use std::ops::Range;
use vectors::{Add, Keys, Scores, Shrink, Softmax};

/// Rows up to which elements of heads are the lanes.
const MOST: usize = 8;

/// Keys per step: their scores stay in the L1 cache.
const STEP: usize = 256;

/// Keys of a head that are read before those of the next one.
const PART: usize = 8;

/// Whether the rows of a task are few. Partial blocks of a mask are not for them: few rows go
/// together by the keys that all of them see.
pub(super) fn are_few(problem: &AttentionProblem, task: &QueryRows) -> bool {
    task.of_sequence() <= MOST && !problem.block_mask.is_some_and(|mask| mask.bits)
}

/// Tasks whose heads go together, for this number of threads.
pub(super) fn groups<'a>(
    problem: &AttentionProblem,
    tasks: &'a [QueryRows],
    threads: usize,
) -> Vec<&'a [QueryRows]> {
    let most = tasks.len().div_ceil(threads.max(1)).max(1);
    let together = |a: &QueryRows, b: &QueryRows| {
        let [a_few, b_few] = [a, b].map(|task| are_few(problem, task));
        a_few && b_few && a.sequence.entry == b.sequence.entry && problem.block_mask.is_none()
    };
    tasks.chunk_by(together).flat_map(|group| group.chunks(most)).collect()
}

/// The f32 operands of one thread. Rows are those of all heads.
#[derive(Default)]
pub(super) struct Few {
    /// `[rows, head_dims.qk]`
    q: Vec<f32>,
    /// Scores and then probabilities, `[rows, STEP]`.
    s: Vec<f32>,
    /// What the scores of each row are multiplied with.
    factors: Vec<f32>,
    /// What is added to the scores of a row.
    terms: Vec<f32>,
    running: Vec<Running>,
    /// Sums of probability times value of a step, `[rows, head_dims.v]`.
    sums: Vec<f32>,
    /// Converted keys or values of a part.
    converted: Vec<f32>,
}

/// The running softmax of a row.
#[derive(Clone, Copy)]
struct Running {
    max: f32,
    sum: f32,
    /// What sums of earlier steps shrink by.
    shrink: f32,
}

impl Running {
    const START: Self = Self { max: f32::NEG_INFINITY, sum: 0.0, shrink: 1.0 };
}

impl Few {
    /// Computes the rows of some heads of a sequence: outputs `[rows, head_dims.v]` and the
    /// log-sum-exp of each row.
    pub(super) fn compute<T: Float>(
        &mut self,
        operands: &Operands<'_, T>,
        tasks: &[QueryRows],
        o: &mut Vec<f32>,
        lse: &mut Vec<f32>,
    ) -> Result<()> {
        let (problem, QueryRows { sequence, rows, .. }) = (operands.problem, &tasks[0]);
        let (rows, HeadDims { qk, v: v_dim }) = (rows.clone(), problem.head_dims);
        let all = tasks.len() * rows.len();
        o.clear();
        o.resize(all * v_dim, 0.0);
        self.sums.clear();
        self.sums.resize(all * v_dim, 0.0);
        self.q.resize(all * qk, 0.0);
        self.s.resize(all * STEP, 0.0);
        self.running.clear();
        self.running.resize(all, Running::START);
        self.factors.clear();
        for (q, [head, query]) in self.q.chunks_exact_mut(qk).zip(rows_of(tasks)) {
            self.factors.push(operands.factor(sequence, head));
            T::widen(&operands.q[sequence.q_row(problem.q, head, query)..][..qk], q);
        }
        let visible = |row| {
            let [_, query] = tasks[0].at(row);
            problem.scores.mask.visible(query, sequence.seqlen_q, sequence.seqlen_kv)
        };
        let visible: Vec<Range<usize>> = rows.clone().map(visible).collect();
        let [head, first_query] = tasks[0].at(rows.start);
        let at = [sequence.entry, head];
        let visited = visited(operands.block_mask, problem, at, first_query, sequence.seqlen_kv)?;
        let within = visible[0].start..visible[rows.len() - 1].end;
        for keys in steps(visited.ranges, within, STEP) {
            let mut first = 0;
            // Rows that see the same keys of the step go together, so no pair is masked.
            while first < rows.len() {
                let seen = clip(visible[first].clone(), &keys);
                let same = |row: &usize| clip(visible[*row].clone(), &keys) == seen;
                let end = (first + 1..rows.len()).take_while(same).count() + first + 1;
                let seen = keys.start + seen.start..keys.start + seen.end;
                if !seen.is_empty() {
                    self.attend(operands, tasks, first..end, &seen, o);
                }
                first = end;
            }
        }
        lse.clear();
        let places = o.chunks_exact_mut(v_dim).zip(&self.running);
        for ([head, _], (o, running)) in rows_of(tasks).zip(places) {
            let factor = operands.scales.of_values(sequence.entry, head);
            let sums = [running.max, running.sum];
            lse.push(finish(sums, operands.without_value(head), factor, o));
        }
        Ok(())
    }

    /// Some rows of each task and keys of a step that all of them see.
    fn attend<T: Float>(
        &mut self,
        operands: &Operands<'_, T>,
        tasks: &[QueryRows],
        rows: Range<usize>,
        seen: &Range<usize>,
        o: &mut [f32],
    ) {
        let (problem, sequence, each) = (operands.problem, &tasks[0].sequence, tasks[0].rows.len());
        let HeadDims { qk, v: v_dim } = problem.head_dims;
        let group = problem.num_heads_q / problem.num_heads_kv;
        let first_key = |strides, task: usize, key| {
            let [head, _] = tasks[task].at(tasks[task].rows.start);
            sequence.kv_row(strides, head / group, key)
        };
        let rows_of_task = |task: usize| task * each + rows.start..task * each + rows.end;
        let parts = seen.clone().step_by(PART).flat_map(|start| {
            let keys = start..(start + PART).min(seen.end);
            (0..tasks.len()).map(move |task| (task, keys.clone()))
        });
        for (task, keys) in parts.clone() {
            let k = &operands.k[first_key(problem.k, task, keys.start)..];
            let rows = rows_of_task(task);
            vectorized(Scores {
                q: &self.q[rows.start * qk..rows.end * qk],
                k: Keys::of(k, problem.k, qk, keys.len(), &mut self.converted),
                s: &mut self.s[rows.start * STEP..rows.end * STEP],
                first: keys.start - seen.start,
                factors: &self.factors[rows],
            });
        }
        for (task, row) in
            (0..tasks.len()).flat_map(|task| rows.clone().map(move |row| (task, row)))
        {
            if let Some(terms) = &operands.terms {
                self.terms.resize(seen.len(), 0.0);
                let at = tasks[task].at(tasks[task].rows.start + row);
                terms.load(sequence, at, seen.clone(), &mut self.terms);
            }
            let row = task * each + row;
            vectorized(Softmax {
                s: &mut self.s[row * STEP..][..seen.len()],
                terms: operands.terms.as_ref().map(|_| &*self.terms),
                running: &mut self.running[row],
                scores: &problem.scores,
            });
        }
        for (task, keys) in parts {
            let v = &operands.v[first_key(problem.v, task, keys.start)..];
            let rows = rows_of_task(task);
            vectorized(Add {
                p: &self.s[rows.start * STEP..rows.end * STEP],
                v: Keys::of(v, problem.v, v_dim, keys.len(), &mut self.converted),
                sums: &mut self.sums[rows.start * v_dim..rows.end * v_dim],
                first: keys.start - seen.start,
            });
        }
        for row in (0..tasks.len()).flat_map(rows_of_task) {
            let columns = row * v_dim..(row + 1) * v_dim;
            let sums = &mut self.sums[columns.clone()];
            vectorized(Shrink { o: &mut o[columns], factor: self.running[row].shrink, sums });
        }
    }
}

/// Head and query of each row of some tasks.
fn rows_of(tasks: &[QueryRows]) -> impl Iterator<Item = [usize; 2]> {
    tasks.iter().flat_map(|task| task.rows.clone().map(|row| task.at(row)))
}
