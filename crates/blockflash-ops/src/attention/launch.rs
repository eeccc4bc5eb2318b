//! From checked operands to a queued kernel.

use super::{Attention, AttentionParams, AttentionProblem, OP, plan};
use crate::check::Operand;
use crate::{BlockMask, Error, Result};
use blockflash_safe::{AttentionFwdOperands, Stream, ViewMut};
use blockflash_sys::Row;
use blockflash_sys::manifest::{AttentionFwd, AttentionFwdHopper};

/// The problem with its outputs, after every check that needs no device; all operands are where the
/// stream works.
pub(super) fn checked(
    op: &Attention<'_>,
    o: &ViewMut<'_>,
    lse: Option<&ViewMut<'_>>,
    stream: &Stream,
) -> Result<AttentionProblem> {
    let problem = op.problem()?.with_outputs(o, lse)?;
    let device = stream.device();
    let inputs =
        [("q", Some(&op.q)), ("k", Some(&op.k)), ("v", Some(&op.v)), ("sink", op.sink.as_ref())];
    for (what, view) in inputs {
        view.map_or(Ok(()), |view| Operand::new(what, view).on(device))?;
    }
    if let Some(cu_seqlens) = &op.cu_seqlens {
        Operand::new("cu_seqlens.q", &cu_seqlens.q).on(device)?;
        Operand::new("cu_seqlens.kv", &cu_seqlens.kv).on(device)?;
    }
    if let Some(block_mask) = op.block_mask {
        Operand::new("block_mask", &block_mask.row_ptr().view()).on(device)?;
    }
    Operand::of_mut("o", o).on(device)?;
    lse.map_or(Ok(()), |lse| Operand::of_mut("lse", lse).on(device))?;
    Ok(problem)
}

/// Plans and queues the kernel of a row that accepts the problem. The problem has outputs to
/// compute.
pub(super) fn launch(
    op: &Attention<'_>,
    row: &Row,
    problem: &AttentionProblem,
    o: ViewMut<'_>,
    lse: Option<ViewMut<'_>>,
    stream: &Stream,
) -> Result<()> {
    let Some(gpu) = stream.device().cuda_properties() else { return Err(no_kernel_on_cpu(row)) };
    let plan = plan(row, problem, gpu)?;
    let aligned = [
        ("q", op.q.is_aligned(16)),
        ("k", op.k.is_aligned(16)),
        ("v", op.v.is_aligned(16)),
        ("o", o.is_aligned(16)),
    ];
    if let Some(&(what, _)) = aligned.iter().find(|(_, aligned)| !aligned) {
        return Err(Error::Misaligned {
            what,
            problem: "the address is not a multiple of 16".into(),
        });
    }
    let operands = AttentionFwdOperands {
        q: op.q,
        k: op.k,
        v: op.v,
        o,
        lse,
        sink: op.sink,
        cu_seqlens: op.cu_seqlens.map(|cu_seqlens| [cu_seqlens.q, cu_seqlens.kv]),
        block_mask: op.block_mask.map(BlockMask::for_kernels),
    };
    match &plan.params {
        AttentionParams::Portable(params) => {
            stream.launch::<AttentionFwd>(row, &plan.config, params, operands)?;
        }
        AttentionParams::Hopper(params) => {
            stream.launch::<AttentionFwdHopper>(row, &plan.config, params, operands)?;
        }
    }
    Ok(())
}

/// A kernel was named, but the tensors are on the CPU.
pub(super) fn no_kernel_on_cpu(row: &Row) -> Error {
    Error::Unsupported {
        op: OP,
        arch: "cpu".into(),
        what: format!("{} runs on a GPU", row.symbol()),
    }
}
