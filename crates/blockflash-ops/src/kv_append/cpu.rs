//! Appending on the CPU, in the order of the sequences.

use super::{AppendKv, AppendKvProblem};
use crate::Result;
use crate::float::Float;
use crate::kv_cache::{HostCache, HostRotary, KvCacheMut, token_ranges};
use blockflash_safe::Stream;
use blockflash_sys::{DType, HeadDims};
use half::{bf16, f16};

/// Stores the tokens of a problem that was checked.
pub(super) fn append(
    op: &AppendKv<'_>,
    problem: &AppendKvProblem,
    cache: KvCacheMut<'_>,
    stream: &Stream,
) -> Result<()> {
    match problem.cache.dtype {
        DType::F16 => run::<f16>(op, problem, cache, stream),
        DType::BF16 => run::<bf16>(op, problem, cache, stream),
        _ => run::<f32>(op, problem, cache, stream),
    }
}

fn run<T: Float>(
    op: &AppendKv<'_>,
    problem: &AppendKvProblem,
    mut cache: KvCacheMut<'_>,
    stream: &Stream,
) -> Result<()> {
    let AppendKvProblem { cache: sizes, tokens, packed, .. } = *problem;
    let host = HostCache::new(&cache.as_cache(), sizes, stream)?;
    let ranges = token_ranges(op.packed.as_ref(), [sizes.batch, tokens], packed, stream)?;
    let rotary = op.rotary.as_ref().map(|rotary| HostRotary::new(rotary, stream)).transpose()?;
    let (k, v) = (op.k.as_slice::<T>()?, op.v.as_slice::<T>()?);
    let (cached_k, cached_v) = (cache.k.as_mut_slice::<T>()?, cache.v.as_mut_slice::<T>()?);

    let HeadDims { qk, v: width } = sizes.head_dims;
    let mut turned = vec![0.0; qk];
    for (entry, rows) in ranges.into_iter().enumerate() {
        let first = host.stored_length(entry) - rows.len() as i64;
        for (position, row) in (first..).zip(rows) {
            let Ok(position) = usize::try_from(position) else { continue };
            if position >= sizes.capacity {
                break;
            }
            for head in 0..sizes.num_heads_kv {
                let new = |strides: crate::attention::Strides| {
                    entry * strides.batch + row * strides.seq + head * strides.head
                };
                let at = [entry, position, head];
                let k = &k[new(problem.k)..][..qk];
                let target = &mut cached_k[host.row(sizes.k, at)..][..qk];
                match &rotary {
                    None => target.copy_from_slice(k),
                    Some(rotary) => {
                        T::widen(k, &mut turned);
                        rotary.turn(&mut turned, position);
                        T::narrow(&turned, target);
                    }
                }
                let v = &v[new(problem.v)..][..width];
                cached_v[host.row(sizes.v, at)..][..width].copy_from_slice(v);
            }
        }
    }
    Ok(())
}
