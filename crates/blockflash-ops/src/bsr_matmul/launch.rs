//! From checked operands to a queued kernel.

use super::{Bias, BsrMatmul, BsrProblem, BsrTranspose, OP, plan};
use crate::check::Operand;
use crate::{Error, Result};
use blockflash_safe::{BsrMatmulOperands, BsrParts, Stream, View, ViewMut};
use blockflash_sys::Row;
use blockflash_sys::manifest::{self, BsrMatmulAny, BsrMatmulHopper, Variant};

impl<'a> Bias<'a> {
    fn view(&self) -> Option<View<'a>> {
        match *self {
            Bias::None => None,
            Bias::PerRow(bias) | Bias::PerColumn(bias) => Some(bias),
        }
    }
}

/// The problem after every check that needs no device; all operands are where the stream works.
pub(super) fn checked(op: &BsrMatmul<'_>, c: &ViewMut<'_>, stream: &Stream) -> Result<BsrProblem> {
    let problem = op.problem(c)?;
    let device = stream.device();
    Operand::new("a", &op.a.values().view()).on(device)?;
    op.transpose
        .map_or(Ok(()), |index| Operand::new("transpose", &index.row_ptr().view()).on(device))?;
    Operand::new("b", &op.b).on(device)?;
    Operand::of_mut("c", c).on(device)?;
    op.workspace.map_or(Ok(()), |workspace| workspace.on(device))?;
    op.bias.view().map_or(Ok(()), |bias| Operand::new("bias", &bias).on(device))?;
    Ok(problem)
}

/// Plans and queues the kernel of a row that accepts the problem. C has elements.
pub(super) fn launch(
    op: &BsrMatmul<'_>,
    row: &Row,
    problem: &BsrProblem,
    c: ViewMut<'_>,
    stream: &Stream,
) -> Result<()> {
    let Some(gpu) = stream.device().cuda_properties() else { return Err(no_kernel_on_cpu(row)) };
    let mut plan = plan(row, problem, gpu)?;
    let parts = parts(op, row, problem, plan.parts);
    if let Some(parts) = &parts {
        plan.add_parts(parts.begin[0] as usize, row, problem, gpu)?;
    }
    let operands = BsrMatmulOperands {
        indices: op.transpose.map_or(op.a.indices(), BsrTranspose::indices),
        values: op.a.values().view(),
        parts,
        b: op.b,
        c,
        bias: op.bias.view(),
    };
    match row.variant {
        Variant::BsrMatmulHopper(_) => {
            stream.launch::<BsrMatmulHopper>(row, &plan.config, &plan.params, operands)?;
        }
        Variant::BsrMatmulAny(_) => {
            stream.launch::<BsrMatmulAny>(
                row,
                &plan.config,
                &plan.any_params(problem),
                operands,
            )?;
        }
        _ => stream.launch::<manifest::BsrMatmul>(row, &plan.config, &plan.params, operands)?,
    }
    Ok(())
}

/// The parts of long tiles, for kernels that have some and a caller who lends memory for their
/// sums.
fn parts<'a>(
    op: &BsrMatmul<'a>,
    row: &Row,
    problem: &BsrProblem,
    most: usize,
) -> Option<BsrParts<'a>> {
    let (Variant::BsrMatmulHopper(tile), Some(workspace)) = (&row.variant, op.workspace) else {
        return None;
    };
    let lengths = match (op.transpose, &op.a.groups) {
        (Some(index), _) => index.lengths(),
        (None, Some(groups)) if tile.gathers() => &groups.lengths,
        (None, _) => &op.a.lengths,
    };
    workspace.parts(tile, lengths, tile.tile().tiles_n(problem.n as u64) as usize, most)
}

/// A kernel was named, but the operands are on the CPU.
pub(super) fn no_kernel_on_cpu(row: &Row) -> Error {
    Error::Unsupported {
        op: OP,
        arch: "cpu".into(),
        what: format!("{} runs on a GPU", row.symbol()),
    }
}
