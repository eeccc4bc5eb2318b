//! Tensors inside larger allocations, of which every bit that nobody may write is compared.

use super::{Checked, text};
use crate::host::{view, view_mut};
use crate::number::POISON;
use crate::placement::{Placed, Placement};
use blockflash_ops::{DType, Stream, Tensor, View, ViewMut};
use blockflash_safe::{E4M3, E5M2};
use bytemuck::cast_slice;
use half::{bf16, f16};
use std::ops::Range;

/// A tensor, the memory around it, and what both held before the case.
pub(super) struct Guarded {
    name: &'static str,
    tensor: Tensor,
    placed: Placed,
    /// Bytes, in words for their alignment.
    before: Vec<u32>,
}

/// What a case may do to a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Nothing: it is read.
    Read,
    /// Write some of its elements, with numbers.
    Written,
    /// Write all of them, with numbers.
    WrittenWhole,
    /// Write some of its elements, with anything.
    Filled,
}

impl Guarded {
    /// The content in the order of memory, and `margin` in every byte around it. Where margins of
    /// an input are NaN ([`POISON`]), a read of them shows in the output.
    pub(super) fn new(
        name: &'static str,
        dtype: DType,
        (shape, placement, margin): (&[usize], &Placement, u8),
        content: &[u8],
        stream: &Stream,
    ) -> Checked<Self> {
        let placed = placement.place(shape);
        let bytes = placed.physical.iter().product::<usize>() * dtype.size();
        let mut before = vec![u32::from_ne_bytes([margin; 4]); bytes.div_ceil(4)];
        let memory = &mut bytemuck::cast_slice_mut(&mut before)[..bytes];
        let mut rest = content;
        for place in runs(&placed, dtype).into_iter().filter_map(|run| run.inside) {
            let (run, after) = rest.split_at(place.len());
            memory[place].copy_from_slice(run);
            rest = after;
        }
        assert!(rest.is_empty(), "{name} has more content than elements");
        let tensor = upload(stream, dtype, memory, &placed.physical).map_err(text)?;
        Ok(Self { name, tensor, placed, before })
    }

    /// An output: poison everywhere.
    pub(super) fn output(
        name: &'static str,
        dtype: DType,
        (shape, placement): (&[usize], &Placement),
        stream: &Stream,
    ) -> Checked<Self> {
        let content = vec![POISON; shape.iter().product::<usize>() * dtype.size()];
        Self::new(name, dtype, (shape, placement, POISON), &content, stream)
    }

    pub(super) fn view(&self) -> View<'_> {
        view(&self.tensor, &self.placed)
    }

    pub(super) fn view_mut(&mut self) -> ViewMut<'_> {
        view_mut(&mut self.tensor, &self.placed)
    }

    /// Uses the memory on another stream for the first time: that waits for the own stream, and
    /// what [`overwrite`](Self::overwrite) writes later does not.
    pub(super) fn used_on(&mut self, other: Option<&Stream>) -> Checked<()> {
        other.map_or(Ok(()), |other| with_bytes(&self.tensor, other, |_| ()).map_err(text))
    }

    /// Queues this byte for all of the memory on another stream, at the same time as whatever reads
    /// it.
    pub(super) fn overwrite(&mut self, byte: Option<u8>, other: Option<&Stream>) -> Checked<()> {
        let (Some(byte), Some(other)) = (byte, other) else { return Ok(()) };
        self.tensor.fill_bytes(other, byte).map_err(text)
    }

    /// The memory, for somebody who wants to own it.
    pub(super) fn into_memory(self) -> Tensor {
        self.tensor
    }

    /// Compares the memory with what it held before.
    pub(super) fn judge(&self, used: Use, stream: &Stream) -> Checked<()> {
        let dtype = self.tensor.dtype();
        let found = with_bytes(&self.tensor, stream, |after| {
            let before = &cast_slice::<u32, u8>(&self.before)[..after.len()];
            if used == Use::Read {
                return if after == before { None } else { Some("was written") };
            }
            runs(&self.placed, dtype).into_iter().find_map(|run| {
                let inside = run.inside.unwrap_or(run.whole.start..run.whole.start);
                let [left, right] = [run.whole.start..inside.start, inside.end..run.whole.end];
                let around = [left, right].into_iter().any(|gap| after[gap.clone()] != before[gap]);
                if around {
                    Some("was written outside")
                } else {
                    strange(dtype, used, &after[inside])
                }
            })
        });
        match found.map_err(text)? {
            None => Ok(()),
            Some(what) => Err(format!("{} {what}", self.name)),
        }
    }
}

/// Neighbouring bytes of a physical row, and which of them belong to the tensor.
struct Run {
    whole: Range<usize>,
    inside: Option<Range<usize>>,
}

fn runs(placed: &Placed, dtype: DType) -> Vec<Run> {
    let size = dtype.size();
    let Some((&width, outer)) = placed.physical.split_last() else { return Vec::new() };
    let (last, ranges) = (&placed.ranges[outer.len()], &placed.ranges[..outer.len()]);
    let run = |row: usize| {
        let mut rest = row;
        let inside = outer.iter().zip(ranges).rev().fold(true, |inside, (extent, range)| {
            let at = rest % extent;
            rest /= extent;
            inside && range.contains(&at)
        });
        let at = |element: usize| (row * width + element) * size;
        Run { whole: at(0)..at(width), inside: inside.then(|| at(last.start)..at(last.end)) }
    };
    (0..outer.iter().product()).map(run).collect()
}

/// What no kernel may leave in an output of finite inputs. A computed NaN never has the bits of
/// poison.
fn strange(dtype: DType, used: Use, bytes: &[u8]) -> Option<&'static str> {
    let mut missing = false;
    let mut nan = false;
    let mut look = |bits: u32, magnitude: u32, infinity: u32, poison: u32| {
        missing |= bits == poison;
        nan |= bits != poison && bits & magnitude > infinity;
    };
    match dtype {
        DType::F32 => {
            cast_slice::<u8, u32>(bytes)
                .iter()
                .for_each(|&x| look(x, 0x7FFF_FFFF, 0x7F80_0000, u32::MAX));
        }
        DType::F16 | DType::BF16 => {
            let infinity = if dtype == DType::F16 { 0x7C00 } else { 0x7F80 };
            cast_slice::<u8, u16>(bytes)
                .iter()
                .for_each(|&x| look(x.into(), 0x7FFF, infinity, 0xFFFF));
        }
        _ => {}
    }
    match (nan && used != Use::Filled, missing && used == Use::WrittenWhole) {
        (true, _) => Some("holds a NaN: it comes from outside of an input"),
        (_, true) => Some("was not written completely"),
        _ => None,
    }
}

fn upload(
    stream: &Stream,
    dtype: DType,
    bytes: &[u8],
    shape: &[usize],
) -> blockflash_safe::Result<Tensor> {
    match dtype {
        DType::F16 => Tensor::from_slice::<f16>(stream, cast_slice(bytes), shape),
        DType::BF16 => Tensor::from_slice::<bf16>(stream, cast_slice(bytes), shape),
        DType::F32 => Tensor::from_slice::<f32>(stream, cast_slice(bytes), shape),
        DType::I32 => Tensor::from_slice::<i32>(stream, cast_slice(bytes), shape),
        DType::U8 => Tensor::from_slice(stream, bytes, shape),
        DType::E4M3 => Tensor::from_slice::<E4M3>(stream, cast_slice(bytes), shape),
        DType::E5M2 => Tensor::from_slice::<E5M2>(stream, cast_slice(bytes), shape),
        DType::I8 => Tensor::from_slice::<i8>(stream, cast_slice(bytes), shape),
        other => panic!("no tensors of {other}"),
    }
}

fn with_bytes<R>(
    tensor: &Tensor,
    stream: &Stream,
    look: impl FnOnce(&[u8]) -> R,
) -> blockflash_safe::Result<R> {
    Ok(match tensor.dtype() {
        DType::F16 => look(cast_slice(&tensor.to_vec::<f16>(stream)?)),
        DType::BF16 => look(cast_slice(&tensor.to_vec::<bf16>(stream)?)),
        DType::F32 => look(cast_slice(&tensor.to_vec::<f32>(stream)?)),
        DType::I32 => look(cast_slice(&tensor.to_vec::<i32>(stream)?)),
        DType::U8 => look(&tensor.to_vec::<u8>(stream)?),
        DType::E4M3 => look(cast_slice(&tensor.to_vec::<E4M3>(stream)?)),
        DType::E5M2 => look(cast_slice(&tensor.to_vec::<E5M2>(stream)?)),
        DType::I8 => look(cast_slice(&tensor.to_vec::<i8>(stream)?)),
        other => panic!("no tensors of {other}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockflash_ops::Device;

    /// A matrix of f16 zeros with margins, of which one physical element is replaced.
    fn after(write: Option<(usize, u16)>, used: Use) -> Checked<()> {
        let stream = Device::cpu().stream().unwrap();
        let placement = Placement { order: vec![1, 0], padding: vec![(1, 2), (3, 1)] };
        let place = (&[2usize, 3][..], &placement, POISON);
        let mut guarded = Guarded::new("x", DType::F16, place, &[0; 12], &stream).unwrap();
        assert_eq!(guarded.tensor.shape(), [7, 5]);
        assert_eq!(guarded.view().to_vec::<f16>(&stream).unwrap(), [f16::ZERO; 6]);
        if let Some((at, bits)) = write {
            let mut view = guarded.tensor.view_mut();
            view.as_mut_slice::<f16>().unwrap()[at] = f16::from_bits(bits);
        }
        guarded.judge(used, &stream)
    }

    #[test]
    fn every_write_is_seen() {
        let inside = [16, 17, 21, 22, 26, 27];
        for at in 0..35 {
            let is_inside = inside.contains(&at);
            assert_eq!(after(Some((at, 0x3C00)), Use::Written).is_ok(), is_inside, "{at}");
            assert!(after(Some((at, 0x3C00)), Use::Read).is_err(), "{at}");
            assert!(after(Some((at, 0x7E00)), Use::Written).is_err(), "{at}");
            assert_eq!(after(Some((at, 0xFFFF)), Use::WrittenWhole).is_ok(), !is_inside, "{at}");
            assert_eq!(after(Some((at, 0x7E00)), Use::Filled).is_ok(), is_inside, "{at}");
        }
        for used in [Use::Read, Use::Written, Use::WrittenWhole, Use::Filled] {
            after(None, used).unwrap();
        }
        after(Some((16, 0xFFFF)), Use::Written).unwrap();
    }
}
