//! Operands of scores of blocks of keys and of the choice of the largest: queries and keys of an
//! index, in place of launches of one operation those of both.

use super::cache_inputs::repeated;
use super::decode_data::DecodeData;
use super::index_choice::ChoiceShape;
use super::operands::{Operands, Placed, Progress, normal, rotation_bytes};
use crate::error::{Error, Result};
use crate::io::Array;
use blockflash_ops::{
    AttentionDecodeWorkspace, CudaProperties, DType, IndexScores, Kernel, KvCache, Mask, Operation,
    PreparedIndexScores, Stream, Tensor, TopK,
};
use blockflash_oracle::{Comparison, IndexQuery, index_block, index_scores_row, largest_columns};

/// Most copies of the keys.
const MAX_COPIES: usize = 256;
/// Queries that are compared.
const SAMPLES: usize = 8;

/// Queries, keys, perhaps several times, scores and lists.
#[derive(Debug)]
pub(super) struct ChoiceOperands {
    shape: ChoiceShape,
    q: Placed,
    weights: Option<Placed>,
    keys: Placed,
    copies: Vec<Tensor>,
    block_table: Option<Tensor>,
    lengths: Option<Placed>,
    /// Where the keys of all sequences are stored, one sequence behind the other.
    slots: Vec<usize>,
    workspace: Option<AttentionDecodeWorkspace>,
    scores: Tensor,
    lists: Tensor,
    /// Number of the next launch.
    next: usize,
    prepared: PreparedIndexScores,
}

impl ChoiceOperands {
    pub(super) fn new(shape: ChoiceShape, stream: &Stream, seed: u64) -> Result<Self> {
        let draw = |_: &str, shape: &[usize], dtype, lane| normal(shape, dtype, seed, lane);
        let data = shape.cache().data(seed, draw)?;
        let (slots, _) = data.visited()?;
        let DecodeData { q, k, pages, block_table, seqused_kv, .. } = data;
        let place = |array| Placed::new(array, stream);
        let keys = match k.shape().first() == Some(&pages) {
            true => place(k)?,
            false => Placed::with(repeated(&k, pages, stream)?, k),
        };
        let rows = shape.batch * shape.seqlen_q;
        let weights = || normal(&[rows, shape.heads], DType::F32, seed, 3);
        let weights = shape.weighted.then(|| place(weights()?)).transpose()?;
        let blocks = shape.seqlen_kv.div_ceil(shape.granularity);
        let mut scores = Tensor::zeros(stream, DType::F32, &[shape.groups(), rows, blocks])?;
        let lists = Tensor::zeros(stream, DType::I32, &[shape.groups(), rows, shape.entries])?;
        let q = place(q)?;
        let block_table = block_table.map(|table| table.upload(stream)).transpose()?;
        let lengths = seqused_kv.map(place).transpose()?;
        let inputs = (&q, &weights, &block_table, &lengths);
        let call = call(&shape, inputs, keys.view()?)?;
        let prepared = call.prepare(&scores.view_mut(), stream)?;
        let choice = TopK { last: shape.last(), ..call.top_k(scores.view())? };
        let workspace = match choice.workspace_bytes(shape.entries, stream.device())? {
            0 => None,
            bytes => Some(AttentionDecodeWorkspace::new(stream, bytes)?),
        };
        let (copies, next) = (Vec::new(), 0);
        Ok(Self {
            shape,
            q,
            weights,
            keys,
            copies,
            block_table,
            lengths,
            slots,
            workspace,
            scores,
            lists,
            next,
            prepared,
        })
    }
}

/// The scores of a launch that reads these keys.
fn call<'a>(
    shape: &ChoiceShape,
    (q, weights, block_table, lengths): (
        &'a Placed,
        &'a Option<Placed>,
        &'a Option<Tensor>,
        &'a Option<Placed>,
    ),
    keys: blockflash_ops::View<'a>,
) -> Result<IndexScores<'a>> {
    let cache = KvCache {
        block_table: block_table.as_ref().map(Tensor::view),
        seqused_kv: lengths.as_ref().map(Placed::view).transpose()?,
        ..KvCache::new(keys, keys)
    };
    Ok(IndexScores {
        weights: weights.as_ref().map(Placed::view).transpose()?,
        mask: Mask::causal(),
        relu: shape.weighted,
        leaves_hidden: true,
        ..IndexScores::new(q.view()?, cache, shape.granularity)
    })
}

impl Operands for ChoiceOperands {
    fn select(&mut self, _gpu: &CudaProperties) -> Result<&'static Kernel> {
        let none = || Error::Option("these scores need no kernel".to_owned());
        self.prepared.kernel().ok_or_else(none)
    }

    fn accepts(&mut self, kernel: &Kernel, _gpu: &CudaProperties) -> Result<bool> {
        Ok(self.prepared.kernel().is_some_and(|selected| selected.variant == kernel.variant))
    }

    fn launch(&mut self, kernel: Option<&'static Kernel>, stream: &Stream) -> Result<()> {
        let keys = match (self.next % (1 + self.copies.len())).checked_sub(1) {
            None => self.keys.view()?,
            Some(copy) => self.copies[copy].view(),
        };
        self.next += 1;
        let inputs = (&self.q, &self.weights, &self.block_table, &self.lengths);
        let call = call(&self.shape, inputs, keys)?;
        match kernel {
            None => call.compute_into(self.scores.view_mut(), stream)?,
            Some(kernel) => call.run_with(kernel, self.scores.view_mut(), stream)?,
        }
        let workspace = self.workspace.as_ref();
        let choice = call.top_k(self.scores.view())?;
        let choice = TopK { last: self.shape.last(), workspace, ..choice };
        Ok(choice.choose_into(self.lists.view_mut(), stream)?)
    }

    fn rotate(&mut self, stream: &Stream) -> Result<()> {
        let host = self.keys.host();
        let page: usize = host.shape()[1..].iter().product();
        let pages = self.slots.len() / self.shape.page_size;
        let bytes = pages * page * host.dtype().size();
        for _ in 1..rotation_bytes(stream).div_ceil(bytes.max(1)).min(MAX_COPIES) {
            self.copies.push(self.keys.copy(stream)?);
        }
        Ok(())
    }

    fn outputs(&mut self, _kernel: Option<&Kernel>) -> Vec<(&'static str, &mut Tensor)> {
        vec![("scores", &mut self.scores), ("lists", &mut self.lists)]
    }

    /// Scores of sampled queries, and the lists that follow from the scores as they were computed.
    fn compare(
        &self,
        results: &[Array],
        seed: u64,
        progress: Progress<'_>,
    ) -> Result<Vec<Comparison>> {
        let [scores, lists] = results else { return Ok(Vec::new()) };
        let ChoiceShape { batch, seqlen_q, seqlen_kv, heads, head_dim, granularity, .. } =
            self.shape;
        let (rows, groups) = (batch * seqlen_q, self.shape.groups());
        let blocks = seqlen_kv.div_ceil(granularity);
        let mut samples = crate::random::choose(SAMPLES - 1, rows, seed, u64::MAX - 1);
        samples.push(rows - 1);
        let of_group = heads / groups;
        let mut parts = Vec::new();
        for (at, row) in samples.iter().enumerate() {
            progress(at as f64 / samples.len() as f64);
            let seen = seqlen_kv - seqlen_q + row % seqlen_q + 1;
            let first = row / seqlen_q * seqlen_kv;
            let slots = &self.slots[first..first + seen];
            let key =
                |slot: &usize| self.keys.host().to_f32(slot * head_dim..(slot + 1) * head_dim);
            let keys: Vec<_> = slots.iter().map(key).collect();
            for group in 0..groups {
                let head = |head: usize| (row * heads + group * of_group + head) * head_dim;
                let queries: Vec<_> = (0..of_group)
                    .map(|of| self.q.host().to_f32(head(of)..head(of) + head_dim))
                    .collect();
                let weight = |of: usize| {
                    let at = row * heads + group * of_group + of;
                    let weights = self.weights.as_ref().map(|of| of.host().to_f32(at..at + 1));
                    weights.and_then(|weights| weights.first().copied()).unwrap_or(1.0)
                };
                let of_heads = queries.iter().enumerate().map(|(of, q)| (&q[..], weight(of)));
                let (scale, relu) = (1.0, self.shape.weighted);
                let query = IndexQuery { heads: of_heads.collect(), scale, relu };
                let elements: Vec<_> = keys.iter().map(|key| query.key(key)).collect();
                let expected: Vec<_> =
                    elements.chunks(granularity).map(|keys| index_block(keys, false)).collect();
                let start = (group * rows + row) * blocks;
                let found = scores.to_f32(start..start + blocks);
                let rounding = query.rounding(granularity);
                let visible = &found[..expected.len()];
                parts.push(index_scores_row(visible, &expected, rounding));
                let entries = self.shape.entries;
                let forced = [0, self.shape.last()];
                let right = largest_columns(&found, 0..expected.len(), forced, entries);
                let start = (group * rows + row) * entries;
                let list = lists.as_i32().and_then(|lists| lists.get(start..start + entries));
                if list != Some(&right[..]) {
                    parts.push(wrong());
                }
            }
        }
        Ok(vec![Comparison::of_parts(parts.into_iter(), scores.len())])
    }

    /// Scores of blocks that a query does not see stay as they are.
    fn verify(
        &mut self,
        kernel: Option<&'static Kernel>,
        stream: &Stream,
        seed: u64,
    ) -> Result<(bool, f64)> {
        self.reset(kernel, stream)?;
        self.next = 0;
        self.launch(kernel, stream)?;
        let results = self.results(kernel, stream)?.into_iter().map(|(_, array)| array);
        let found = self.compare(&results.collect::<Vec<_>>(), seed, &|_| ())?;
        let passed = !found.is_empty() && found.iter().all(Comparison::passed);
        Ok((passed, found.first().map_or(f64::NAN, |found| found.relative)))
    }
}

/// A list that is not that of its scores.
fn wrong() -> Comparison {
    let mut found = Comparison::default();
    (found.checked, found.total, found.error) = (1, 1, f64::INFINITY);
    found
}
