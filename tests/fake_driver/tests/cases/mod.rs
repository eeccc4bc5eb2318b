//! One call of every operation on a GPU of the fake driver.

mod indexed;

use blockflash_ops::attention_decode::AttentionDecodeWorkspace;
use blockflash_ops::{
    AppendKv, Attention, AttentionBackward, AttentionDecode, AttentionDecodeOperands,
    AttentionGradientsMut, BlockGeometry, BlockMask, BsrMatmul, BsrPattern, BsrSddmm, BsrView,
    CacheAccess, CacheScale, DType, Device, IndexScores, KvCache, KvCacheMut, Mask, Operation,
    Quantize, QuantizeOutputMut, Result, Stream, Tensor, TopK,
};

/// A call that can be repeated.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// Where it is queued.
    pub(crate) stream: Stream,
    /// Calls, with what was prepared if the argument says so.
    pub(crate) call: Box<dyn FnMut(bool) -> Result<()> + Send>,
}

/// The call of an operation with outputs that are made anew each time.
macro_rules! case {
    ($name:literal, $stream:ident, $op:expr, $out:expr) => {{
        let stream: Stream = $stream.clone();
        let prepared = $op.prepare(&$out, &stream)?;
        let queue = stream.clone();
        let call = move |with_prepared: bool| match with_prepared {
            true => $op.run_prepared(&prepared, $out, &stream),
            false => $op.run($out, &stream),
        };
        Case { name: $name, stream: queue, call: Box::new(call) }
    }};
}

/// What lives as long as the process.
fn leaked<T>(what: T) -> &'static T {
    Box::leak(Box::new(what))
}

/// A tensor that lives as long as the process.
fn tensor(stream: &Stream, dtype: DType, shape: &[usize]) -> Result<&'static mut Tensor> {
    Ok(Box::leak(Box::new(Tensor::zeros(stream, dtype, shape)?)))
}

/// All cases on this GPU.
pub(crate) fn all(device: &Device) -> Result<Vec<Case>> {
    let stream = device.stream()?;
    let mut cases = attention(&stream)?;
    cases.extend(decoding(&stream)?);
    cases.extend(indexed::all(&stream)?);
    cases.extend(products(&stream)?);
    cases.push(quantizing(&stream)?);
    cases.extend(choosing(&stream)?);
    Ok(cases)
}

fn attention(stream: &Stream) -> Result<Vec<Case>> {
    let shape = [2, 2048, 16, 128];
    let new = || tensor(stream, DType::F16, &shape);
    let [q, k, v, d_o] = [&*new()?, new()?, new()?, new()?];
    let (o, o_sparse, o_for) = (new()?, new()?, &*new()?);
    let lse = &*tensor(stream, DType::F32, &[2, 16, 2048])?;
    let call =
        Attention { scores: Mask::causal().into(), ..Attention::new(q.view(), k.view(), v.view()) };
    let geometry = BlockGeometry::new(2048, 2048, 128, 128)?;
    let mask = BlockMask::window(geometry, Some(4), Some(0), Default::default())?.to(stream)?;
    let sparse = Attention { block_mask: Some(Box::leak(Box::new(mask))), ..call };
    let backward =
        AttentionBackward { attention: call, o: o_for.view(), lse: lse.view(), d_o: d_o.view() };
    let (dq, dk, dv) = (new()?, new()?, new()?);
    let bytes = backward.workspace_bytes(stream.device())?;
    let workspace = tensor(stream, DType::U8, &[bytes])?;
    Ok(vec![
        case!("attention_fwd", stream, call, (o.view_mut(), None)),
        case!("attention_fwd_block_mask", stream, sparse, (o_sparse.view_mut(), None)),
        case!(
            "attention_bwd",
            stream,
            backward,
            (
                AttentionGradientsMut::new(dq.view_mut(), dk.view_mut(), dv.view_mut()),
                Some(workspace.view_mut())
            )
        ),
    ])
}

fn decoding(stream: &Stream) -> Result<Vec<Case>> {
    let (pages, page) = (256, 64);
    let new = |shape: &[usize]| tensor(stream, DType::BF16, shape);
    let cache = [pages, page, 8, 128];
    let (k, v, k_new, v_new) = (&*new(&cache)?, &*new(&cache)?, new(&cache)?, new(&cache)?);
    let (q, tokens) = (&*new(&[4, 1, 32, 128])?, &*new(&[4, 1, 8, 128])?);
    let o = new(&[4, 1, 32, 128])?;
    let table: Vec<i32> = (0..pages as i32).collect();
    let table: &Tensor = Box::leak(Box::new(Tensor::from_slice(stream, &table, &[4, pages / 4])?));
    let lengths: &Tensor =
        Box::leak(Box::new(Tensor::from_slice(stream, &[1000, 2000, 3000, 4000], &[4])?));
    let read = KvCache {
        block_table: Some(table.view()),
        seqused_kv: Some(lengths.view()),
        ..KvCache::new(k.view(), v.view())
    };
    let decode =
        AttentionDecode { scores: Mask::causal().into(), ..AttentionDecode::new(q.view()) };
    let bytes = decode.workspace_bytes(&read, stream.device())?;
    let workspace = AttentionDecodeWorkspace::new(stream, bytes.max(1))?;
    let decode = AttentionDecode { workspace: Some(Box::leak(Box::new(workspace))), ..decode };
    let append = AppendKv::new(tokens.view(), tokens.view());
    let codes = || tensor(stream, DType::E4M3, &cache);
    let (k_codes, v_codes) = (codes()?, codes()?);
    let chosen = tensor(stream, DType::F32, &cache[..3])?;
    let given: &Tensor = Box::leak(Box::new(Tensor::from_slice(stream, &[0.5f32; 32], &[4, 8])?));
    Ok(vec![
        case!(
            "attention_decode",
            stream,
            decode,
            AttentionDecodeOperands { cache: CacheAccess::Read(read), o: o.view_mut(), lse: None }
        ),
        case!(
            "kv_append",
            stream,
            append,
            KvCacheMut {
                block_table: Some(table.view()),
                seqused_kv: Some(lengths.view()),
                ..KvCacheMut::new(k_new.view_mut(), v_new.view_mut())
            }
        ),
        case!(
            "kv_append_codes",
            stream,
            append,
            KvCacheMut {
                block_table: Some(table.view()),
                seqused_kv: Some(lengths.view()),
                k_scale: Some(CacheScale::PerToken(chosen.view_mut())),
                v_scale: Some(CacheScale::Given(given.view())),
                ..KvCacheMut::new(k_codes.view_mut(), v_codes.view_mut())
            }
        ),
    ])
}

/// Scores of blocks, and a choice that several CTAs share.
fn choosing(stream: &Stream) -> Result<Vec<Case>> {
    let keys = &*tensor(stream, DType::BF16, &[2, 131_072, 1, 128])?;
    let q = &*tensor(stream, DType::BF16, &[2, 1, 4, 128])?;
    let lengths: &Tensor = Box::leak(Box::new(Tensor::from_slice(stream, &[9, 131_072], &[2])?));
    let cache =
        KvCache { seqused_kv: Some(lengths.view()), ..KvCache::new(keys.view(), keys.view()) };
    let call = IndexScores { mask: Mask::causal(), ..IndexScores::new(q.view(), cache, 1) };
    let (scores, of_call) = (&*tensor(stream, DType::F32, &[1, 2, 131_072])?, 2048);
    let top_k = TopK { first: 1, last: 1, ..call.top_k(scores.view())? };
    let bytes = top_k.workspace_bytes(of_call, stream.device())?;
    let workspace = AttentionDecodeWorkspace::new(stream, bytes.max(1))?;
    let top_k = TopK { workspace: Some(Box::leak(Box::new(workspace))), ..top_k };
    let written = tensor(stream, DType::F32, &[1, 2, 131_072])?;
    let chosen = tensor(stream, DType::I32, &[1, 2, of_call])?;
    Ok(vec![
        case!("index_scores", stream, call, written.view_mut()),
        case!("top_k", stream, top_k, chosen.view_mut()),
    ])
}

/// With all steps.
fn quantizing(stream: &Stream) -> Result<Case> {
    let shape = [2, 2048, 8, 128];
    let x = &*tensor(stream, DType::BF16, &shape)?;
    let codes = tensor(stream, DType::E4M3, &shape)?;
    let (scale, mean) =
        (tensor(stream, DType::F32, &[2, 8])?, tensor(stream, DType::F32, &[2, 8, 128])?);
    let call = Quantize { subtract_mean: true, rotate: true, ..Quantize::new(x.view()) };
    Ok(case!(
        "quantize",
        stream,
        call,
        QuantizeOutputMut {
            codes: codes.view_mut(),
            scale: Some(scale.view_mut()),
            mean: Some(mean.view_mut())
        }
    ))
}

fn products(stream: &Stream) -> Result<Vec<Case>> {
    let (size, block) = (2048, 64);
    let blocks: Vec<_> = (0..size / block)
        .flat_map(|row| (0..4).map(move |at| (row, (row * 7 + at * 8) % (size / block))))
        .collect();
    let pattern = BsrPattern::from_blocks(size, size, block, &blocks)?.to(stream)?;
    let pattern: &BsrPattern = Box::leak(Box::new(pattern));
    let new = |shape: &[usize]| tensor(stream, DType::F16, shape);
    let values = &*new(&pattern.values_shape())?;
    let (x, b, c) = (&*new(&[size, 1024])?, &*new(&[size, 1024])?, new(&[size, 1024])?);
    let gradient = new(&pattern.values_shape())?;
    let matmul = BsrMatmul::new(BsrView::new(pattern, values.view())?, b.view());
    let sddmm = BsrSddmm::new(pattern, x.view(), b.view().permute(&[1, 0])?);
    Ok(vec![
        case!("bsr_matmul", stream, matmul, c.view_mut()),
        case!("bsr_sddmm", stream, sddmm, gradient.view_mut()),
    ])
}
