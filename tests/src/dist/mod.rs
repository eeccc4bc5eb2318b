//! Attention over several ranks in threads of one process, against the oracle of the whole
//! sequence.

use crate::attention::{AttentionCase, AttentionData, AttentionReference, Lengths};
use crate::attention_bwd::{BackwardData, BackwardReference};
use crate::host::{download, upload};
use crate::number::{decode, encode};
use crate::tolerance::check;
use blockflash_dist::{Communicator, DistributedAttention, Error, Memory, Scheme, Shard};
use blockflash_ops::{
    Align, Attention, AttentionOutput, DType, Device, Mask, Stream, Tensor, View,
};
use proptest::prelude::*;
use proptest::sample::select;
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
    let options = (0..4usize, prop_oneof![3 => Just(None), 1 => Just(Some(15.0f32))], any::<u32>());
    (sizes, seqlen, select(dtypes), select(head_dims), options, any::<prop::sample::Index>())
        .prop_map(
            |(
                (world, heads_kv, ratio, batch),
                seqlen,
                dtype,
                head_dim,
                (mask, softcap, seed),
                which,
            )| {
                let schemes = Scheme::all(world, heads_kv);
                let scheme = schemes[which.index(schemes.len())];
                let mask = match mask {
                    0 => Mask::Full,
                    3 if scheme.keys == 1 => {
                        Mask::Window { left: Some(7), right: Some(3), align: Align::TopLeft }
                    }
                    1 => Mask::Causal { align: Align::TopLeft },
                    _ => Mask::causal(),
                };
                let simple =
                    AttentionCase::simple(dtype, (heads_kv * ratio, heads_kv), head_dim, (0, 0));
                let lengths = Lengths::Dense { batch, seqlen_q: seqlen, seqlen_kv: seqlen };
                let seed = seed.into();
                DistCase { whole: AttentionCase { lengths, mask, softcap, seed, ..simple }, scheme }
            },
        )
}

impl DistCase {
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
                    let shard = Shard::new(self.sizes()[1], comm.world(), comm.rank());
                    let shard = shard.map_err(text)?;
                    let stream = device.stream().map_err(|error| error.to_string())?;
                    call(&Rank { case: self, comm: &comm, shard, stream })
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

/// One rank of a case.
pub struct Rank<'a> {
    case: &'a DistCase,
    /// Its way to the others.
    pub comm: &'a Memory,
    shard: Shard,
    /// Where it computes.
    pub stream: Stream,
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

    /// The call on these rows.
    pub fn call<'t>(&self, q: View<'t>, k: View<'t>, v: View<'t>) -> DistributedAttention<'t> {
        let AttentionCase { mask, softcap, softmax_scale, .. } = self.case.whole;
        let attention = Attention { mask, softcap, softmax_scale, ..Attention::new(q, k, v) };
        DistributedAttention { attention, seqlen: self.case.sizes()[1], scheme: self.case.scheme }
    }

    /// The forward pass of the data of a case.
    pub fn forward(&self, data: &AttentionData) -> Result<AttentionOutput, String> {
        let AttentionCase { heads_q, heads_kv, .. } = self.case.whole;
        let q = self.rows(&data.q, heads_q)?;
        let [k, v] = [self.rows(&data.k, heads_kv)?, self.rows(&data.v, heads_kv)?];
        let call = self.call(q.view(), k.view(), v.view());
        let output = call.forward(self.comm, &self.stream).map_err(|error| error.to_string())?;
        self.comm.wait(&self.stream).map_err(|error| error.to_string())?;
        Ok(output)
    }

    /// The bits of the gradients of q, k and v, of the data of a case.
    pub fn backward(&self, data: &BackwardData) -> Result<Vec<Vec<u32>>, String> {
        let AttentionCase { heads_q, heads_kv, .. } = self.case.whole;
        let q = self.rows(&data.forward.q, heads_q)?;
        let k = self.rows(&data.forward.k, heads_kv)?;
        let v = self.rows(&data.forward.v, heads_kv)?;
        let output =
            AttentionOutput { o: self.rows(&data.o, heads_q)?, lse: self.logs(&data.lse)? };
        let d_o = self.rows(&data.d_o, heads_q)?;
        let call = self.call(q.view(), k.view(), v.view());
        let gradients = call.backward(&output, d_o.view(), self.comm, &self.stream);
        let gradients = gradients.map_err(|error| error.to_string())?;
        self.comm.wait(&self.stream).map_err(|error| error.to_string())?;
        self.bits(&[&gradients.dq, &gradients.dk, &gradients.dv])
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
        let shard = Shard::new(seqlen, parts.len(), rank).expect("a valid case");
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
