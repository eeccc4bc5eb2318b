//! Attention over several ranks in threads of one process, against the oracle of the whole
//! sequence.

use crate::attention::{
    AttentionCase, AttentionData, AttentionReference, BlockCase, BlockPattern, Lengths, MaskHeads,
};
use crate::attention_bwd::{BackwardData, BackwardReference};
use crate::host::{download, upload};
use crate::number::{decode, encode};
use crate::tolerance::check;
use blockflash_dist::{
    Communicator, DistributedAttention, DistributedBlockMask, Error, Memory, Pass,
    PreparedAttention, Scheme, Shard,
};
use blockflash_ops::{
    Align, Attention, AttentionOutput, BlockMask, DType, Device, Mask, Stream, Tensor, View,
    ViewMut,
};
use proptest::prelude::*;
use proptest::sample::select;
use std::cell::Cell;
use std::time::Duration;

/// How long a rank waits for another one.
const TIMEOUT: Duration = Duration::from_secs(60);

/// An attention case that several ranks compute. Its queries and keys are equally many.
#[derive(Clone, Debug)]
pub struct DistCase {
    /// The whole sequence.
    pub whole: AttentionCase,
    /// How it is divided.
    pub scheme: Scheme,
    /// The blocks between which it is cut.
    pub cut: Option<[usize; 2]>,
}

/// Random masks: of windows, such that hide almost everything and such that hide almost nothing.
fn masks(longest: usize) -> impl Strategy<Value = Mask> {
    let align = select(vec![Align::TopLeft, Align::BottomRight]);
    let side = prop_oneof![
        2 => Just(None),
        2 => (0..=9usize).prop_map(Some),
        3 => (0..=longest).prop_map(Some),
        1 => Just(Some(usize::MAX)),
    ];
    prop_oneof![
        1 => Just(Mask::Full),
        2 => align.clone().prop_map(|align| Mask::Causal { align }),
        3 => (side.clone(), side, align)
            .prop_map(|(left, right, align)| Mask::Window { left, right, align }),
    ]
}

/// Random cases for 1 to `most` ranks.
pub fn dist_cases(
    most: usize,
    dtypes: Vec<DType>,
    head_dims: Vec<usize>,
    longest: usize,
) -> impl Strategy<Value = DistCase> {
    let sizes = (1..=most, select(vec![1usize, 2, 3, 4, 6, 8]), 1..=3usize, 1..=2usize);
    let seqlen = prop_oneof![1 => 0..=20usize, 4 => 1..=longest];
    let softcap = prop_oneof![3 => Just(None), 1 => Just(Some(15.0f32))];
    let cut = prop_oneof![6 => Just(None), 1 => Just(Some([64, 64]))];
    let options = (masks(longest), softcap, any::<bool>(), cut, any::<u32>());
    (sizes, seqlen, select(dtypes), select(head_dims), options, any::<prop::sample::Index>())
        .prop_map(
            |(
                (world, heads_kv, ratio, batch),
                seqlen,
                dtype,
                head_dim,
                (mask, softcap, sink, cut, seed),
                which,
            )| {
                let schemes = Scheme::all(world, heads_kv);
                let scheme = schemes[which.index(schemes.len())];
                let simple =
                    AttentionCase::simple(dtype, (heads_kv * ratio, heads_kv), head_dim, (0, 0));
                let lengths = Lengths::Dense { batch, seqlen_q: seqlen, seqlen_kv: seqlen };
                let seed = seed.into();
                let whole = AttentionCase { lengths, mask, softcap, sink, seed, ..simple };
                DistCase { whole, scheme, cut }
            },
        )
}

/// Random cases with block masks. Where keys are divided, there are no windows with them.
pub fn dist_block_cases(
    most: usize,
    dtypes: Vec<DType>,
    head_dims: Vec<usize>,
    longest: usize,
) -> impl Strategy<Value = DistCase> {
    let sizes = select(vec![[64, 64], [128, 64], [64, 128], [128, 192]]);
    let heads = select(vec![MaskHeads::One, MaskHeads::KeyValue, MaskHeads::Query]);
    let patterns = select(vec![
        BlockPattern::Random(0.0),
        BlockPattern::Random(0.1),
        BlockPattern::Random(0.4),
        BlockPattern::Random(1.0),
        BlockPattern::EmptyRowsAndColumns,
        BlockPattern::Seen,
    ]);
    let cases = dist_cases(most, dtypes, head_dims, longest);
    (cases, sizes, heads, any::<bool>(), patterns, 0..2usize).prop_map(
        |(mut case, [block_q, block_kv], heads, per_entry, pattern, mask)| {
            let block = BlockCase { block_q, block_kv, per_entry, heads, pattern };
            case.whole.block_mask = Some(block);
            case.cut = Some([block_q, block_kv]);
            if case.scheme.keys > 1 {
                case.whole.mask = [Mask::Full, Mask::causal()][mask];
            }
            case
        },
    )
}

impl DistCase {
    /// The rows of a rank.
    fn shard(&self, world: usize, rank: usize) -> Result<Shard, Error> {
        let shard = Shard::new(self.sizes()[1], world, rank)?;
        self.cut.map_or(Ok(shard), |[block_q, block_kv]| shard.in_blocks(block_q, block_kv))
    }

    fn distributed(
        &self,
        whole: &BlockMask,
        shard: Shard,
        comm: &dyn Communicator,
    ) -> Result<DistributedBlockMask, Error> {
        let lists = shard.block_mask(whole)?;
        DistributedBlockMask::new(&lists, self.whole.mask, shard, self.scheme, comm)
    }

    fn world(&self) -> usize {
        self.scheme.heads * self.scheme.keys
    }

    /// Batch and rows.
    fn sizes(&self) -> [usize; 2] {
        let Lengths::Dense { batch, seqlen_q, .. } = self.whole.lengths else {
            unreachable!("cases are dense")
        };
        [batch, seqlen_q]
    }

    /// Runs a call on every rank, and gives what each returns.
    pub fn ranks<T: Send>(
        &self,
        device: &Device,
        call: impl Fn(&Rank<'_>) -> Result<T, String> + Sync,
    ) -> Result<Vec<T>, String> {
        let text = |error: Error| error.to_string();
        let group = Memory::group(device, self.world(), TIMEOUT).map_err(text)?;
        std::thread::scope(|threads| {
            let start = |comm: Memory| {
                let call = &call;
                threads.spawn(move || {
                    let shard = self.shard(comm.world(), comm.rank()).map_err(text)?;
                    let stream = device.stream().map_err(|error| error.to_string())?;
                    let host = Device::cpu().stream().map_err(|error| error.to_string())?;
                    let comm = Counted { comm, sent: Cell::new(0) };
                    let block_mask = match self.whole.block_mask(&host)? {
                        None => None,
                        Some(whole) => Some(self.distributed(&whole, shard, &comm).map_err(text)?),
                    };
                    comm.sent.set(0);
                    call(&Rank { case: self, comm: &comm, shard, stream, block_mask })
                })
            };
            let ranks: Vec<_> = group.into_iter().map(start).collect();
            let join = |(rank, thread): (usize, std::thread::ScopedJoinHandle<'_, _>)| {
                let result: Result<T, String> =
                    thread.join().unwrap_or_else(|_| Err("a panic".into()));
                result.map_err(|error| format!("rank {rank}: {error}\n    {self:?}"))
            };
            ranks.into_iter().enumerate().map(join).collect()
        })
    }
}

/// Counts the bytes that a rank sends.
pub struct Counted {
    comm: Memory,
    sent: Cell<usize>,
}

impl Communicator for Counted {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn world(&self) -> usize {
        self.comm.world()
    }

    fn stream(&self) -> &Stream {
        self.comm.stream()
    }

    fn exchange(
        &self,
        sends: &[(usize, View<'_>)],
        receives: &mut [(usize, ViewMut<'_>)],
    ) -> Result<(), Error> {
        let bytes = sends.iter().map(|(_, view)| view.layout().elements() * view.dtype().size());
        self.sent.set(self.sent.get() + bytes.sum::<usize>());
        self.comm.exchange(sends, receives)
    }

    fn wait(&self, stream: &Stream) -> Result<(), Error> {
        self.comm.wait(stream)
    }

    fn give_up(&self, why: &str) {
        self.comm.give_up(why);
    }
}

/// One rank of a case.
pub struct Rank<'a> {
    case: &'a DistCase,
    /// Its way to the others.
    pub comm: &'a Counted,
    shard: Shard,
    /// Where it computes.
    pub stream: Stream,
    block_mask: Option<DistributedBlockMask>,
}

impl Rank<'_> {
    /// This rank's rows of a tensor `[batch, seqlen, heads, head_dim]`.
    pub fn rows(&self, values: &[f32], heads: usize) -> Result<Tensor, String> {
        let ([batch, seqlen], whole) = (self.case.sizes(), &self.case.whole);
        let (width, dtype) = (heads * whole.head_dim, whole.dtype);
        let rows = |entry: usize| {
            let ranges = self.shard.ranges().into_iter();
            let row = move |range: std::ops::Range<usize>| {
                (entry * seqlen + range.start) * width..(entry * seqlen + range.end) * width
            };
            ranges.flat_map(move |range| &values[row(range)])
        };
        let bits: Vec<u32> = (0..batch).flat_map(rows).map(|&x| encode(dtype, x)).collect();
        let shape = [batch, self.shard.rows(), heads, whole.head_dim];
        upload(&self.stream, dtype, &bits, &shape)
    }

    /// This rank's part of a log-sum-exp `[batch, heads, seqlen]`.
    pub fn logs(&self, values: &[f32]) -> Result<Tensor, String> {
        let ([batch, seqlen], heads) = (self.case.sizes(), self.case.whole.heads_q);
        let rows = |at: usize| {
            let ranges = self.shard.ranges().into_iter();
            ranges.flat_map(move |range| &values[at * seqlen..][range])
        };
        let bits: Vec<u32> = (0..batch * heads).flat_map(rows).map(|x| x.to_bits()).collect();
        upload(&self.stream, DType::F32, &bits, &[batch, heads, self.shard.rows()])
    }

    /// The call on rows of q, k and v, and a sink.
    pub fn call<'t>(
        &'t self,
        [q, k, v]: [View<'t>; 3],
        sink: Option<View<'t>>,
    ) -> DistributedAttention<'t> {
        let AttentionCase { mask, softcap, softmax_scale, .. } = self.case.whole;
        let attention = Attention { mask, softcap, softmax_scale, sink, ..Attention::new(q, k, v) };
        let (shard, scheme, block_mask) = (self.shard, self.case.scheme, self.block_mask.as_ref());
        DistributedAttention { attention, shard, scheme, block_mask }
    }

    fn sink(&self, data: &AttentionData) -> Result<Option<Tensor>, String> {
        let bits: Vec<u32> = data.sink.iter().map(|x| x.to_bits()).collect();
        let sink = || upload(&self.stream, DType::F32, &bits, &[bits.len()]);
        self.case.whole.sink.then(sink).transpose()
    }

    /// The forward pass of the data of a case.
    pub fn forward(&self, data: &AttentionData) -> Result<AttentionOutput, String> {
        let AttentionCase { heads_q, heads_kv, .. } = self.case.whole;
        let (q, sink) = (self.rows(&data.q, heads_q)?, self.sink(data)?);
        let [k, v] = [self.rows(&data.k, heads_kv)?, self.rows(&data.v, heads_kv)?];
        let sink = sink.as_ref().map(Tensor::view);
        let call = self.call([q.view(), k.view(), v.view()], sink);
        let output = self.counted(&call, Pass::Forward, |prepared| {
            call.forward_prepared(prepared, self.comm, &self.stream)
        })?;
        self.comm.wait(&self.stream).map_err(|error| error.to_string())?;
        Ok(output)
    }

    /// The bits of the gradients of q, k, v and the sink, of the data of a case.
    pub fn backward(&self, data: &BackwardData) -> Result<Vec<Vec<u32>>, String> {
        let AttentionCase { heads_q, heads_kv, .. } = self.case.whole;
        let (q, sink) = (self.rows(&data.forward.q, heads_q)?, self.sink(&data.forward)?);
        let k = self.rows(&data.forward.k, heads_kv)?;
        let v = self.rows(&data.forward.v, heads_kv)?;
        let output =
            AttentionOutput { o: self.rows(&data.o, heads_q)?, lse: self.logs(&data.lse)? };
        let d_o = self.rows(&data.d_o, heads_q)?;
        let sink = sink.as_ref().map(Tensor::view);
        let call = self.call([q.view(), k.view(), v.view()], sink);
        let gradients = self.counted(&call, Pass::Backward, |prepared| {
            call.backward_prepared(prepared, &output, d_o.view(), self.comm, &self.stream)
        })?;
        self.comm.wait(&self.stream).map_err(|error| error.to_string())?;
        let mut all = vec![&gradients.dq, &gradients.dk, &gradients.dv];
        all.extend(&gradients.d_sink);
        self.bits(&all)
    }

    /// Runs a prepared call, which sends as many bytes as it says.
    fn counted<T>(
        &self,
        call: &DistributedAttention<'_>,
        pass: Pass,
        run: impl FnOnce(&PreparedAttention) -> Result<T, Error>,
    ) -> Result<T, String> {
        let prepared = call.prepare(self.comm).map_err(|error| error.to_string())?;
        self.comm.sent.set(0);
        let result = run(&prepared).map_err(|error| error.to_string())?;
        let (expected, found) = (prepared.sent_bytes(pass), self.comm.sent.get());
        match expected == found {
            true => Ok(result),
            false => Err(format!("{pass:?} sends {found} bytes, not {expected}")),
        }
    }

    /// The bits of tensors.
    pub fn bits(&self, tensors: &[&Tensor]) -> Result<Vec<Vec<u32>>, String> {
        tensors.iter().map(|tensor| download(&self.stream, tensor)).collect()
    }
}

/// The tensor of the whole sequence: from `[batch, rows, width]` of each rank, or, for logs, from
/// `[batch · heads, rows]`.
fn whole(
    case: &DistCase,
    parts: &[Vec<u32>],
    dtype: DType,
    outer: usize,
    width: usize,
) -> Vec<f64> {
    let seqlen = case.sizes()[1];
    let mut all = vec![f64::NAN; outer * seqlen * width];
    for (rank, part) in parts.iter().enumerate() {
        let shard = case.shard(parts.len(), rank).expect("a valid case");
        let mut values = part.iter().map(|&bits| f64::from(decode(dtype, bits)));
        for entry in 0..outer {
            for row in shard.ranges().into_iter().flatten() {
                let to = &mut all[(entry * seqlen + row) * width..][..width];
                to.iter_mut().for_each(|to| *to = values.next().expect("all rows"));
            }
        }
    }
    all
}

/// Computes the forward pass on all ranks and checks every output element.
pub fn run_forward(case: &DistCase, device: &Device) -> Result<usize, String> {
    let data = AttentionData::generate(&case.whole);
    let reference = AttentionReference::compute(&case.whole, &data, f64::INFINITY);
    let outputs = case.ranks(device, |rank| {
        let output = rank.forward(&data)?;
        rank.bits(&[&output.o, &output.lse])
    })?;
    let ([batch, seqlen], heads, d) = (case.sizes(), case.whole.heads_q, case.whole.head_dim);
    let of = |which: usize| outputs.iter().map(|o| o[which].clone()).collect::<Vec<_>>();
    let o = whole(case, &of(0), case.whole.dtype, batch, heads * d);
    let lse = whole(case, &of(1), DType::F32, batch * heads, 1);
    let place = |&[b, i, h]: &[usize; 3]| (b * seqlen + i) * heads + h;
    let rows: Vec<usize> = reference.rows.iter().map(place).collect();
    let o: Vec<f64> = rows.iter().flat_map(|&row| o[row * d..][..d].iter().copied()).collect();
    let log = |&[b, i, h]: &[usize; 3]| lse[(b * heads + h) * seqlen + i];
    let lse: Vec<f64> = reference.rows.iter().map(log).collect();
    let story = |error| format!("{error}\n    {case:?}");
    let name = |what| move |at: usize| format!("{what} {at}");
    check(&o, &reference.o, &reference.rounding(&case.whole), name("o")).map_err(story)?;
    let rounding = AttentionReference::lse_rounding(&case.whole);
    check(&lse, &reference.lse, &rounding, name("lse")).map_err(story)?;
    Ok(2)
}

/// Computes the gradients on all ranks and checks every element.
pub fn run_backward(case: &DistCase, device: &Device) -> Result<usize, String> {
    let data = BackwardData::generate(&case.whole);
    let reference = BackwardReference::compute(&case.whole, &data);
    let AttentionCase { heads_q, heads_kv, head_dim, dtype, .. } = case.whole;
    let gradients = case.ranks(device, |rank| rank.backward(&data))?;
    let rounding = reference.rounding(&case.whole);
    for (i, heads) in [heads_q, heads_kv, heads_kv].into_iter().enumerate() {
        let parts: Vec<_> = gradients.iter().map(|bits| bits[i].clone()).collect();
        let found = whole(case, &parts, dtype, case.sizes()[0], heads * head_dim);
        let name = |at: usize| format!("gradient {i}, element {at}");
        check(&found, &reference.qkv[i], &rounding[i], name)
            .map_err(|error| format!("{error}\n    {case:?}"))?;
    }
    if case.whole.sink {
        let sinks = gradients.iter().map(|bits| &bits[3]);
        if sinks.clone().any(|bits| *bits != gradients[0][3]) {
            return Err(format!("the gradient of the sink differs among ranks\n    {case:?}"));
        }
        let found: Vec<f64> =
            gradients[0][3].iter().map(|&bits| f64::from(f32::from_bits(bits))).collect();
        let name = |at: usize| format!("gradient of the sink, head {at}");
        check(&found, &reference.d_sink, &reference.sink_rounding(&case.whole), name)
            .map_err(|error| format!("{error}\n    {case:?}"))?;
    }
    Ok(3)
}

/// Whether both passes give the same bits again.
pub fn repeats(case: &DistCase, device: &Device) -> Result<usize, String> {
    let data = BackwardData::generate(&case.whole);
    let run = || {
        case.ranks(device, |rank| {
            let output = rank.forward(&data.forward)?;
            let mut bits = rank.bits(&[&output.o, &output.lse])?;
            bits.extend(rank.backward(&data)?);
            Ok(bits)
        })
    };
    if run()? == run()? { Ok(5) } else { Err(format!("a repeat differs: {case:?}")) }
}
