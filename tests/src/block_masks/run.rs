//! Builds a mask on a device and compares every entry of its arrays.

use super::{MaskCase, MaskData, MaskSource};
use crate::gpu::wait;
use blockflash_ops::block_sparse::{BlockChoice, BlockMaskBuffer, BlockSource};
use blockflash_ops::{BlockMask, Error, Stream, Tensor};
use blockflash_sys::Kernel;

/// The operands of a case on a device.
pub struct MaskInputs {
    case: MaskCase,
    source: Tensor,
    always: Option<BlockMask>,
}

impl MaskInputs {
    /// Uploads the data of a case.
    pub fn upload(case: &MaskCase, data: &MaskData, stream: &Stream) -> Result<Self, Error> {
        let ([batch, heads], geometry) = (case.groups, case.geometry());
        let shape = |last| [batch, heads, geometry.rows(), last];
        let source = match case.source {
            MaskSource::Bool => Tensor::from_slice(stream, &bytes(data), &shape(geometry.cols())),
            MaskSource::TopK => Tensor::from_slice(stream, &data.lists, &shape(case.k)),
            MaskSource::Scores => Tensor::from_slice(stream, &data.scores, &shape(geometry.cols())),
        }?;
        let always = case.always(data)?.map(|always| always.to(stream)).transpose()?;
        Ok(Self { case: case.clone(), source, always })
    }

    /// Replaces the values of the source in place, as a replayed graph needs it.
    pub fn refill(&mut self, data: &MaskData, stream: &Stream) -> Result<(), Error> {
        match self.case.source {
            MaskSource::Bool => self.source.copy_from_slice(stream, &bytes(data)),
            MaskSource::TopK => self.source.copy_from_slice(stream, &data.lists),
            MaskSource::Scores => self.source.copy_from_slice(stream, &data.scores),
        }
        .map_err(Error::from)
    }

    /// The source of the mask.
    pub fn choice(&self) -> BlockChoice<'_> {
        let view = self.source.view();
        let source = match self.case.source {
            MaskSource::Bool => BlockSource::Bool(view),
            MaskSource::TopK => BlockSource::TopK(view),
            MaskSource::Scores => BlockSource::Scores { scores: view, k: self.case.k },
        };
        BlockChoice { always: self.always.as_ref(), mask: self.case.mask, source }
    }

    /// Queues a build; on a GPU, with exactly this kernel.
    pub fn build(
        &self,
        buffer: &mut BlockMaskBuffer,
        kernel: Option<&Kernel>,
        stream: &Stream,
    ) -> Result<(), Error> {
        match kernel {
            Some(kernel) => buffer.build_with(kernel, &self.choice(), stream),
            None => buffer.build(&self.choice(), stream),
        }
    }
}

/// Any value but 0 is true.
fn bytes(data: &MaskData) -> Vec<u8> {
    data.blocks
        .iter()
        .zip(0u32..)
        .map(|(&block, at)| u8::from(block) * (1 + at % 255) as u8)
        .collect()
}

/// The arrays of a mask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrays {
    row_ptr: Vec<i32>,
    col_idx: Vec<i32>,
    row_order: Vec<i32>,
}

impl Arrays {
    /// The arrays of a mask, after everything queued on the stream; columns as far as `row_ptr`
    /// counts them.
    pub fn of(mask: &BlockMask, stream: &Stream) -> Result<Self, Error> {
        let row_ptr = mask.row_ptr().to_vec::<i32>(stream)?;
        let end = row_ptr.last().map_or(0, |&end| end.max(0) as usize);
        let col_idx = mask.col_idx().view().slice(0, 0..end)?.to_vec(stream)?;
        Ok(Self { row_ptr, col_idx, row_order: mask.row_order().to_vec(stream)? })
    }

    /// Describes the first difference of two masks.
    pub fn compare(&self, expected: &Self) -> Result<usize, String> {
        let arrays = [
            ("row_ptr", &self.row_ptr, &expected.row_ptr),
            ("col_idx", &self.col_idx, &expected.col_idx),
            ("row_order", &self.row_order, &expected.row_order),
        ];
        for (name, got, expected) in arrays {
            if let Some(at) =
                (0..got.len().max(expected.len())).find(|&at| got.get(at) != expected.get(at))
            {
                return Err(format!(
                    "{name}[{at}] is {:?}, expected {:?}",
                    got.get(at),
                    expected.get(at)
                ));
            }
        }
        Ok(self.row_ptr.len() + self.col_idx.len() + self.row_order.len())
    }
}

/// Compares the transpose of a mask on a device, entry by entry, with the transpose that the host
/// makes of `expected`. Returns how many entries were compared.
pub fn compare_transposed(
    mask: &BlockMask,
    expected: BlockMask,
    stream: &Stream,
) -> Result<usize, String> {
    let text = |error: blockflash_safe::Error| error.to_string();
    let expected = expected.with_transpose().map_err(|error| error.to_string())?;
    let cpu = blockflash_ops::Device::cpu().stream().map_err(text)?;
    let (Some(found), Some(expected)) = (mask.transposed_indices(), expected.transposed_indices())
    else {
        return Err("there is no transpose".into());
    };
    let mut compared = 0;
    for (at, name) in ["row_ptr", "col_idx"].into_iter().enumerate() {
        let mut found = found[at].to_vec::<i32>(stream).map_err(text)?;
        let expected = expected[at].to_vec::<i32>(&cpu).map_err(text)?;
        if name == "col_idx" {
            // The rest of the capacity.
            found.truncate(expected.len());
        }
        if let Some(i) =
            (0..found.len().max(expected.len())).find(|&i| found.get(i) != expected.get(i))
        {
            let (found, expected) = (found.get(i), expected.get(i));
            return Err(format!(
                "{name}[{i}] of the transpose is {found:?}, expected {expected:?}"
            ));
        }
        compared += found.len();
    }
    Ok(compared)
}

/// The part of a mask that fits into a capacity: rows end there, and keep their places in the
/// order.
pub fn cut(mask: &BlockMask, capacity: usize, stream: &Stream) -> Result<Arrays, Error> {
    let mut arrays = Arrays::of(mask, stream)?;
    arrays.col_idx.truncate(capacity);
    arrays.row_ptr.iter_mut().for_each(|end| *end = (*end).min(capacity as i32));
    Ok(arrays)
}

/// A buffer of this capacity, and the operands of a case.
pub fn prepare(
    case: &MaskCase,
    data: &MaskData,
    capacity: usize,
    stream: &Stream,
) -> Result<(BlockMaskBuffer, MaskInputs), String> {
    let [batch, heads] = case.groups;
    let buffer = BlockMaskBuffer::new(case.geometry(), batch, heads, capacity, stream);
    let inputs = MaskInputs::upload(case, data, stream);
    Ok((buffer.map_err(|error| error.to_string())?, inputs.map_err(|error| error.to_string())?))
}

/// Uploads, builds and compares a case. Returns how many entries were compared.
pub fn build_and_check(
    case: &MaskCase,
    kernel: Option<&Kernel>,
    stream: &Stream,
) -> Result<usize, String> {
    let run = || -> Result<usize, String> {
        let text = |error: Error| error.to_string();
        let data = case.data();
        let expected = case.expected(&data).map_err(text)?;
        let cpu = blockflash_ops::Device::cpu().stream().map_err(|error| error.to_string())?;
        // Just enough room, in turn with some to spare.
        let capacity = expected.nnz() + case.seed as usize % 3 * 7;
        let (mut buffer, inputs) = prepare(case, &data, capacity, stream)?;
        inputs.build(&mut buffer, kernel, stream).map_err(text)?;
        wait(stream, &|| format!("building {case:?}"))?;
        buffer.check(stream).map_err(text)?;
        let got = Arrays::of(buffer.mask(), stream).map_err(text)?;
        let compared = got.compare(&Arrays::of(&expected, &cpu).map_err(text)?)?;
        Arrays::of(&buffer.to_host(stream).map_err(text)?, &cpu).map_err(text)?.compare(&got)?;
        Ok(compared)
    };
    run().map_err(|error| {
        let on = kernel.map_or(stream.device().to_string(), Kernel::image_name);
        format!("{on}: {error}\n    {case:?}")
    })
}
