//! Appending to a cache of 8-bit codes.

use super::checked::Launch;
use super::fit::{Fit, ceil_div, fits, require};
use super::kv_append::{AppendTypes, KvAppendOperands, KvAppendPlan, NewScales};
use crate::{DType, Kernel};
use blockflash_sys::manifest::{Family, KvAppendCodes, Variant};
use blockflash_sys::params::blockflash_kv_append_codes_params;

// SAFETY: as `KvAppend`, with a parameter struct that begins with that of appends of 16 bits.
// Addresses of scales follow from the strides that `fit_scales` took from the views, and from
// sequences, pages, slots and heads that the kernel has clamped or compared. Chosen scales are
// `ViewMut`.
unsafe impl Launch for KvAppendCodes {
    type Operands<'a> = KvAppendOperands<'a>;
    type Plan = KvAppendPlan;
    type Params = blockflash_kv_append_codes_params;
    const FAMILY: &'static str = "appending to a cache of codes";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::KvAppendCodes(kernel) = kernel.variant { Some(kernel) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let Some(new) = &operands.new else {
            return Err("nothing is appended: another kernel turns queries alone".to_owned());
        };
        let (cache, of_new) = (new.cache_k.dtype(), new.k.dtype());
        let of_q = operands.queries.as_ref().map_or(of_new, |queries| queries.q.dtype());
        require(
            cache.is_code(),
            format_args!("the cache is {cache}, expected one of e4m3, e5m2 and i8"),
        )?;
        for (name, dtype) in [("k_new", of_new), ("q", of_q)] {
            require(
                matches!(dtype, DType::F16 | DType::BF16),
                format_args!("{name} is {dtype}, expected f16 or bf16"),
            )?;
        }
        let types = AppendTypes { cache, new: of_new, q: of_q };
        let [rows, pieces] = operands.fit(&types, plan, &mut params.append)?;
        let views = new.cache(operands.seqused);
        let append = &params.append;
        views.fit_scales(append.batch.into(), &append.cache, &mut params.scales)?;
        let heads = i64::from(append.num_heads_kv);
        let slots = [append.cache.pages, append.cache.page_size].map(i64::from);
        let chooses = |name, scales: &Option<NewScales<'_>>| -> Fit<i32> {
            let Some(NewScales::Chosen(view)) = scales else { return Ok(0) };
            let view = view.as_view();
            let [page, slot, head] = [0, 1, 2].map(|dim| view.strides().get(dim).copied());
            let of = |stride: Option<usize>| stride.map_or(0, |stride| stride as i64);
            let dims = [(slots[0], of(page)), (slots[1], of(slot)), (heads, of(head))];
            fits(name, &view, DType::F32, dims)?;
            Ok(1)
        };
        params.chooses_k = chooses("k_scale", &new.scales[0])?;
        params.chooses_v = chooses("v_scale", &new.scales[1])?;
        params.cache_dtype = cache as i32;
        params.new_dtype = of_new as i32;
        params.q_dtype = of_q as i32;
        let lanes = Self::lanes(pieces as usize) as i64;
        Ok(ceil_div(rows * lanes, 32 * self.warps()))
    }
}

#[cfg(test)]
#[path = "kv_append_codes_tests.rs"]
mod tests;
