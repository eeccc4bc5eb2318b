//! From checked operands to a queued kernel.

use super::{BsrSddmm, BsrSddmmProblem, OP, plan};
use crate::check::Operand;
use crate::{Error, Result};
use blockflash_safe::{BsrSddmmOperands, Stream, ViewMut};
use blockflash_sys::Row;
use blockflash_sys::manifest::{self, BsrSddmmHopper, Variant};

/// The problem after every check that needs no device; all operands are where the stream works.
pub(super) fn checked(
    op: &BsrSddmm<'_>,
    values: &ViewMut<'_>,
    stream: &Stream,
) -> Result<BsrSddmmProblem> {
    let problem = op.problem(values)?;
    let device = stream.device();
    Operand::new("pattern", &op.pattern.col_idx().view()).on(device)?;
    Operand::new("a", &op.a).on(device)?;
    Operand::new("b", &op.b).on(device)?;
    Operand::of_mut("values", values).on(device)?;
    Ok(problem)
}

/// Plans and queues the kernel of a row that accepts the problem. There are blocks.
pub(super) fn launch(
    op: &BsrSddmm<'_>,
    row: &Row,
    problem: &BsrSddmmProblem,
    values: ViewMut<'_>,
    stream: &Stream,
) -> Result<()> {
    let Some(gpu) = stream.device().cuda_properties() else { return Err(no_kernel_on_cpu(row)) };
    let plan = plan(row, problem, gpu)?;
    let operands = BsrSddmmOperands { pattern: op.pattern.indices(), a: op.a, b: op.b, values };
    match row.variant {
        Variant::BsrSddmmHopper(_) => {
            stream.launch::<BsrSddmmHopper>(row, &plan.config, &plan.params, operands)?;
        }
        _ => stream.launch::<manifest::BsrSddmm>(row, &plan.config, &plan.params, operands)?,
    }
    Ok(())
}

/// A kernel was named, but the operands are on the CPU.
pub(super) fn no_kernel_on_cpu(row: &Row) -> Error {
    Error::Unsupported {
        op: OP,
        arch: "cpu".into(),
        what: format!("{} runs on a GPU", row.symbol()),
    }
}
