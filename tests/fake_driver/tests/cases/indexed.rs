//! Calls of attention by an index.

use super::{Case, leaked, tensor};
use blockflash_ops::{
    AttentionDecodeWorkspace, DType, IndexAttention, IndexAttentionOperands, IndexLists, KvCache,
    Mask, Operation, Result, Stream, Tensor,
};

/// Decoding and a prompt, and listed rows of a latent cache.
pub(crate) fn all(stream: &Stream) -> Result<Vec<Case>> {
    Ok(vec![
        paged("attention_index", stream, [4, 1], [128, 16])?,
        paged("attention_index_prompt", stream, [1, 4096], [128, 16])?,
        latent(stream)?,
    ])
}

fn paged(
    name: &'static str,
    stream: &Stream,
    [batch, queries]: [usize; 2],
    [granularity, capacity]: [usize; 2],
) -> Result<Case> {
    let (pages, page, heads) = (256, 128, [64, 4]);
    let k = &*tensor(stream, DType::BF16, &[pages, page, heads[1], 128])?;
    let v = &*tensor(stream, DType::BF16, &[pages, page, heads[1], 128])?;
    let shape = [batch, queries, heads[0], 128];
    let (q, o) = (&*tensor(stream, DType::BF16, &shape)?, tensor(stream, DType::BF16, &shape)?);
    let table: Vec<i32> = (0..pages as i32).collect();
    let table = leaked(Tensor::from_slice(stream, &table, &[batch, pages / batch])?);
    let lengths = leaked(Tensor::from_slice(stream, &vec![4096; batch], &[batch])?);
    let cache = KvCache {
        block_table: Some(table.view()),
        seqused_kv: Some(lengths.view()),
        ..KvCache::new(k.view(), v.view())
    };
    let entries = &*tensor(stream, DType::I32, &[heads[1], batch * queries, capacity])?;
    let lists = IndexLists { entries: entries.view(), granularity };
    call(name, stream, IndexAttention::new(q.view(), lists), cache, o)
}

fn latent(stream: &Stream) -> Result<Case> {
    let rows = &*tensor(stream, DType::BF16, &[8, 4096, 1, 576])?;
    let q = &*tensor(stream, DType::BF16, &[8, 1, 16, 576])?;
    let o = tensor(stream, DType::BF16, &[8, 1, 16, 512])?;
    let entries = &*tensor(stream, DType::I32, &[1, 8, 2048])?;
    let lists = IndexLists { entries: entries.view(), granularity: 1 };
    let cache = KvCache::latent(rows.view(), 512)?;
    call("attention_index_latent", stream, IndexAttention::new(q.view(), lists), cache, o)
}

fn call(
    name: &'static str,
    stream: &Stream,
    call: IndexAttention<'static>,
    cache: KvCache<'static>,
    o: &'static mut Tensor,
) -> Result<Case> {
    let call = IndexAttention { scores: Mask::causal().into(), ..call };
    let bytes = call.workspace_bytes(&cache, stream.device())?;
    let workspace = leaked(AttentionDecodeWorkspace::new(stream, bytes.max(1))?);
    let call = IndexAttention { workspace: Some(workspace), ..call };
    let operands = IndexAttentionOperands { cache, o: o.view_mut(), lse: None };
    let prepared = call.prepare(&operands, stream)?;
    let queue = stream.clone();
    let stream = stream.clone();
    let call = move |with_prepared: bool| {
        let operands = IndexAttentionOperands { cache, o: o.view_mut(), lse: None };
        match with_prepared {
            true => call.run_prepared(&prepared, operands, &stream),
            false => call.run(operands, &stream),
        }
    };
    Ok(Case { name, stream: queue, call: Box::new(call) })
}
