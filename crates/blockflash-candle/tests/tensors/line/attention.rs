use super::blockflash_candle::{Align, Attention, BlockTopK, Mask, Packed, flash_attn, v3};
use super::blockflash_candle::{flash_attn_alibi_windowed_softcap, flash_attn_varlen_windowed};
use super::candle_core::{DType, Device, Result, Tensor, Var};
use super::harness::{Array, case, devices, normal_on, passed, types};
use blockflash_ops::Scores;
use blockflash_oracle::{
    AttentionBackwardCase, AttentionCase, Blocks, attention, attention_backward, attention_output,
};

fn window(left: Option<usize>, right: Option<usize>) -> Mask {
    Mask::Window { left, right, align: Align::BottomRight }
}

#[test]
fn forward_and_lse_are_exact() -> Result<()> {
    devices()?.iter().try_for_each(forward_and_lse)
}

fn forward_and_lse(device: &Device) -> Result<()> {
    let masks = [Mask::Full, Mask::causal(), window(Some(9), Some(0)), window(Some(0), Some(1000))];
    for (([seqlen_q, seqlen_kv], [heads, heads_kv], head_dim), &dtype) in
        [([1, 70], [6, 1], 64), ([65, 33], [2, 2], 72), ([37, 53], [4, 2], 24)]
            .into_iter()
            .zip(types(device).iter().cycle())
    {
        for mask in masks {
            // [batch, heads, seqlen, head_dim], of which a part is taken: strided operands.
            let new = |seqlen: usize, heads| {
                normal_on(device, &[2, heads, seqlen + 3, head_dim], dtype)?
                    .narrow(2, 2, seqlen)?
                    .transpose(1, 2)
            };
            let (q, k, v) =
                (new(seqlen_q, heads)?, new(seqlen_kv, heads_kv)?, new(seqlen_kv, heads_kv)?);
            let sink = normal_on(device, &[heads], DType::F32)?;
            let (softcap, softmax_scale) = (Some(7.0), Some(0.2));
            let call = Attention {
                scores: Scores { softcap, softmax_scale, sink: Some(&sink), ..mask.into() },
                ..Attention::new(&q, &k, &v)
            };
            let (o, lse) = call.forward_with_lse()?;
            assert_eq!((o.dims(), o.dtype()), (q.dims(), dtype));
            let [q, k, v, sink, o, lse] =
                [&q, &k, &v, &sink, &o, &lse].map(|tensor| Array::of(tensor).unwrap());
            let case = case([&q, &k, &v], mask, 0.2);
            let case = AttentionCase {
                scores: blockflash_oracle::Scores::new(0.2, softcap),
                sink: Some(&sink),
                ..case
            };
            let [of_o, of_lse] = attention(&case, &o, &lse, 1, |_| ()).unwrap();
            passed(&format!("o {dtype:?} {mask:?}"), &of_o);
            passed(&format!("lse {dtype:?} {mask:?}"), &of_lse);
        }
    }
    Ok(())
}

/// Packed sequences, empty ones among them, by functions with the names of candle-flash-attn.
#[test]
fn varlen_functions_are_exact() -> Result<()> {
    devices()?.iter().try_for_each(varlen_functions)
}

fn varlen_functions(device: &Device) -> Result<()> {
    let (lengths_q, lengths_kv) = ([3usize, 0, 40, 1], [5usize, 4, 40, 0]);
    let offsets = |lengths: &[usize]| {
        let ends = lengths.iter().scan(0, |end, &length| {
            *end += length as u32;
            Some(*end)
        });
        let offsets: Vec<u32> = std::iter::once(0).chain(ends).collect();
        Tensor::from_vec(offsets, lengths.len() + 1, device)
    };
    let (seqlens_q, seqlens_k) = (offsets(&lengths_q)?, offsets(&lengths_kv)?);
    for &dtype in types(device) {
        let new =
            |lengths: &[usize], heads| normal_on(device, &[lengths.iter().sum(), heads, 40], dtype);
        let (q, k, v) = (new(&lengths_q, 6)?, new(&lengths_kv, 2)?, new(&lengths_kv, 2)?);
        let arrays = [&q, &k, &v].map(|tensor| Array::of(tensor).unwrap());
        for (left, right) in [(None, None), (None, Some(0)), (Some(7), Some(2))] {
            let o = flash_attn_varlen_windowed(
                &q, &k, &v, &seqlens_q, &seqlens_k, 40, 41, 0.3, left, right,
            )?;
            let case = case(arrays.each_ref(), window(left, right), 0.3);
            let case = AttentionCase { lengths: Some([&lengths_q, &lengths_kv]), ..case };
            let of_o = attention_output(&case, &Array::of(&o)?, 1, |_| ()).unwrap();
            passed(&format!("{dtype:?} {left:?} {right:?}"), &of_o);
        }
        let packed = Packed { q: &seqlens_q, kv: &seqlens_k, max_seqlen_q: 40, max_seqlen_kv: 40 };
        let call = Attention { cu_seqlens: Some(packed), ..Attention::new(&q, &k, &v) };
        let (_, lse) = call.forward_with_lse()?;
        assert_eq!(lse.dims(), [6, 44]);
    }
    Ok(())
}

#[test]
fn functions_agree_with_each_other() -> Result<()> {
    devices()?.iter().try_for_each(functions_agree)
}

fn functions_agree(device: &Device) -> Result<()> {
    let new = |heads| normal_on(device, &[1, 50, heads, 32], DType::BF16);
    let (q, k, v) = (new(4)?, new(2)?, new(2)?);
    let values = |o: Tensor| o.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    let o = values(flash_attn(&q, &k, &v, 0.1, true)?)?;
    assert_eq!(o, values(v3::flash_attn(&q, &k, &v, 0.1, true, true)?)?);
    let (left, right) = (Some(1000), Some(0));
    let windowed = flash_attn_alibi_windowed_softcap(&q, &k, &v, None, 0.1, left, right, 0.0)?;
    assert_eq!(o, values(windowed)?);
    let mask = Mask::causal();
    let call = Attention {
        scores: Scores { mask, softmax_scale: Some(0.1), ..Scores::default() },
        ..Attention::new(&q, &k, &v)
    };
    assert_eq!(o, values(call.forward()?)?);
    Ok(())
}

#[test]
fn chosen_blocks_are_the_ones_attended() -> Result<()> {
    devices()?.iter().try_for_each(chosen_blocks)
}

fn chosen_blocks(device: &Device) -> Result<()> {
    let new = |heads| normal_on(device, &[2, 500, heads, 16], DType::F16);
    let (q, k, v, mask) = (new(4)?, new(2)?, new(2)?, Mask::causal());
    let choice = BlockTopK { count: 2, first: 1, before: 0, ..BlockTopK::new(64) };
    let blocks = choice.choose(&q, &k, mask)?;
    let call =
        Attention { scores: mask.into(), block_mask: Some(&blocks), ..Attention::new(&q, &k, &v) };
    let o = Array::of(&call.forward()?)?;
    let [q, k, v] = [&q, &k, &v].map(|tensor| Array::of(tensor).unwrap());
    let stream = blockflash_ops::Device::cpu().stream().unwrap();
    let blocks = blocks.to(&stream).unwrap();
    assert!(blocks.density() < 0.5);
    let [row_ptr, col_idx] =
        [blocks.row_ptr(), blocks.col_idx()].map(|of| of.to_vec::<i32>(&stream).unwrap());
    // The oracle wants one list after the other, as the mask has them for each head.
    let row_ptr: Vec<i32> = row_ptr.chunks(9).flat_map(|of| &of[..8]).copied().collect();
    let row_ptr: Vec<i32> = row_ptr.into_iter().chain([col_idx.len() as i32]).collect();
    let lists = Blocks {
        block_q: 64,
        block_kv: 64,
        heads: 4,
        row_ptr: &row_ptr,
        col_idx: &col_idx,
        bits: None,
    };
    let case = AttentionCase { blocks: Some(lists), ..case([&q, &k, &v], mask, 0.25) };
    passed("block-sparse", &attention_output(&case, &o, 1, |_| ()).unwrap());
    Ok(())
}

#[test]
fn gradients_are_exact() -> Result<()> {
    devices()?.iter().try_for_each(gradients)
}

fn gradients(device: &Device) -> Result<()> {
    let masks = [Mask::causal(), Mask::Full, window(Some(5), None)];
    for (mask, &dtype) in masks.into_iter().zip(types(device).iter().cycle()) {
        let new =
            |seqlen, heads| Var::from_tensor(&normal_on(device, &[2, seqlen, heads, 16], dtype)?);
        let (q, k, v) = (new(21, 4)?, new(34, 2)?, new(34, 2)?);
        let d_o = normal_on(device, &[2, 21, 4, 16], dtype)?;
        let call = Attention { scores: mask.into(), ..Attention::new(&q, &k, &v) };
        let (o, lse) = call.forward_with_lse()?;
        let gradients = (&o * &d_o)?.sum_all()?.backward()?;
        let of = |var: &Var| Array::of(gradients.get(var).expect("a gradient"));
        let (dq, dk, dv) = (of(&q)?, of(&k)?, of(&v)?);
        let [q, k, v, o, lse, d_o] =
            [&*q, &*k, &*v, &o, &lse, &d_o].map(|tensor| Array::of(tensor).unwrap());
        let attention = case([&q, &k, &v], mask, 0.25);
        let case = AttentionBackwardCase { attention, o: &o, lse: &lse, d_o: &d_o };
        let compared = attention_backward(&case, [&dq, &dk, &dv], 1, |_| ()).unwrap();
        for (what, compared) in ["dq", "dk", "dv"].iter().zip(&compared) {
            passed(&format!("{what} {dtype:?} {mask:?}"), compared);
        }
    }
    Ok(())
}
