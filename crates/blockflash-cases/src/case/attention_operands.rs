//! Operands of attention: dense batches, packed sequences of different lengths, and block masks.

use super::block_lists::BlockLists;
use super::lengths::Lengths;
use super::operands::{Operands, normal};
use crate::error::{Error, Result};
use crate::io::Array;
use blockflash_ops::tuning::Likeness;
use blockflash_ops::{
    Attention, AttentionProblem, BlockMask, CuSeqlens, CudaProperties, DType, Kernel, Mask,
    Operation, PackedRows, PreparedAttention, Stream, Tensor, attention,
};
use blockflash_oracle::{self as oracle, AttentionCase, Comparison, Mismatch};
use blockflash_sys::manifest::Lse;

/// Inputs and outputs on the device.
#[derive(Debug)]
pub(super) struct AttentionOperands {
    inputs: Inputs,
    pub(super) o: Tensor,
    pub(super) lse: Tensor,
    /// q, k and v, for the oracle.
    host: [Array; 3],
    prepared: Option<PreparedAttention>,
}

#[derive(Debug)]
struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    softmax_scale: f32,
    packed: Option<Packed>,
    blocks: Option<Blocks>,
}

/// The visited blocks.
#[derive(Debug)]
struct Blocks {
    /// The same lists for the oracle.
    lists: BlockLists,
    mask: BlockMask,
}

/// Position of the sequences in a packed batch.
#[derive(Debug)]
struct Packed {
    lengths: Lengths,
    /// i32 `[batch + 1]`, for queries and keys alike.
    offsets: Tensor,
}

impl Inputs {
    fn call(&self) -> Attention<'_> {
        let cu_seqlens = self.packed.as_ref().map(|packed| {
            let (offsets, longest) = (packed.offsets.view(), packed.lengths.longest());
            CuSeqlens { q: offsets, kv: offsets, max_seqlen_q: longest, max_seqlen_kv: longest }
        });
        let call = Attention::new(self.q.view(), self.k.view(), self.v.view());
        let block_mask = self.blocks.as_ref().map(|blocks| &blocks.mask);
        Attention { mask: self.mask, cu_seqlens, block_mask, ..call }
    }
}

/// Shapes of q and o, of k and v, and of lse.
fn shapes(problem: &AttentionProblem) -> [Vec<usize>; 3] {
    let AttentionProblem {
        batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, head_dim, ..
    } = *problem;
    match problem.packed {
        None => [
            vec![batch, seqlen_q, num_heads_q, head_dim],
            vec![batch, seqlen_kv, num_heads_kv, head_dim],
            vec![batch, num_heads_q, seqlen_q],
        ],
        Some(PackedRows { total_q, total_kv }) => [
            vec![total_q, num_heads_q, head_dim],
            vec![total_kv, num_heads_kv, head_dim],
            vec![num_heads_q, total_q],
        ],
    }
}

impl AttentionOperands {
    /// Operands of a problem: `lengths` if its sequences are packed, and a block mask if it visits
    /// only some blocks.
    pub(super) fn new(
        problem: &AttentionProblem,
        lengths: Option<&Lengths>,
        lists: Option<BlockLists>,
        stream: &Stream,
        seed: u64,
    ) -> Result<Self> {
        let [q_shape, kv_shape, lse_shape] = shapes(problem);
        let dtype = problem.dtype;
        let host = [
            normal(&q_shape, dtype, seed, 0)?,
            normal(&kv_shape, dtype, seed, 1)?,
            normal(&kv_shape, dtype, seed, 2)?,
        ];
        let packed = |lengths: &Lengths| -> Result<Packed> {
            let offsets = lengths.offsets();
            let offsets = Tensor::from_slice(stream, &offsets, &[offsets.len()])?;
            Ok(Packed { lengths: lengths.clone(), offsets })
        };
        let blocks =
            |lists: BlockLists| Ok::<_, Error>(Blocks { mask: lists.mask(stream)?, lists });
        let inputs = Inputs {
            q: host[0].upload(stream)?,
            k: host[1].upload(stream)?,
            v: host[2].upload(stream)?,
            mask: problem.mask,
            softmax_scale: problem.softmax_scale,
            packed: lengths.map(packed).transpose()?,
            blocks: lists.map(blocks).transpose()?,
        };
        let o = Tensor::empty(stream, dtype, &q_shape)?;
        let lse = Tensor::empty(stream, DType::F32, &lse_shape)?;
        Ok(Self { inputs, o, lse, host, prepared: None })
    }

    /// Computes the output and the log-sum-exp.
    pub(super) fn with_lse(&mut self, stream: &Stream) -> Result<()> {
        let (o, lse) = (self.o.view_mut(), self.lse.view_mut());
        Ok(self.inputs.call().forward_into(o, Some(lse), stream)?)
    }

    pub(super) fn call(&self) -> Attention<'_> {
        self.inputs.call()
    }

    /// q, k and v.
    pub(super) fn inputs(&self) -> [&Tensor; 3] {
        [&self.inputs.q, &self.inputs.k, &self.inputs.v]
    }

    pub(super) fn for_oracle(&self) -> AttentionCase<'_> {
        let Inputs { mask, softmax_scale, packed, blocks, .. } = &self.inputs;
        let [q, k, v] = &self.host;
        AttentionCase {
            q,
            k,
            v,
            sink: None,
            lengths: packed.as_ref().map(|packed| [packed.lengths.as_slice(); 2]),
            blocks: blocks.as_ref().map(|blocks| blocks.lists.for_oracle()),
            bottom_right: true,
            left: None,
            right: (*mask != Mask::Full).then_some(0),
            softmax_scale: *softmax_scale,
            softcap: None,
        }
    }

    /// The problem that the given kernel, or the selected one, computes: the log-sum-exp is an
    /// output only if the kernel always writes it.
    fn problem_for(&mut self, kernel: Option<&Kernel>) -> Result<AttentionProblem> {
        let lse = asks_for_lse(kernel).then(|| self.lse.view_mut());
        Ok(self.inputs.call().problem()?.with_outputs(&self.o.view_mut(), lse.as_ref())?)
    }
}

impl Operands for AttentionOperands {
    fn select(&mut self, gpu: &CudaProperties) -> Result<&'static Kernel> {
        Ok(attention::select(&self.problem_for(None)?, gpu)?)
    }

    fn accepts(&mut self, kernel: &Kernel, gpu: &CudaProperties) -> Result<bool> {
        Ok(attention::accepts(kernel, &self.problem_for(Some(kernel))?, gpu).is_ok())
    }

    fn likeness(&mut self) -> Result<Option<Likeness>> {
        Ok(Likeness::of_attention(&self.problem_for(None)?))
    }

    fn launch(&mut self, kernel: Option<&'static Kernel>, stream: &Stream) -> Result<()> {
        let lse = asks_for_lse(kernel).then(|| self.lse.view_mut());
        let (call, o) = (self.inputs.call(), self.o.view_mut());
        match kernel {
            None => call.forward_into(o, lse, stream)?,
            Some(kernel) => call.run_with(kernel, (o, lse), stream)?,
        }
        Ok(())
    }

    fn prepare(&mut self, stream: &Stream) -> Result<bool> {
        self.prepared = Some(self.inputs.call().prepare(&(self.o.view_mut(), None), stream)?);
        Ok(true)
    }

    fn launch_prepared(&mut self, stream: &Stream) -> Result<()> {
        let Some(prepared) = &self.prepared else { return self.launch(None, stream) };
        Ok(self.inputs.call().run_prepared(prepared, (self.o.view_mut(), None), stream)?)
    }

    fn outputs(&mut self, kernel: Option<&Kernel>) -> Vec<&mut Tensor> {
        let lse = asks_for_lse(kernel).then_some(&mut self.lse);
        [Some(&mut self.o), lse].into_iter().flatten().collect()
    }

    fn compare(&self, outputs: &[Array], seed: u64) -> Result<Vec<Comparison>, Mismatch> {
        let case = self.for_oracle();
        match outputs {
            [o, lse] => Ok(oracle::attention(&case, o, lse, seed, |_| ())?.to_vec()),
            [o, ..] => Ok(vec![oracle::attention_output(&case, o, seed, |_| ())?]),
            [] => Ok(Vec::new()), // the output is always there
        }
    }
}

/// The library selects a kernel without log-sum-exp unless it is asked for, so the selected kernel
/// is measured without it.
fn asks_for_lse(kernel: Option<&Kernel>) -> bool {
    kernel.and_then(Kernel::attention_tile).is_some_and(|tile| tile.lse == Lse::Always)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Case;
    use blockflash_ops::Device;

    fn operands(id: &str, stream: &Stream) -> (Case, AttentionOperands) {
        let case: Case = id.parse().unwrap();
        let of = |problem: &AttentionProblem, lengths, lists| {
            AttentionOperands::new(problem, lengths, lists, stream, 5).unwrap()
        };
        let operands = match &case {
            Case::AttentionFwd(shape) => of(&shape.problem(), None, None),
            Case::VarlenFwd(shape) => of(&shape.problem(), Some(&shape.lengths), None),
            Case::BlockSparseFwd(shape) => of(&shape.dense().problem(), None, Some(shape.lists(5))),
            _ => unreachable!(),
        };
        (case, operands)
    }

    #[test]
    fn kernels_are_chosen_for_the_problem_that_is_launched() {
        let stream = Device::cpu().stream().unwrap();
        let (dense, operands_of_dense) = operands("b2_q3_kv9_h4kv2_d16_causal_bf16", &stream);
        let (packed, operands_of_packed) = operands("varlen7+2x3_h4kv2_d16_causal_bf16", &stream);
        for (case, mut operands) in [(dense, operands_of_dense), (packed, operands_of_packed)] {
            let expected = match &case {
                Case::AttentionFwd(shape) => shape.problem(),
                Case::VarlenFwd(shape) => shape.problem(),
                _ => unreachable!(),
            };
            assert_eq!(operands.problem_for(None).unwrap(), expected);
            let inputs = &operands.inputs;
            inputs.call().check_cu_seqlens(&stream).unwrap();
            assert!(operands.prepare(&stream).unwrap());
            operands.launch_prepared(&stream).unwrap();
        }
    }

    #[test]
    fn lists_of_blocks_are_a_part_of_the_problem() {
        let stream = Device::cpu().stream().unwrap();
        let (case, mut operands) =
            operands("b1_s256_h4kv2m2_d16_q64kv128_d0.5_uniform_causal_bf16", &stream);
        let problem = operands.problem_for(None).unwrap();
        let sizes = problem.block_mask.unwrap();
        assert_eq!((sizes.block_q, sizes.block_kv, sizes.batch, sizes.heads), (64, 128, 1, 2));
        let Case::BlockSparseFwd(shape) = case else { unreachable!() };
        let blocks = operands.inputs.blocks.as_ref().unwrap();
        assert_eq!(blocks.mask.nnz(), shape.nnz_blocks() / 2);
        assert_eq!(AttentionProblem { block_mask: None, ..problem }, shape.dense().problem());
    }

    #[test]
    fn sequences_lie_one_behind_the_other() {
        let stream = Device::cpu().stream().unwrap();
        let (_, operands) = operands("varlen7+2x3_h4kv2_d16_causal_bf16", &stream);
        let shapes =
            [&operands.inputs.q, &operands.inputs.k, &operands.o, &operands.lse].map(Tensor::shape);
        assert_eq!(shapes, [&[13, 4, 16][..], &[13, 2, 16], &[13, 4, 16], &[4, 13]]);
        let packed = operands.inputs.packed.as_ref().unwrap();
        assert_eq!(packed.offsets.to_vec::<i32>(&stream).unwrap(), [0, 7, 9, 11, 13]);
        let cu_seqlens = operands.inputs.call().cu_seqlens.unwrap();
        assert_eq!((cu_seqlens.max_seqlen_q, cu_seqlens.max_seqlen_kv), (7, 7));
    }
}
