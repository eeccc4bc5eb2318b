//! Copies that leave most of a GPU to other work.

use crate::Result;
use crate::check::{Operand, grid_x, to_i32, to_i64};
use crate::operation::no_kernel_on_cpu;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule, select, unsupported};
use blockflash_safe::{CudaProperties, LaunchConfig, RowCopyOperands, Stream, View, ViewMut};
use blockflash_sys::manifest::{self, Variant};
use blockflash_sys::params::{
    BLOCKFLASH_ROW_COPIES, blockflash_row_copy, blockflash_row_copy_params,
};
use blockflash_sys::{DType, Kernel};
use std::ptr::{null, null_mut};
use std::sync::LazyLock;

/// One of this many SMs copies. With 17 of 132, an H100 copies some 550 GB/s beside attention.
const SHARE: u32 = 8;

/// Bytes that a thread moves at once.
const PIECE: usize = 16;

/// Overwrites each first tensor with the second one, of the same shape and element type, with any
/// strides. Queued, not waited for. Says whether few SMs of a GPU do it, so that other work can
/// begin beside it: a kernel that fills the GPU has to be queued behind the copies on another
/// stream, of lower priority, a moment later.
///
/// That needs at most four copies of tensors whose last dimensions are contiguous in both, in rows
/// whose length, distance and address are multiples of 16 bytes. All others are copied as by
/// [`ViewMut::copy_from`], which takes all SMs.
///
/// ```
/// # use blockflash_ops::{DType, Device, Tensor, copy_beside};
/// let stream = Device::best().stream()?;
/// let from = Tensor::from_slice(&stream, &[1f32; 3 * 8], &[3, 8])?;
/// let mut to = Tensor::zeros(&stream, DType::F32, &[2, 3, 8])?;
/// let (second, from) = (to.view_mut().slice(0, 1..2)?, from.view().insert(0)?);
/// copy_beside(vec![(second, from)], &stream)?;
/// assert_eq!(to.to_vec::<f32>(&stream)?[24..], [1.0; 24]);
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape), [`Error::DType`](crate::Error::DType) and
/// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) before anything is copied.
pub fn copy_beside(copies: Vec<(ViewMut<'_>, View<'_>)>, stream: &Stream) -> Result<bool> {
    check(&copies, stream)?;
    let gpu = stream.device().cuda_properties();
    if let Some(gpu) = gpu
        && let Ok(kernel) = select(&Copies, gpu)
        && let Some(plan) = plan(kernel, &copies, gpu)?
    {
        launch(kernel, &plan, copies, stream)?;
        return Ok(true);
    }
    for (mut to, from) in copies {
        to.copy_from(&from, stream)?;
    }
    Ok(false)
}

/// The same with this kernel, for tests.
///
/// # Errors
/// Also [`Error::Unsupported`](crate::Error::Unsupported) if the kernel cannot do it here.
#[doc(hidden)]
pub fn copy_beside_with(
    kernel: &'static Kernel,
    copies: Vec<(ViewMut<'_>, View<'_>)>,
    stream: &Stream,
) -> Result<()> {
    check(&copies, stream)?;
    let gpu = stream.device().cuda_properties();
    let gpu = gpu.ok_or_else(|| no_kernel_on_cpu::<Copies>(kernel))?;
    selection::accepts(kernel, &Copies, gpu)?;
    match plan(kernel, &copies, gpu)? {
        Some(plan) => launch(kernel, &plan, copies, stream),
        None => {
            let what = "tensors that are not rows of whole 16 bytes".into();
            Err(unsupported::<Copies>(&gpu.compute_capability, what))
        }
    }
}

fn check(copies: &[(ViewMut<'_>, View<'_>)], stream: &Stream) -> Result<()> {
    for (to, from) in copies {
        let (to, from) = (Operand::of_mut("to", to), Operand::new("from", from));
        to.on(stream.device())?;
        from.on(stream.device())?;
        to.shape_is(from.shape)?;
        to.dtype_in(&[from.dtype])?;
    }
    Ok(())
}

fn launch(
    kernel: &Kernel,
    plan: &Plan,
    copies: Vec<(ViewMut<'_>, View<'_>)>,
    stream: &Stream,
) -> Result<()> {
    let rows = copies.into_iter().zip(&plan.splits).map(|((to, from), split)| -> Result<_> {
        Ok((flat_mut(to, *split)?, flat(from, *split)?))
    });
    let operands = RowCopyOperands { copies: rows.collect::<Result<_>>()? };
    Ok(stream.launch::<manifest::RowCopy>(kernel, &plan.config, &plan.params, operands)?)
}

struct Plan {
    params: blockflash_row_copy_params,
    config: LaunchConfig,
    /// Dimensions of each tensor from which on it is contiguous.
    splits: Vec<usize>,
}

/// The launch, where the kernel can copy all of them.
fn plan(
    kernel: &Kernel,
    copies: &[(ViewMut<'_>, View<'_>)],
    gpu: &CudaProperties,
) -> Result<Option<Plan>> {
    const NONE: blockflash_row_copy = blockflash_row_copy {
        from: null(),
        to: null_mut(),
        from_pitch: 0,
        to_pitch: 0,
        rows: 0,
        pieces: 0,
    };
    let mut params = blockflash_row_copy_params { copies: [NONE; MOST], count: 0 };
    let (mut splits, mut pieces) = (Vec::new(), 0);
    if copies.is_empty() || copies.len() > MOST {
        return Ok(None);
    }
    for ((to, from), copy) in copies.iter().zip(&mut params.copies) {
        let Some((split, found)) = rows(&to.as_view(), from)? else { return Ok(None) };
        *copy = found;
        pieces += found.rows as usize * found.pieces as usize;
        splits.push(split);
        params.count += 1;
    }
    let tiles = grid_x(&[pieces.div_ceil(kernel.threads() as usize)])?;
    let blocks = gpu.multiprocessors.div_ceil(SHARE).min(tiles);
    let config = LaunchConfig::of(kernel, blocks, false);
    Ok(Some(Plan { params, config, splits }))
}

const MOST: usize = BLOCKFLASH_ROW_COPIES as usize;

/// A copy as rows, if it is one the kernel can do, and the first dimension that is inside of them.
fn rows(to: &View<'_>, from: &View<'_>) -> Result<Option<(usize, blockflash_row_copy)>> {
    let size = from.dtype().size();
    for split in 1..from.shape().len() {
        let (Ok(to), Ok(from)) = (flat(*to, split), flat(*from, split)) else { continue };
        let &[rows, columns] = from.shape() else { continue };
        let pitch = |view: &View<'_>| if rows > 1 { view.strides()[0] * size } else { 0 };
        let [to_pitch, from_pitch] = [pitch(&to), pitch(&from)];
        let inner = |view: &View<'_>| columns == 1 || view.strides()[1] == 1;
        let whole = [columns * size, to_pitch, from_pitch].iter().all(|n| n % PIECE == 0);
        let aligned = to.is_aligned(PIECE) && from.is_aligned(PIECE);
        if rows == 0 || columns == 0 || !inner(&to) || !inner(&from) || !whole || !aligned {
            continue;
        }
        let copy = blockflash_row_copy {
            from: null(),
            to: null_mut(),
            from_pitch: to_i64("a distance between rows", from_pitch)?,
            to_pitch: to_i64("a distance between rows", to_pitch)?,
            rows: to_i32("rows", rows)?,
            pieces: to_i32("16-byte pieces of a row", columns * size / PIECE)?,
        };
        return Ok(Some((split, copy)));
    }
    Ok(None)
}

/// `[rows, columns]`, if strides allow that.
fn flat(view: View<'_>, split: usize) -> Result<View<'_>> {
    Ok(view.flatten(split..view.shape().len())?.flatten(0..split)?)
}

fn flat_mut(view: ViewMut<'_>, split: usize) -> Result<ViewMut<'_>> {
    let rank = view.shape().len();
    Ok(view.flatten(split..rank)?.flatten(0..split)?)
}

/// All copies, as far as the choice of a kernel goes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Copies;

impl Problem for Copies {
    const OP: &'static str = "copy_beside";
    const RULES: &'static [Rule<Self>] = &[];

    type Tile = ();
    type Rank = ();

    fn tile(kernel: &Kernel) -> Option<()> {
        matches!(kernel.variant, Variant::RowCopy(_)).then_some(())
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<Copies> = LazyLock::new(selection::all::<Copies>);
        &KERNELS
    }

    fn rank(_: &Candidate<'_, Self>) {}

    /// Elements of any type are bytes.
    fn key(&self) -> (DType, usize) {
        (DType::F32, 0)
    }

    fn key_of((): &()) -> (DType, usize) {
        (DType::F32, 0)
    }
}

#[cfg(test)]
#[path = "row_copy_tests.rs"]
mod tests;
