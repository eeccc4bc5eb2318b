//! Runs cases on a device and checks everything that they write.

use super::stored::Scales;
use super::{IndexCase, IndexData, KeyLayout};
use crate::attention::Choice;
use crate::gpu::wait;
use crate::host::{download, poisoned, upload};
use crate::number::{decode, encode, poison, unit_roundoff};
use crate::tolerance::check;
use blockflash_ops::attention_index::{accepts, plan, tile};
use blockflash_ops::{
    AttentionDecodeWorkspace, DType, Error, HeadDims, IndexAttention, IndexAttentionOperands,
    IndexLists, KvCache, Operation, PackedTokens, Scores, Stream, Tensor, View,
};
use blockflash_oracle::{PRODUCTS, Rounding};
use blockflash_sys::{Kernel, manifest};

/// Elements of NaN behind each row of queries and outputs.
const GAP: usize = 8;
/// Blocks behind each list that belong to none.
const BEHIND: usize = 4;

/// The operands of a case on a device.
pub(super) struct IndexInputs {
    pub(super) case: IndexCase,
    pub(super) q: Tensor,
    k: Tensor,
    /// Not there where the values are columns of the keys, or beside them.
    v: Option<Tensor>,
    pub(super) table: Tensor,
    pub(super) lengths: Tensor,
    offsets: [Tensor; 2],
    /// Of codes of keys and of values.
    scales: [Option<Tensor>; 2],
    /// `[total, groups, capacity + BEHIND]`.
    pub(super) entries: Tensor,
    sink: Tensor,
    pub(super) workspace: Option<AttentionDecodeWorkspace>,
}

/// The outputs of a case on a device.
pub(super) struct IndexOutputs {
    pub(super) o: Tensor,
    lse: Tensor,
}

fn told(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl IndexInputs {
    pub(super) fn upload(
        case: &IndexCase,
        data: &IndexData,
        stream: &Stream,
    ) -> Result<Self, String> {
        let (dtype, qk, batch) = (case.form.dtype, case.form.head_dims.qk, case.batch());
        let ints = |values: Vec<i32>, shape: &[usize]| {
            Tensor::from_slice(stream, &values, shape).map_err(told)
        };
        let gap = || std::iter::repeat_n(poison(dtype), GAP);
        let with_gap = |row: &[f32]| -> Vec<u32> {
            row.iter().map(|&x| encode(dtype, x)).chain(gap()).collect()
        };
        let q: Vec<u32> = data.q.chunks(qk).flat_map(with_gap).collect();

        let ([page_size, columns, pages], heads_kv) = (case.pages(), case.heads[1]);
        let ([of_k, of_v], of_rows, gap) =
            (case.form.stored(), case.form.cache_dtype(), case.gap());
        let [keys, values] = data.cache(case, gap);
        let shape = |width: usize| match case.layout {
            KeyLayout::HeadsFirst(_) => vec![pages, heads_kv, page_size, width + gap],
            _ => vec![pages, page_size, heads_kv, width + gap],
        };
        let (k, v) = match case.layout {
            KeyLayout::Interleaved(_) => {
                let row = heads_kv * (of_k + gap);
                let slots = keys.chunks(row).zip(values.chunks(row));
                let both: Vec<u32> = slots.flat_map(|(k, v)| [k, v].concat()).collect();
                let shape = [pages, page_size, 2 * heads_kv, of_k + gap];
                (upload(stream, of_rows, &both, &shape)?, None)
            }
            _ if case.form.is_latent() => (upload(stream, of_rows, &keys, &shape(of_k))?, None),
            _ => {
                let v = upload(stream, of_rows, &values, &shape(of_v))?;
                (upload(stream, of_rows, &keys, &shape(of_k))?, Some(v))
            }
        };
        let scales = [0, 1].map(|which| {
            let scales = Scales::of(case, which)?;
            Some(Tensor::from_slice(stream, &scales.values, &scales.shape).map_err(told))
        });
        let [k_scale, v_scale] = scales.map(Option::transpose);
        let rows = case.lengths.iter();
        let starts = (0..=batch).map(|b| case.start(b) as i32).collect();
        let mut inputs = Self {
            q: upload(stream, dtype, &q, &case.rows_shape(qk + GAP))?,
            k,
            v,
            table: match case.has_table() {
                false => ints(vec![], &[0])?,
                true => ints(case.table(), &[batch, columns])?,
            },
            lengths: ints(rows.map(|lengths| lengths.1 as i32).collect(), &[batch])?,
            offsets: [ints(starts, &[batch + 1])?, ints(case.offsets(), &[batch + 1])?],
            entries: ints(
                case.physical(&data.entries),
                &[case.total(), case.groups, case.capacity + BEHIND],
            )?,
            scales: [k_scale?, v_scale?],
            sink: Tensor::from_slice(stream, &data.sink, &[case.heads[0]]).map_err(told)?,
            workspace: None,
            case: case.clone(),
        };
        let bytes = largest_workspace(&inputs.attention(), &inputs.cache(), stream)?;
        let workspace = AttentionDecodeWorkspace::new(stream, bytes);
        inputs.workspace = Some(workspace.map_err(told)?);
        Ok(inputs)
    }

    pub(super) fn attention(&self) -> IndexAttention<'_> {
        let case = &self.case;
        let packed = |at: usize, max_seqlen| PackedTokens {
            cu_seqlens: self.offsets[at].view(),
            max_seqlen,
        };
        let entries = self.entries.view().permute(&[1, 0, 2]).expect("three dimensions");
        let entries = entries.slice(2, 0..case.capacity).expect("room behind lists");
        let lists = IndexLists { entries, granularity: case.granularity };
        let is_packed = case.layout == KeyLayout::Packed;
        let sink = case.sink.then(|| self.sink.view());
        IndexAttention {
            packed: case.packed.then(|| packed(0, case.longest().max(1))),
            packed_kv: is_packed.then(|| packed(1, case.longest_keys().max(1))),
            scores: Scores { sink, ..case.scores() },
            batch_invariant: case.batch_invariant,
            workspace: self.workspace.as_ref(),
            ..IndexAttention::new(columns(&self.q, case.form.head_dims.qk), lists)
        }
    }

    pub(super) fn cache(&self) -> KvCache<'_> {
        let (case, [of_k, of_v]) = (&self.case, self.case.form.stored());
        let (k, heads) = (self.k.view(), case.heads[1]);
        let [k, v] = match &self.v {
            Some(values) => [columns_of(k, of_k), columns_of(values.view(), of_v)],
            None if case.form.is_latent() => [columns_of(k, of_k), columns_of(k, of_v)],
            None => {
                let half = |first: usize| k.slice(2, first..first + heads).expect("both halves");
                [columns_of(half(0), of_k), columns_of(half(heads), of_v)]
            }
        };
        let lengths = case.seqused && case.layout != KeyLayout::Packed;
        let [k_scale, v_scale] =
            [&self.scales[0], &self.scales[1]].map(|scale| scale.as_ref().map(Tensor::view));
        KvCache {
            k_scale,
            v_scale,
            block_table: case.has_table().then(|| self.table.view()),
            seqused_kv: lengths.then(|| self.lengths.view()),
            ..KvCache::new(case.logical(k), case.logical(v))
        }
    }

    pub(super) fn launch(
        &self,
        outputs: &mut IndexOutputs,
        kernel: Choice,
        stream: &Stream,
    ) -> Result<(), Error> {
        let o = outputs.o.view_mut();
        let last = o.shape().len() - 1;
        let operands = IndexAttentionOperands {
            cache: self.cache(),
            o: o.slice(last, 0..self.case.form.head_dims.v)?,
            lse: Some(outputs.lse.view_mut()),
        };
        match kernel {
            Choice::Selected => self.attention().forward_into(operands, stream),
            Choice::This(kernel) => self.attention().run_with(kernel, operands, stream),
        }
    }
}

/// Bytes of workspace that a kernel needs, 0 if it does not compute the call.
pub(super) fn workspace_bytes(
    call: &IndexAttention<'_>,
    cache: &KvCache<'_>,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    let Some(gpu) = stream.device().cuda_properties() else { return Ok(0) };
    let problem = call.problem(cache).map_err(told)?;
    match plan(kernel, &problem, gpu) {
        Ok(plan) => Ok(plan.workspace_bytes),
        Err(Error::Unsupported { .. }) => Ok(0),
        Err(error) => Err(told(error)),
    }
}

/// Bytes of workspace with which every kernel can compute a call.
fn largest_workspace(
    call: &IndexAttention<'_>,
    cache: &KvCache<'_>,
    stream: &Stream,
) -> Result<usize, String> {
    let kernels = manifest::kernels().iter().filter(|kernel| tile(kernel).is_some());
    let mut bytes = kernels.map(|kernel| workspace_bytes(call, cache, kernel, stream));
    bytes.try_fold(0, |most, bytes| Ok(bytes?.max(most)))
}

/// The first columns of a tensor.
pub(super) fn columns(tensor: &Tensor, count: usize) -> View<'_> {
    columns_of(tensor.view(), count)
}

fn columns_of(view: View<'_>, count: usize) -> View<'_> {
    let last = view.shape().len() - 1;
    view.slice(last, 0..count).expect("a tensor with a gap")
}

impl IndexCase {
    /// Elements of NaN behind each row of the cache: 16 bytes.
    fn gap(&self) -> usize {
        16 / self.form.cache_dtype().size()
    }

    /// Keys or values as calls take them.
    fn logical<'v>(&self, view: View<'v>) -> View<'v> {
        match self.layout {
            KeyLayout::HeadsFirst(_) => view.permute(&[0, 2, 1, 3]).expect("four dimensions"),
            _ => view,
        }
    }

    /// Of queries or outputs.
    fn rows_shape(&self, width: usize) -> Vec<usize> {
        match self.packed {
            true => vec![self.total(), self.heads[0], width],
            false => vec![self.batch(), self.longest(), self.heads[0], width],
        }
    }

    /// Lists in their memory, `[total, groups, capacity + BEHIND]`: behind each list there are
    /// blocks that would count.
    pub(super) fn physical(&self, entries: &[i32]) -> Vec<i32> {
        let lists = (0..self.total()).flat_map(|query| (0..self.groups).map(move |g| [g, query]));
        let list = |[group, query]: [usize; 2]| {
            let list = &entries[(group * self.total() + query) * self.capacity..];
            let behind = std::iter::repeat_n(&0, BEHIND);
            list[..self.capacity].iter().chain(behind).copied().collect::<Vec<_>>()
        };
        lists.flat_map(list).collect()
    }
}

impl IndexOutputs {
    pub(super) fn poisoned(case: &IndexCase, stream: &Stream) -> Result<Self, String> {
        let lse = match case.packed {
            true => vec![case.heads[0], case.total()],
            false => vec![case.batch(), case.heads[0], case.longest()],
        };
        let shape = case.rows_shape(case.form.head_dims.v + GAP);
        let o = poisoned(stream, case.form.dtype, &shape)?;
        Ok(Self { o, lse: poisoned(stream, DType::F32, &lse)? })
    }

    pub(super) fn bits(&self, stream: &Stream) -> Result<[Vec<u32>; 2], String> {
        Ok([download(stream, &self.o)?, download(stream, &self.lse)?])
    }

    /// Judges the outputs; returns how many were compared.
    fn check(&self, case: &IndexCase, data: &IndexData, stream: &Stream) -> Result<usize, String> {
        let (dtype, HeadDims { qk, v: width }) = (case.form.dtype, case.form.head_dims);
        let (heads, [o, lse]) = (case.heads[0], self.bits(stream)?);
        let mut found = Vec::with_capacity(o.len());
        for (row, bits) in o.chunks(width + GAP).enumerate() {
            if bits[width..].iter().any(|&bits| bits != poison(dtype)) {
                return Err(format!("the gap behind row {row} of o was written"));
            }
            if bits[..width].contains(&poison(dtype)) {
                return Err(format!("row {row} of o was not written"));
            }
            found.extend(bits[..width].iter().map(|&bits| f64::from(decode(dtype, bits))));
        }
        let [reference, of_lse] = data.reference(case);
        let largest = of_lse.magnitude.iter().copied().filter(|size| size.is_finite());
        let largest = largest.fold(0.0, f64::max);
        let steps = 8 + qk.div_ceil(PRODUCTS);
        let rounding = Rounding {
            factor: Some(dtype),
            exponent: steps as f64 * unit_roundoff(DType::F32) * largest,
            ..Rounding::of_products(data.most_keys(case), 1, dtype)
        };
        let name = |row: usize| format!("token {}, head {}", row / heads, row % heads);
        check(&found, &reference, &rounding, |at| {
            format!("o[{}, {}]", name(at / width), at % width)
        })?;
        // Tokens of all sequences, then heads.
        let mut logs = Vec::with_capacity(lse.len());
        for [b, query] in case.queries() {
            let queries = case.lengths[b].0;
            logs.extend((0..heads).map(|head| {
                let at = match case.packed {
                    true => head * case.total() + case.start(b) + query,
                    false => (b * heads + head) * queries + query,
                };
                f64::from(f32::from_bits(lse[at]))
            }));
        }
        let rounding = Rounding::of_products(0, steps, DType::F32);
        check(&logs, &of_lse, &rounding, |row| format!("lse[{}]", name(row)))?;
        Ok(2)
    }
}

/// Runs and checks a case on a device.
pub fn run_index_case(case: &IndexCase, kernel: Choice, stream: &Stream) -> Result<usize, String> {
    let data = IndexData::generate(case);
    let run = || {
        let inputs = IndexInputs::upload(case, &data, stream)?;
        let mut outputs = IndexOutputs::poisoned(case, stream)?;
        inputs.launch(&mut outputs, kernel, stream).map_err(|error| format!("refused: {error}"))?;
        wait(stream, &|| format!("{kernel:?} with {case:?}"))?;
        outputs.check(case, &data, stream)
    };
    run().map_err(|error| format!("{error}\n    {case:?}"))
}

/// The same for a kernel that must refuse what it does not accept.
pub fn run_or_refuse_lists(
    case: &IndexCase,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    let gpu = stream.device().cuda_properties().ok_or("kernels run on GPUs")?;
    let inputs = IndexInputs::upload(case, &IndexData::generate(case), stream)?;
    let problem = inputs.attention().problem(&inputs.cache()).map_err(told)?;
    if accepts(kernel, &problem, gpu).is_ok() {
        return run_index_case(case, Choice::This(kernel), stream);
    }
    let mut outputs = IndexOutputs::poisoned(case, stream)?;
    match inputs.launch(&mut outputs, Choice::This(kernel), stream) {
        Err(Error::Unsupported { .. }) => Ok(0),
        other => Err(format!("{other:?} in place of a refusal\n    {case:?}")),
    }
}
