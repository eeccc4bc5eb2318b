//! The operands of a case on a device, its call, and the check of every slot of the cache.

use super::codes::Scales;
use super::data::{NewKey, places};
use super::outputs::with_batch;
use super::{CacheLayout, DecodeCase, DecodeData, DecodeOutputs};
use crate::attention::{Choice, placed};
use crate::host::{array, download, refill, upload, view};
use crate::number::{decode, encode, poison};
use crate::tolerance::{Reference, check};
use blockflash_cases::io::Array;
use blockflash_ops::attention_decode::workspace_bytes;
use blockflash_ops::{
    AppendKv, AttentionDecode, AttentionDecodeOperands, AttentionDecodeWorkspace, CacheAccess,
    CacheScale, DType, Error, KvCache, KvCacheMut, Operation, PackedTokens, PageLists, Rotary,
    Scores, Stream, Tensor,
};
use blockflash_oracle::Rounding;
use blockflash_sys::manifest;

/// The operands of a case on a device.
pub struct DecodeInputs {
    case: DecodeCase,
    /// Queries.
    pub q: Tensor,
    sink: Option<Tensor>,
    bias: Option<Tensor>,
    alibi: Option<Tensor>,
    tail: Option<Tensor>,
    cu_seqlens: Option<Tensor>,
    /// Keys and values.
    pub cache: [Tensor; 2],
    /// Of keys and of values that are codes.
    scales: [Option<Tensor>; 2],
    /// i32 `[batch, max_pages]`.
    pub table: Option<Tensor>,
    /// i32 `[batch]`.
    pub seqused: Option<Tensor>,
    new: [Tensor; 2],
    tables: Option<[Tensor; 2]>,
    lists: Option<[Tensor; 2]>,
    workspace: Option<AttentionDecodeWorkspace>,
    /// Without elements: stand in for the cache while a call borrows it and the other operands.
    stand_ins: Option<[Tensor; 2]>,
}

/// A workspace for any kernel that takes the call, selected or not.
pub(crate) fn largest_workspace(
    decode: &AttentionDecode<'_>,
    cache: &KvCache<'_>,
    stream: &Stream,
) -> Result<AttentionDecodeWorkspace, Error> {
    let problem = decode.problem(cache)?;
    let bytes = stream.device().cuda_properties().and_then(|gpu| {
        let kernels = manifest::kernels().iter();
        kernels.filter_map(|kernel| workspace_bytes(kernel, &problem, gpu).ok()).max()
    });
    AttentionDecodeWorkspace::new(stream, bytes.unwrap_or(0))
}

/// The bias with room for all keys that the cache has room for, NaN beyond the longest sequence.
fn bias(case: &DecodeCase, data: &DecodeData) -> Option<Array> {
    let (call, values) = (&case.attention, &data.attention.bias);
    let bias = call.terms.bias.as_ref()?;
    let (mut shape, mut padded) = (call.bias_shape(), values.clone());
    if !bias.broadcast[3] {
        let (keys, capacity) = (shape[3], case.capacity());
        let rows = shape[..3].iter().product::<usize>();
        padded = (0..rows)
            .flat_map(|row| {
                let row = values[row * keys..(row + 1) * keys].iter().copied();
                row.chain(std::iter::repeat_n(f32::NAN, capacity - keys))
            })
            .collect();
        shape[3] = capacity;
    }
    Some(array(bias.dtype, &shape, &padded))
}

/// The mask of the last keys of a case.
fn tail_mask(
    case: &DecodeCase,
    data: &DecodeData,
    stream: &Stream,
) -> Option<Result<Tensor, String>> {
    let (call, tail) = (&case.attention, case.tail?);
    let queries = call.sequences().first().map_or(0, |s| s.q_len);
    let rows = data.attention.q.len() / (call.heads_q * call.head_dim).max(1);
    let shape = match (case.equal, tail.shared) {
        (true, true) => vec![1, queries, tail.tail],
        (true, false) => vec![call.sequences().len(), queries, tail.tail],
        (false, _) => vec![rows, tail.tail],
    };
    let entries = case.tail_entries(shape[..shape.len() - 1].iter().product());
    Some(Tensor::from_slice(stream, &entries, &shape).map_err(|error| error.to_string()))
}

impl DecodeInputs {
    /// Uploads the data of a case.
    pub fn upload(case: &DecodeCase, data: &DecodeData, stream: &Stream) -> Result<Self, String> {
        let call = &case.attention;
        let ([q_placed, ..], _) = placed(call);
        let encoded = |values: &[f32], dtype: DType| -> Vec<u32> {
            values.iter().map(|&x| encode(dtype, x)).collect()
        };
        let q = encoded(&data.attention.q, call.dtype);
        let q = q_placed.scatter(q, poison(call.dtype));
        let shape =
            if case.equal { with_batch(case, &q_placed, 0).0 } else { q_placed.physical.clone() };
        let q = upload(stream, call.dtype, &q, &shape)?;

        let [page_size, max_pages, pages] = case.pages();
        let (heads, d) = (call.heads_kv, call.head_dim);
        let cache_shape = match case.layout {
            CacheLayout::Paged { heads_first: true, .. } => [pages, heads, page_size, d],
            _ => [pages, page_size, heads, d],
        };
        let [k, v] =
            data.cache(case).map(|bits| upload(stream, case.cache_dtype(), &bits, &cache_shape));
        let batch = call.sequences().len();
        let ints = |values: Vec<i32>, shape: &[usize]| {
            Tensor::from_slice(stream, &values, shape).map_err(|error| error.to_string())
        };
        let lengths: Vec<i32> = call.sequences().iter().map(|s| s.kv_len as i32).collect();
        let rows = data.new[0].len() / (heads * d).max(1);
        let new_shape = if case.equal {
            vec![batch, rows / batch.max(1), heads, d]
        } else {
            vec![rows, heads, d]
        };
        let new =
            |values: &[f32]| upload(stream, call.dtype, &encoded(values, call.dtype), &new_shape);
        let tables = case.rotary.map(|rotary| {
            let shape = [case.capacity(), rotary.dim / 2];
            let [cos, sin] = &data.tables;
            let table = |x: &[f32]| upload(stream, rotary.dtype, &encoded(x, rotary.dtype), &shape);
            Ok::<_, String>([table(cos)?, table(sin)?])
        });
        let lists = case.lists().map(|lists| {
            let counts = lists.iter().map(|heads| heads.first().map_or(0, Vec::len) as i32);
            let counts = ints(counts.collect(), &[batch])?;
            let garbage = [i32::MIN, -1, i32::MAX, 0];
            let padded = lists.iter().flatten().flat_map(|list| {
                let rest = garbage.into_iter().cycle().take(max_pages - list.len());
                list.iter().copied().chain(rest)
            });
            Ok::<_, String>([ints(padded.collect(), &[batch, heads, max_pages])?, counts])
        });
        let sink = call.scores.sink.map(|()| {
            let bits = encoded(&data.attention.sink, DType::F32);
            upload(stream, DType::F32, &bits, &[bits.len()])
        });
        let small = |array: Array| array.upload(stream).map_err(|error| error.to_string());
        let slopes = &data.attention.alibi;
        let alibi = call.alibi_shape().map(|shape| array(DType::F32, &shape, slopes));
        let tail = tail_mask(case, data, stream);
        let scale = |which| {
            let scales = Scales::new(case, case.codes?, which);
            let given = !scales.shape.is_empty();
            given.then(|| small(array(DType::F32, &scales.shape, &scales.values)))
        };
        let offsets = std::iter::once(0)
            .chain(call.sequences().iter().map(|s| (s.q_start + s.q_len) as i32))
            .collect();
        let mut inputs = Self {
            case: case.clone(),
            q,
            sink: sink.transpose()?,
            bias: bias(case, data).map(small).transpose()?,
            alibi: alibi.map(small).transpose()?,
            tail: tail.transpose()?,
            cu_seqlens: match case.equal {
                true => None,
                false => Some(ints(offsets, &[batch + 1])?),
            },
            cache: [k?, v?],
            scales: [scale(0).transpose()?, scale(1).transpose()?],
            table: match case.layout {
                CacheLayout::Paged { .. } => Some(ints(case.table(true), &[batch, max_pages])?),
                CacheLayout::Contiguous { .. } => None,
            },
            seqused: case.seqused.then(|| ints(lengths, &[batch])).transpose()?,
            new: [new(&data.new[0])?, new(&data.new[1])?],
            tables: tables.transpose()?,
            lists: lists.transpose()?,
            workspace: None,
            stand_ins: Some([ints(Vec::new(), &[0])?, ints(Vec::new(), &[0])?]),
        };
        if !stream.device().is_cpu() {
            let workspace = largest_workspace(&inputs.decode(), &inputs.cache(), stream);
            inputs.workspace = Some(workspace.map_err(|error| error.to_string())?);
        }
        Ok(inputs)
    }

    /// Replaces all numbers in place, as a replayed graph needs it. The new case has the shapes of
    /// the old one, and no sequence has more queries than a captured call announced.
    pub fn refill(
        &mut self,
        case: &DecodeCase,
        data: &DecodeData,
        stream: &Stream,
    ) -> Result<(), String> {
        let fresh = Self::upload(case, data, stream)?;
        let pairs = [(&mut self.q, &fresh.q)]
            .into_iter()
            .chain(self.cache.iter_mut().zip(&fresh.cache))
            .chain(self.new.iter_mut().zip(&fresh.new))
            .chain(self.sink.iter_mut().zip(&fresh.sink))
            .chain(self.cu_seqlens.iter_mut().zip(&fresh.cu_seqlens))
            .chain(self.table.iter_mut().zip(&fresh.table))
            .chain(self.bias.iter_mut().zip(&fresh.bias))
            .chain(self.alibi.iter_mut().zip(&fresh.alibi))
            .chain(self.tail.iter_mut().zip(&fresh.tail))
            .chain(self.scales.iter_mut().flatten().zip(fresh.scales.iter().flatten()))
            .chain(self.seqused.iter_mut().zip(&fresh.seqused))
            .chain(self.lists.iter_mut().flatten().zip(fresh.lists.iter().flatten()));
        for (tensor, fresh) in pairs {
            assert_eq!(tensor.shape(), fresh.shape());
            refill(tensor, stream, &download(stream, fresh)?)?;
        }
        self.case = case.clone();
        Ok(())
    }

    fn packed(&self) -> Option<PackedTokens<'_>> {
        let longest = self.case.attention.sequences().iter().map(|s| s.q_len).max().unwrap_or(0);
        // Any upper bound will do, except 0 where there are rows.
        let max_seqlen = (longest + self.case.attention.seed as usize % 3).max(1);
        let cu_seqlens = self.cu_seqlens.as_ref()?.view();
        Some(PackedTokens { cu_seqlens, max_seqlen })
    }

    fn rotary(&self) -> Option<Rotary<'_>> {
        let [cos, sin] = self.tables.as_ref()?;
        let pairs = self.case.rotary?.pairs;
        Some(Rotary { cos: cos.view(), sin: sin.view(), pairs })
    }

    /// The call.
    pub fn decode(&self) -> AttentionDecode<'_> {
        let call = &self.case.attention;
        let ([q_placed, ..], _) = placed(call);
        let q = match self.case.equal {
            false => view(&self.q, &q_placed),
            true => {
                let order = with_batch(&self.case, &q_placed, 0).1;
                self.q.view().permute(&order).expect("a permutation")
            }
        };
        let pages = self.lists.as_ref().map(|[lists, counts]| {
            let (lists, counts) = (lists.view(), counts.view());
            PageLists { lists, counts }
        });
        AttentionDecode {
            packed: self.packed(),
            scores: Scores {
                sink: self.sink.as_ref().map(Tensor::view),
                bias: self.bias.as_ref().map(Tensor::view),
                alibi: self.alibi.as_ref().map(Tensor::view),
                ..call.scores.without_tensors()
            },
            rotary: self.rotary(),
            pages,
            tail_mask: self.tail.as_ref().map(Tensor::view),
            batch_invariant: self.case.batch_invariant,
            workspace: self.workspace.as_ref(),
            ..AttentionDecode::new(q)
        }
    }

    fn order(&self) -> [usize; 4] {
        match self.case.layout {
            CacheLayout::Paged { heads_first: true, .. } => [0, 2, 1, 3],
            _ => [0, 1, 2, 3],
        }
    }

    /// The cache for reading.
    pub fn cache(&self) -> KvCache<'_> {
        let [k, v] =
            [0, 1].map(|i| self.cache[i].view().permute(&self.order()).expect("a permutation"));
        KvCache {
            block_table: self.table.as_ref().map(Tensor::view),
            seqused_kv: self.seqused.as_ref().map(Tensor::view),
            k_scale: self.scales[0].as_ref().map(Tensor::view),
            v_scale: self.scales[1].as_ref().map(Tensor::view),
            ..KvCache::new(k, v)
        }
    }

    /// The same with the mask of the last keys of another case, which may hide keys that are no
    /// poison here.
    ///
    /// # Errors
    /// A failing device.
    pub fn with_tail(
        mut self,
        case: &DecodeCase,
        data: &DecodeData,
        stream: &Stream,
    ) -> Result<Self, String> {
        self.tail = tail_mask(case, data, stream).transpose()?;
        self.case = case.clone();
        Ok(self)
    }

    /// Queues the computation.
    pub fn launch(
        &mut self,
        outputs: &mut DecodeOutputs,
        kernel: Choice,
        stream: &Stream,
    ) -> Result<(), Error> {
        self.with_cache(|inputs, new, whole| {
            let (o, lse) = outputs.views(&inputs.case);
            let cache = match inputs.case.append {
                true => CacheAccess::Append(&new, whole),
                false => CacheAccess::Read(whole.as_cache()?),
            };
            let operands = AttentionDecodeOperands { cache, o, lse };
            match kernel {
                Choice::Selected => inputs.decode().forward_into(operands, stream),
                Choice::This(kernel) => inputs.decode().run_with(kernel, operands, stream),
            }
        })
    }

    /// Gives the append of the case and its cache to `run`.
    pub fn append_alone<R>(&mut self, run: impl FnOnce(AppendKv<'_>, KvCacheMut<'_>) -> R) -> R {
        self.with_cache(|_, new, cache| run(new, cache))
    }

    fn with_cache<R>(&mut self, run: impl FnOnce(&Self, AppendKv<'_>, KvCacheMut<'_>) -> R) -> R {
        let order = self.order();
        let mut lent = self.stand_ins.take().expect("two tensors");
        std::mem::swap(&mut self.cache, &mut lent);
        let result = {
            let [k, v] = lent
                .each_mut()
                .map(|tensor| tensor.view_mut().permute(&order).expect("a permutation"));
            let whole = KvCacheMut {
                block_table: self.table.as_ref().map(Tensor::view),
                seqused_kv: self.seqused.as_ref().map(Tensor::view),
                k_scale: self.scales[0].as_ref().map(|scale| CacheScale::Given(scale.view())),
                v_scale: self.scales[1].as_ref().map(|scale| CacheScale::Given(scale.view())),
                ..KvCacheMut::new(k, v)
            };
            let new = AppendKv {
                packed: self.packed(),
                rotary: self.rotary(),
                ..AppendKv::new(self.new[0].view(), self.new[1].view())
            };
            run(self, new, whole)
        };
        std::mem::swap(&mut self.cache, &mut lent);
        self.stand_ins = Some(lent);
        result
    }

    /// Checks every slot of the cache, bit by bit. New keys are also compared with the oracle.
    pub fn check_cache(&self, data: &DecodeData, stream: &Stream) -> Result<(), String> {
        let (case, call) = (&self.case, &self.case.attention);
        let (d, dtype) = (call.head_dim, call.dtype);
        let found = [download(stream, &self.cache[0])?, download(stream, &self.cache[1])?];
        let (mut expected, places) = (data.cache(case), places(case));
        let (mut turned, mut got) = (Reference { width: d, ..Reference::default() }, Vec::new());
        for NewKey { at, new, turned: key } in data.new_keys(case) {
            let slot = places.of(at)..places.of(at) + d;
            for (at, (key, &value)) in slot.clone().zip(key.iter().zip(&data.new[1][new..][..d])) {
                expected[0][at] = encode(dtype, key.plain as f32);
                expected[1][at] = encode(dtype, value);
            }
            turned.extend(key);
            got.extend(found[0][slot].iter().map(|&bits| f64::from(decode(dtype, bits))));
        }
        for (name, found, expected) in
            [("k", &found[0], &expected[0]), ("v", &found[1], &expected[1])]
        {
            let is_nan = |bits| case.codes.is_none() && decode(dtype, bits).is_nan();
            // A NaN that is turned is some NaN, but memory that nobody writes keeps its bits.
            let differs = |&at: &usize| {
                found[at] != expected[at]
                    && !(is_nan(found[at]) && is_nan(expected[at]) && expected[at] != poison(dtype))
            };
            if let Some(at) = (0..found.len()).find(differs) {
                let (found, expected) = (found[at], expected[at]);
                return Err(format!("element {at} of {name}: {found:#x}, expected {expected:#x}"));
            }
        }
        let rounding = Rounding::of_products(0, 3, dtype);
        check(&got, &turned, &rounding, |at| format!("new key {}, element {}", at / d, at % d))?;
        Ok(())
    }
}
