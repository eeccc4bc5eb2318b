use super::LatentCase;
use super::rows::{self, gap, stored};
use crate::attention::Choice;
use crate::attention_decode::largest_workspace;
use crate::gpu::wait;
use crate::host::upload;
use crate::number::{encode, normal_rounded, poison};
use crate::token_outputs::{GAP, TokenOutputs, Tokens, columns};
use crate::tolerance::Reference;
use blockflash_ops::attention_decode::accepts;
use blockflash_ops::{
    AttentionDecode, AttentionDecodeOperands, AttentionDecodeWorkspace, CacheAccess, Error,
    KvCache, Operation, PackedTokens, Scores, Stream, Tensor,
};
use blockflash_oracle::{Added, AttentionRow, attention_row};
use blockflash_sys::Kernel;
use rayon::prelude::*;

/// The numbers of a case, and what an exact computation makes of them.
pub struct LatentData {
    /// `[total, heads, qk]`.
    q: Vec<f32>,
    /// `[keys, qk]` of each sequence.
    keys: Vec<Vec<f32>>,
    /// The bits in which they are stored.
    stored: Vec<Vec<u32>>,
    /// Of each head.
    sink: Vec<f32>,
}

impl LatentData {
    /// The numbers of a case.
    pub fn generate(case: &LatentCase) -> Self {
        let LatentCase { seed, dtype, head_dims, heads, .. } = *case;
        let normal = |salt: u64, count| normal_rounded(seed << 8 ^ salt, count, dtype);
        let (form, qk) = (case.form(), head_dims.qk);
        let keys = case.lengths.iter().enumerate().map(|(b, &(_, keys))| {
            let (mut bits, mut rows) = rows::generate(form, seed << 8 ^ (3 + b as u64), keys);
            if case.nonfinite && keys > 2 {
                let width = stored(form).1;
                let bits = &mut bits[(keys - 2) * width..][..width];
                let row = &mut rows[(keys - 2) * qk..][..qk];
                rows::make_nan(form, bits, row, head_dims.v - 4);
            }
            (bits, rows)
        });
        let (stored, keys) = keys.unzip();
        let q = normal(1, case.total() * heads * qk);
        Self { q, keys, stored, sink: normal(2, heads) }
    }

    /// Exact and plain values of all rows: outputs, and logarithms of sums.
    fn reference(&self, case: &LatentCase) -> [Reference; 2] {
        let LatentCase { dtype, head_dims, heads, .. } = *case;
        let sequences = case.lengths.iter().enumerate();
        let tokens: Vec<_> =
            sequences.flat_map(|(b, &(queries, _))| (0..queries).map(move |i| (b, i))).collect();
        let row = |at: usize| -> AttentionRow {
            let (token, head) = (at / heads, at % heads);
            let (b, query) = tokens[token];
            let scores = blockflash_oracle::Scores {
                scale: case.factor(),
                softcap: case.softcap,
                sink: case.sink.then(|| self.sink[head]),
            };
            let q = &self.q[at * head_dims.qk..][..head_dims.qk];
            let keys: Vec<usize> = case.sees(b, query).collect();
            let key = |key: usize| &self.keys[b][key * head_dims.qk..][..head_dims.qk];
            let kv = |at: usize| [key(at), &key(at)[..head_dims.v]];
            let no_term = |_| Added::default();
            let mut row = attention_row(dtype, scores, q, head_dims.v, &keys, kv, no_term);
            // The size of a score is its value, or the size of the terms that cancel in it.
            let size = norm(q) * f64::from(case.factor()) / (head_dims.qk as f64).sqrt();
            let terms = keys.iter().map(|&at| size * norm(key(at)));
            row.lse.magnitude = terms.fold(row.lse.magnitude, f64::max);
            row
        };
        let rows: Vec<_> = (0..tokens.len() * heads).into_par_iter().map(row).collect();
        let mut o = Reference { width: head_dims.v, ..Reference::default() };
        let mut lse = Reference { width: rows.len(), ..Reference::default() };
        for row in rows {
            o.extend(row.o);
            lse.extend([row.lse]);
        }
        [o, lse]
    }
}

fn norm(row: &[f32]) -> f64 {
    row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// The operands of a case on a device.
pub(super) struct LatentInputs {
    case: LatentCase,
    pub(super) q: Tensor,
    /// With a gap behind each row, of NaN as the slots without a key.
    pub(super) rows: Tensor,
    pub(super) table: Tensor,
    pub(super) lengths: Tensor,
    offsets: Tensor,
    sink: Tensor,
    workspace: Option<AttentionDecodeWorkspace>,
}

fn told(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl LatentInputs {
    pub(super) fn upload(
        case: &LatentCase,
        data: &LatentData,
        stream: &Stream,
    ) -> Result<Self, String> {
        let (dtype, qk, batch) = (case.dtype, case.head_dims.qk, case.batch());
        let with_gaps = |values: &[f32]| -> Vec<u32> {
            let gap = || std::iter::repeat_n(poison(dtype), GAP);
            let row = |row: &[f32]| row.iter().map(|&x| encode(dtype, x)).chain(gap()).collect();
            values.chunks(qk).flat_map(|values| -> Vec<u32> { row(values) }).collect()
        };
        let ([page_size, columns, pages], table) = (case.pages(), case.table());
        let (of_rows, width) = stored(case.form());
        let wide = width + gap(of_rows);
        let mut rows = vec![poison(of_rows); pages * page_size * wide];
        for (b, keys) in data.stored.iter().enumerate() {
            for (key, bits) in keys.chunks(width).enumerate() {
                rows[case.slot(&table, b, key) * wide..][..width].copy_from_slice(bits);
            }
        }
        let ints = |values: Vec<i32>, shape: &[usize]| Tensor::from_slice(stream, &values, shape);
        let offsets = (0..=batch).map(|b| case.start(b) as i32).collect();
        let mut inputs = Self {
            q: upload(stream, dtype, &with_gaps(&data.q), &case.tokens().rows_shape(qk))?,
            rows: upload(stream, of_rows, &rows, &[pages, page_size, 1, wide])?,
            table: match case.page_size {
                None => ints(vec![], &[0]).map_err(told)?,
                Some(_) => ints(table, &[batch, columns]).map_err(told)?,
            },
            lengths: ints(case.lengths.iter().map(|l| l.1 as i32).collect(), &[batch])
                .map_err(told)?,
            offsets: ints(offsets, &[batch + 1]).map_err(told)?,
            sink: Tensor::from_slice(stream, &data.sink, &[case.heads]).map_err(told)?,
            workspace: None,
            case: case.clone(),
        };
        if !stream.device().is_cpu() {
            let workspace = largest_workspace(&inputs.decode(), &inputs.cache(), stream);
            inputs.workspace = Some(workspace.map_err(told)?);
        }
        Ok(inputs)
    }

    pub(super) fn decode(&self) -> AttentionDecode<'_> {
        let case = &self.case;
        let packed = PackedTokens { cu_seqlens: self.offsets.view(), max_seqlen: case.longest() };
        let sink = case.sink.then(|| self.sink.view());
        AttentionDecode {
            packed: case.packed.then_some(packed),
            scores: Scores { sink, ..case.scores() },
            batch_invariant: case.batch_invariant,
            workspace: self.workspace.as_ref(),
            ..AttentionDecode::new(columns(&self.q, case.head_dims.qk))
        }
    }

    pub(super) fn cache(&self) -> KvCache<'_> {
        KvCache {
            block_table: self.case.page_size.map(|_| self.table.view()),
            seqused_kv: self.case.seqused.then(|| self.lengths.view()),
            ..rows::cache(self.case.form(), self.rows.view()).expect("rows of a form")
        }
    }

    pub(super) fn launch(
        &self,
        outputs: &mut TokenOutputs,
        kernel: Choice,
        stream: &Stream,
    ) -> Result<(), Error> {
        let ((o, lse), cache) = (outputs.views(), CacheAccess::Read(self.cache()));
        let operands = AttentionDecodeOperands { cache, o, lse: Some(lse) };
        match kernel {
            Choice::Selected => self.decode().forward_into(operands, stream),
            Choice::This(kernel) => self.decode().run_with(kernel, operands, stream),
        }
    }
}

impl LatentCase {
    pub(super) fn tokens(&self) -> Tokens {
        Tokens {
            queries: self.lengths.iter().map(|lengths| lengths.0).collect(),
            packed: self.packed,
            heads: self.heads,
            width: self.head_dims.v,
            dtype: self.dtype,
        }
    }
}

/// Runs and checks a case on a device.
pub fn run_latent_case(
    case: &LatentCase,
    kernel: Choice,
    stream: &Stream,
) -> Result<usize, String> {
    let data = LatentData::generate(case);
    let run = || {
        let inputs = LatentInputs::upload(case, &data, stream)?;
        let mut outputs = TokenOutputs::poisoned(case.tokens(), stream)?;
        inputs.launch(&mut outputs, kernel, stream).map_err(|error| format!("refused: {error}"))?;
        wait(stream, &|| format!("{kernel:?} with {case:?}"))?;
        let longest = case.lengths.iter().map(|lengths| lengths.1).max().unwrap_or(0);
        outputs.check(&data.reference(case), longest, case.head_dims.qk, stream)
    };
    run().map_err(|error| format!("{error}\n    {case:?}"))
}

/// The same for a kernel that must refuse what it does not accept.
pub fn run_or_refuse_latents(
    case: &LatentCase,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    let gpu = stream.device().cuda_properties().ok_or("kernels run on GPUs")?;
    let inputs = LatentInputs::upload(case, &LatentData::generate(case), stream)?;
    let problem = inputs.decode().problem(&inputs.cache()).map_err(told)?;
    if accepts(kernel, &problem, gpu).is_ok() {
        return run_latent_case(case, Choice::This(kernel), stream);
    }
    let mut outputs = TokenOutputs::poisoned(case.tokens(), stream)?;
    match inputs.launch(&mut outputs, Choice::This(kernel), stream) {
        Err(Error::Unsupported { .. }) => Ok(0),
        other => Err(format!("{other:?} in place of a refusal\n    {case:?}")),
    }
}
