//! One attention problem with its data: what is computed, from what, on which device, and whether
//! the result is right. Suites, the command and tests share it.

use super::block_lists::{OracleBlocks, describe};
use super::operands::{Operands, Placed, Progress, TensorInfo, launched, normal};
use super::scores;
use crate::error::Result;
use crate::io::Array;
use crate::memory::count;
use blockflash_ops::{
    Attention, AttentionProblem, BlockMask, CuSeqlens, CudaProperties, DType, Kernel, Operation,
    PreparedAttention, Scores, Stream, Tensor, ViewMut, attention, attention_flops,
    attention_varlen_flops,
};
use blockflash_oracle::{self as oracle, AttentionCase, Comparison};
use blockflash_sys::manifest::Lse;

/// The data of one attention problem, in host memory.
#[derive(Debug)]
pub struct AttentionData {
    /// `[batch, seqlen_q, heads, head_dim]`, packed `[rows, heads, head_dim]`.
    pub q: Array,
    /// `[batch, seqlen_kv, heads_kv, head_dim]`, packed `[rows, heads_kv, head_dim]`.
    pub k: Array,
    /// Shape of `k` but for the last size.
    pub v: Array,
    /// Lengths of the queries and of the keys of each sequence, if sequences are packed.
    pub lengths: Option<[Vec<usize>; 2]>,
    /// The blocks that are visited; `None`: all.
    pub block_mask: Option<BlockMask>,
}

impl AttentionData {
    /// N(0, 1) tensors for a problem: random streams 0, 1 and 2 of the seed.
    ///
    /// # Errors
    /// If there is not enough host memory.
    pub fn random(problem: &AttentionProblem, seed: u64) -> Result<Self> {
        let types = problem.types;
        let q = normal(&problem.q_shape(), types.q, seed, 0)?;
        let k = normal(&problem.k_shape(), types.kv, seed, 1)?;
        let v = normal(&problem.v_shape(), types.kv, seed, 2)?;
        Ok(Self { q, k, v, lengths: None, block_mask: None })
    }
}

/// Start of each packed sequence, and the end of the last one.
pub fn offsets(lengths: &[usize]) -> Vec<i32> {
    let ends = lengths.iter().scan(0usize, |end, length| {
        *end += length;
        Some(i32::try_from(*end).unwrap_or(i32::MAX))
    });
    std::iter::once(0).chain(ends).collect()
}

/// The output, and the log-sum-exp if it is wanted.
type Written<'a> = (ViewMut<'a>, Option<ViewMut<'a>>);

/// Inputs and outputs on a device.
#[derive(Debug)]
pub struct AttentionOperands {
    inputs: Inputs,
    pub(super) o: Tensor,
    pub(super) lse: Tensor,
    /// Whether the log-sum-exp is asked for.
    wants_lse: bool,
    prepared: Option<PreparedAttention>,
}

#[derive(Debug)]
struct Inputs {
    scores: Scores<Placed>,
    q: Placed,
    k: Placed,
    v: Placed,
    packed: Option<Packed>,
    blocks: Option<Visited>,
}

/// Sequences of a packed batch: queries, then keys.
#[derive(Debug)]
struct Packed {
    lengths: [Vec<usize>; 2],
    /// i32 `[batch + 1]`.
    offsets: [Placed; 2],
}

/// The visited blocks.
#[derive(Debug)]
struct Visited {
    mask: BlockMask,
    /// The same for the oracle.
    for_oracle: OracleBlocks,
}

impl Packed {
    fn longest(&self) -> [usize; 2] {
        self.lengths.each_ref().map(|lengths| lengths.iter().copied().max().unwrap_or(0))
    }
}

impl Inputs {
    fn new(scores: Scores<Array>, data: AttentionData, stream: &Stream) -> Result<Self> {
        let place = |array| Placed::new(array, stream);
        let packed = |lengths: [Vec<usize>; 2]| -> Result<Packed> {
            let [q, kv] = lengths.each_ref().map(|lengths| place(offsets(lengths).into()));
            Ok(Packed { lengths, offsets: [q?, kv?] })
        };
        let visited = |mask: BlockMask| -> Result<Visited> {
            Ok(Visited { for_oracle: OracleBlocks::of(&mask)?, mask: mask.to(stream)? })
        };
        Ok(Self {
            scores: scores.try_map(|_, array| place(array))?,
            q: place(data.q)?,
            k: place(data.k)?,
            v: place(data.v)?,
            packed: data.lengths.map(packed).transpose()?,
            blocks: data.block_mask.map(visited).transpose()?,
        })
    }

    fn call(&self) -> Result<Attention<'_>> {
        let cu_seqlens = match &self.packed {
            Some(packed) => {
                let ([q, kv], [max_seqlen_q, max_seqlen_kv]) = (&packed.offsets, packed.longest());
                Some(CuSeqlens { q: q.view()?, kv: kv.view()?, max_seqlen_q, max_seqlen_kv })
            }
            None => None,
        };
        Ok(Attention {
            scores: self.scores.as_ref().try_map(|_, placed| placed.view())?,
            cu_seqlens,
            block_mask: self.blocks.as_ref().map(|blocks| &blocks.mask),
            ..Attention::new(self.q.view()?, self.k.view()?, self.v.view()?)
        })
    }
}

impl AttentionOperands {
    /// Places the data on the stream's device and allocates the outputs. Without `wants_lse`, the
    /// log-sum-exp is computed only by kernels that always do.
    ///
    /// # Errors
    /// If the library refuses the problem, or there is not enough memory.
    pub fn new(
        scores: Scores<Array>,
        data: AttentionData,
        wants_lse: bool,
        stream: &Stream,
    ) -> Result<Self> {
        let inputs = Inputs::new(scores, data, stream)?;
        let call = inputs.call()?;
        call.check_cu_seqlens(stream)?;
        let problem = call.problem()?;
        let o = Tensor::empty(stream, problem.types.o, &problem.o_shape())?;
        let lse = Tensor::empty(stream, DType::F32, &problem.lse_shape())?;
        Ok(Self { inputs, o, lse, wants_lse, prepared: None })
    }

    /// Computes the output and the log-sum-exp.
    pub(super) fn with_lse(&mut self, stream: &Stream) -> Result<()> {
        self.wants_lse = true;
        self.launch(None, stream)
    }

    pub(super) fn attention(&self) -> Result<Attention<'_>> {
        self.inputs.call()
    }

    /// The call and its outputs.
    fn call(&mut self, kernel: Option<&Kernel>) -> Result<(Attention<'_>, Written<'_>)> {
        let lse = self.has_lse(kernel).then(|| self.lse.view_mut());
        Ok((self.inputs.call()?, (self.o.view_mut(), lse)))
    }

    /// The case of the oracle; none for a mask that it does not know.
    pub(super) fn for_oracle(&self) -> Result<AttentionCase<'_>> {
        let Inputs { scores: placed, q, k, v, packed, blocks } = &self.inputs;
        let scores = self.inputs.call()?.problem()?.scores;
        let qkv = [q.host() as _, k.host() as _, v.host() as _];
        let case = scores::for_oracle(&scores, qkv, placed)?;
        Ok(AttentionCase {
            lengths: packed.as_ref().map(|packed| packed.lengths.each_ref().map(Vec::as_slice)),
            blocks: blocks.as_ref().map(|blocks| blocks.for_oracle.view()),
            ..case
        })
    }

    /// Whether this kernel, or the selected one, is to compute the log-sum-exp.
    fn has_lse(&self, kernel: Option<&Kernel>) -> bool {
        let tile = kernel.and_then(Kernel::attention_tile);
        self.wants_lse || tile.is_some_and(|tile| tile.lse == Lse::Always)
    }

    /// The problem that the given kernel, or the selected one, computes.
    fn problem(&mut self, kernel: Option<&Kernel>) -> Result<AttentionProblem> {
        let (call, (o, lse)) = self.call(kernel)?;
        Ok(call.problem()?.with_outputs(&o, lse.as_ref())?)
    }
}

impl Operands for AttentionOperands {
    fn inputs(&self) -> Vec<TensorInfo> {
        let Inputs { q, k, v, .. } = &self.inputs;
        [("q", q), ("k", k), ("v", v)].map(|(name, tensor)| tensor.info(name)).to_vec()
    }

    fn details(&mut self) -> Result<Vec<(&'static str, String)>> {
        let problem = self.problem(None)?;
        let Inputs { packed, blocks, .. } = &self.inputs;
        let differ = match packed {
            Some(Packed { lengths: [q, kv], .. }) => q != kv,
            None => problem.seqlen_q != problem.seqlen_kv,
        };
        let mut details = scores::details(&problem.scores, differ);
        if let Some(packed) = packed {
            let [queries, keys] = packed.longest();
            let sequences = count(packed.lengths[0].len() as u64);
            let text = format!("{sequences}, at most {queries} queries and {keys} keys");
            details.push(("sequences", text));
        }
        details.extend(blocks.as_ref().map(|blocks| ("block mask", describe(&blocks.mask))));
        Ok(details)
    }

    /// Those of the pairs that both masks show.
    fn flops(&mut self) -> Result<f64> {
        let problem = self.problem(None)?;
        let Inputs { packed, blocks, .. } = &self.inputs;
        Ok(match (blocks, packed) {
            (Some(Visited { mask, .. }), _) => {
                let shared = mask.batch() == 1 && problem.packed.is_none();
                let entries = if shared { problem.batch } else { 1 };
                let copies = entries * (problem.num_heads_q / mask.heads());
                let pairs = mask.visited_pairs(problem.scores.mask)?;
                2.0 * pairs as f64 * (copies * problem.head_dims.sum()) as f64
            }
            (None, Some(packed)) => {
                let [q, kv] = packed.lengths.each_ref().map(|lengths| offsets(lengths));
                attention_varlen_flops(&problem, &q, &kv) as f64
            }
            (None, None) => attention_flops(&problem).unwrap_or(0) as f64,
        })
    }

    launched!(attention::accepts);

    fn outputs(&mut self, kernel: Option<&Kernel>) -> Vec<(&'static str, &mut Tensor)> {
        let lse = self.has_lse(kernel).then_some(("lse", &mut self.lse));
        [Some(("o", &mut self.o)), lse].into_iter().flatten().collect()
    }

    fn compare(
        &self,
        outputs: &[Array],
        seed: u64,
        progress: Progress<'_>,
    ) -> Result<Vec<Comparison>> {
        let case = self.for_oracle()?;
        Ok(match outputs {
            [o, lse] => oracle::attention(&case, o, lse, seed, progress)?.to_vec(),
            [o, ..] => vec![oracle::attention_output(&case, o, seed, progress)?],
            [] => Vec::new(), // the output is always there
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Case;
    use blockflash_ops::Device;

    fn operands(id: &str, stream: &Stream) -> (Case, AttentionOperands) {
        let case: Case = id.parse().unwrap();
        let operands = case.attention().unwrap().forward(stream, 5).unwrap();
        (case, operands)
    }

    #[test]
    fn kernels_are_chosen_for_the_problem_that_is_launched() {
        let stream = Device::cpu().stream().unwrap();
        let (dense, operands_of_dense) = operands("b2_q3_kv9_h4kv2_d16_causal_bf16", &stream);
        let (packed, operands_of_packed) = operands("varlen7+2x3_h4kv2_d16_causal_bf16", &stream);
        for (case, mut operands) in [(dense, operands_of_dense), (packed, operands_of_packed)] {
            let expected = case.attention().unwrap().problem();
            assert_eq!(operands.problem(None).unwrap(), expected);
            assert!(operands.prepare(&stream).unwrap());
            operands.launch_prepared(&stream).unwrap();
        }
    }

    #[test]
    fn lists_of_blocks_are_a_part_of_the_problem() {
        let stream = Device::cpu().stream().unwrap();
        let (case, mut operands) =
            operands("b1_s256_h4kv2m2_d16_q64kv128_d0.5_uniform_causal_bf16", &stream);
        let problem = operands.problem(None).unwrap();
        let sizes = problem.block_mask.unwrap();
        assert_eq!((sizes.block_q, sizes.block_kv, sizes.batch, sizes.heads), (64, 128, 1, 2));
        let shape = case.attention().unwrap();
        let blocks = operands.inputs.blocks.as_ref().unwrap();
        assert_eq!(blocks.mask.nnz(), shape.block_sparse().unwrap().nnz_blocks() / 2);
        assert_eq!(AttentionProblem { block_mask: None, ..problem }, shape.problem());
    }

    #[test]
    fn sequences_lie_one_behind_the_other() {
        let stream = Device::cpu().stream().unwrap();
        let (_, operands) = operands("varlen7+2x3_h4kv2_d16_causal_bf16", &stream);
        let Inputs { q, k, .. } = &operands.inputs;
        let [o, lse] = [&operands.o, &operands.lse].map(Tensor::shape);
        let shapes = [q.host().shape(), k.host().shape(), o, lse];
        assert_eq!(shapes, [&[13, 4, 16][..], &[13, 2, 16], &[13, 4, 16], &[4, 13]]);
        let packed = operands.inputs.packed.as_ref().unwrap();
        let offsets = packed.offsets.each_ref().map(|offsets| offsets.host().as_i32().unwrap());
        assert_eq!(offsets, [[0, 7, 9, 11, 13]; 2]);
        let cu_seqlens = operands.inputs.call().unwrap().cu_seqlens.unwrap();
        assert_eq!((cu_seqlens.max_seqlen_q, cu_seqlens.max_seqlen_kv), (7, 7));
    }
}
