//! Appending on the CPU, in the order of the sequences.

use super::{AppendKv, AppendKvProblem};
use crate::Result;
use crate::attention::Strides;
use crate::codes::{Code, chosen, encode, magnitude};
use crate::float::Float;
use crate::kv_cache::{
    CacheScale, CacheValues, HostCache, HostRotary, KvCacheMut, ScaleStrides, token_ranges,
};
use blockflash_safe::{E4M3, E5M2, Stream, View, ViewMut};
use blockflash_sys::{DType, HeadDims};
use half::{bf16, f16};
use std::ops::Range;

/// Stores the tokens of a problem that was checked.
pub(super) fn append(
    op: &AppendKv<'_>,
    problem: &AppendKvProblem,
    cache: KvCacheMut<'_>,
    stream: &Stream,
) -> Result<()> {
    match problem.dtype {
        DType::F16 => of::<f16>(op, problem, cache, stream),
        DType::BF16 => of::<bf16>(op, problem, cache, stream),
        _ => of::<f32>(op, problem, cache, stream),
    }
}

/// New tokens of this type.
fn of<T: Float>(
    op: &AppendKv<'_>,
    problem: &AppendKvProblem,
    mut cache: KvCacheMut<'_>,
    stream: &Stream,
) -> Result<()> {
    let AppendKvProblem { cache: sizes, tokens, packed, .. } = *problem;
    let host = HostCache::new(&cache.as_cache()?, sizes, stream)?;
    let ranges = token_ranges(op.packed.as_ref(), [sizes.batch, tokens], packed, stream)?;
    let rotary = op.rotary.as_ref().map(|rotary| HostRotary::new(rotary, stream)).transpose()?;
    let HeadDims { qk, v: width } = problem.head_dims;
    let tokens = Tokens { problem, host, ranges };
    let [new_k, new_v] = op.parts(problem)?;
    let columns = match &cache.v {
        CacheValues::Own(_) => 0..qk,
        CacheValues::FirstColumns(_) => width..width + qk,
    };
    let k = Rows {
        new: new_k,
        cached: cache.k.reborrow().slice(3, columns)?,
        strides: [problem.k, sizes.k],
        width: qk,
        scale: cache.k_scale.as_mut().zip(sizes.k_scale),
    };
    tokens.store::<T>(k, rotary.as_ref())?;
    let v = Rows {
        new: new_v,
        cached: match cache.v {
            CacheValues::Own(v) => v,
            CacheValues::FirstColumns(_) => cache.k.slice(3, 0..width)?,
        },
        strides: [problem.v, sizes.v],
        width,
        scale: cache.v_scale.as_mut().zip(sizes.v_scale),
    };
    tokens.store::<T>(v, None)
}

/// Where new tokens go.
struct Tokens<'p> {
    problem: &'p AppendKvProblem,
    host: HostCache,
    ranges: Vec<Range<usize>>,
}

/// New keys, or values, and those that are cached.
struct Rows<'r, 'c> {
    new: View<'r>,
    cached: ViewMut<'r>,
    /// Of the new ones, of the cached ones.
    strides: [Strides; 2],
    width: usize,
    scale: Option<(&'r mut CacheScale<'c>, ScaleStrides)>,
}

impl Tokens<'_> {
    fn store<T: Float>(&self, rows: Rows<'_, '_>, rotary: Option<&HostRotary>) -> Result<()> {
        if rows.width == 0 {
            return Ok(());
        }
        match self.problem.cache.dtype {
            DType::E4M3 => self.coded::<T, E4M3>(rows, rotary),
            DType::E5M2 => self.coded::<T, E5M2>(rows, rotary),
            DType::I8 => self.coded::<T, i8>(rows, rotary),
            _ => self.plain::<T>(rows, rotary),
        }
    }

    /// Calls `each` with the start of every new row and sequence, position and head in the cache.
    fn each(&self, of_new: Strides, mut each: impl FnMut(usize, [usize; 3])) {
        let sizes = &self.problem.cache;
        for (entry, rows) in self.ranges.iter().enumerate() {
            let first = self.host.stored_length(entry) - rows.len() as i64;
            for (position, row) in (first..).zip(rows.clone()) {
                let Ok(position) = usize::try_from(position) else { continue };
                if position >= sizes.capacity {
                    break;
                }
                for head in 0..sizes.num_heads_kv {
                    let start = entry * of_new.batch + row * of_new.seq + head * of_new.head;
                    each(start, [entry, position, head]);
                }
            }
        }
    }

    /// Stores rows as they are, in their type.
    fn plain<T: Float>(&self, rows: Rows<'_, '_>, rotary: Option<&HostRotary>) -> Result<()> {
        let Rows { new, mut cached, strides: [of_new, of_cached], width, .. } = rows;
        let (new, cached) = (new.as_slice::<T>()?, cached.as_mut_slice::<T>()?);
        let mut turned = vec![0.0; width];
        self.each(of_new, |start, at| {
            let row = &new[start..][..width];
            let target = &mut cached[self.host.row(of_cached, at)..][..width];
            match rotary {
                None => target.copy_from_slice(row),
                Some(rotary) => {
                    T::widen(row, &mut turned);
                    rotary.turn(&mut turned, at[1]);
                    T::narrow(&turned, target);
                }
            }
        });
        Ok(())
    }

    /// Stores the codes of rows divided by their scales.
    fn coded<T: Float, C: Code>(
        &self,
        rows: Rows<'_, '_>,
        rotary: Option<&HostRotary>,
    ) -> Result<()> {
        let Rows { new, mut cached, strides: [of_new, of_cached], width, scale } = rows;
        let (new, cached) = (new.as_slice::<T>()?, cached.as_mut_slice::<C>()?);
        let mut scales = match scale {
            None => Scales::One,
            Some((CacheScale::Given(view), at)) => Scales::Given(view.as_slice()?, at),
            Some((CacheScale::PerToken(view), at)) => Scales::Chosen(view.as_mut_slice()?, at),
        };
        let mut wide = vec![0.0; width];
        self.each(of_new, |start, at| {
            T::widen(&new[start..][..width], &mut wide);
            let [entry, position, head] = at;
            if let Some(rotary) = rotary {
                rotary.turn(&mut wide, position);
            }
            let slot = self.host.slot(entry, position);
            let scale = match &mut scales {
                Scales::One => 1.0,
                Scales::Given(scales, strides) => scales[strides.at(entry, slot, head)],
                Scales::Chosen(scales, strides) => {
                    let scale = chosen::<C>(magnitude(&wide));
                    scales[strides.at(entry, slot, head)] = scale;
                    scale
                }
            };
            encode(&mut wide, scale, &mut cached[self.host.row(of_cached, at)..][..width]);
        });
        Ok(())
    }
}

enum Scales<'s> {
    One,
    Given(&'s [f32], ScaleStrides),
    Chosen(&'s mut [f32], ScaleStrides),
}
