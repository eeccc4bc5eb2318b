//! Runs cases on a device and checks everything that they write.

use super::stored::Scales;
use super::{IndexCase, IndexData, KeyLayout};
use crate::attention::Choice;
use crate::gpu::wait;
use crate::host::upload;
use crate::number::{encode, poison};
use crate::token_outputs::{GAP, TokenOutputs, Tokens, columns, columns_of};
use blockflash_ops::attention_index::{accepts, plan, tile};
use blockflash_ops::{
    AttentionDecodeWorkspace, Error, IndexAttention, IndexAttentionOperands, IndexLists, KvCache,
    Operation, PackedTokens, Scores, Stream, Tensor, View,
};
use blockflash_sys::{Kernel, manifest};

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
            q: upload(stream, dtype, &q, &case.tokens().rows_shape(qk))?,
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
        outputs: &mut TokenOutputs,
        kernel: Choice,
        stream: &Stream,
    ) -> Result<(), Error> {
        let (o, lse) = outputs.views();
        let operands = IndexAttentionOperands { cache: self.cache(), o, lse: Some(lse) };
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

    pub(super) fn tokens(&self) -> Tokens {
        Tokens {
            queries: self.lengths.iter().map(|lengths| lengths.0).collect(),
            packed: self.packed,
            heads: self.heads[0],
            width: self.form.head_dims.v,
            dtype: self.form.dtype,
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

/// Runs and checks a case on a device.
pub fn run_index_case(case: &IndexCase, kernel: Choice, stream: &Stream) -> Result<usize, String> {
    let data = IndexData::generate(case);
    let run = || {
        let inputs = IndexInputs::upload(case, &data, stream)?;
        let mut outputs = TokenOutputs::poisoned(case.tokens(), stream)?;
        inputs.launch(&mut outputs, kernel, stream).map_err(|error| format!("refused: {error}"))?;
        wait(stream, &|| format!("{kernel:?} with {case:?}"))?;
        let (most_keys, columns) = (data.most_keys(case), case.form.head_dims.qk);
        outputs.check(&data.reference(case), most_keys, columns, stream)
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
    let mut outputs = TokenOutputs::poisoned(case.tokens(), stream)?;
    match inputs.launch(&mut outputs, Choice::This(kernel), stream) {
        Err(Error::Unsupported { .. }) => Ok(0),
        other => Err(format!("{other:?} in place of a refusal\n    {case:?}")),
    }
}
