//! Attention over several ranks in threads of one process, against the oracle of the whole
//! sequence.

mod rank;
mod strategy;

pub use rank::{Counted, Rank, Way};
pub use strategy::{dist_block_cases, dist_cases, dist_packed_cases};

use crate::attention::{AttentionCase, AttentionData, AttentionReference, Lengths};
use crate::attention_bwd::{BackwardData, BackwardReference};
use crate::number::decode;
use crate::tolerance::check;
use blockflash_dist::{Communicator, DistributedBlockMask, Error, Memory, Scheme, Shard};
use blockflash_ops::{BlockMask, DType, Device};
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
        DistributedBlockMask::new(&lists, self.whole.scores.mask, shard, self.scheme, comm)
    }

    fn world(&self) -> usize {
        self.scheme.heads * self.scheme.keys
    }

    /// Batch and rows. The sequences of a packed batch are rows of one entry.
    fn sizes(&self) -> [usize; 2] {
        match &self.whole.lengths {
            Lengths::Dense { batch, seqlen_q, .. } => [*batch, *seqlen_q],
            Lengths::Packed { lengths, .. } => [1, lengths.iter().map(|(rows, _)| rows).sum()],
        }
    }

    /// Where the sequences of a packed batch begin and end.
    fn cu_seqlens(&self) -> Option<Vec<i32>> {
        let Lengths::Packed { lengths, .. } = &self.whole.lengths else { return None };
        let mut offsets = vec![0];
        for (rows, _) in lengths {
            offsets.push(offsets[offsets.len() - 1] + *rows as i32);
        }
        Some(offsets)
    }

    /// The row of a query of a sequence, and the batch entry.
    fn row(&self, sequence: usize, query: usize) -> [usize; 2] {
        match self.cu_seqlens() {
            None => [sequence, query],
            Some(offsets) => [0, offsets[sequence] as usize + query],
        }
    }

    /// How the ranks of this case exchange keys.
    fn way(&self) -> Way {
        match self.whole.seed % 4 {
            2 => Way::Gathered,
            _ => Way::Plain,
        }
    }

    /// Runs a call on every rank, and gives what each returns.
    pub fn ranks<T: Send>(
        &self,
        device: &Device,
        call: impl Fn(&Rank<'_>) -> Result<T, String> + Sync,
    ) -> Result<Vec<T>, String> {
        self.ranks_by(self.way(), device, call)
    }

    fn ranks_by<T: Send>(
        &self,
        way: Way,
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
                    let comm = if way == Way::Gathered { comm.gathering() } else { comm };
                    let comm = Counted { comm, sent: Cell::new(0), gathered: Cell::new(0) };
                    let cu_seqlens = self.cu_seqlens();
                    let block_mask = match self.whole.block_mask(&host)? {
                        None => None,
                        Some(whole) => Some(self.distributed(&whole, shard, &comm).map_err(text)?),
                    };
                    comm.sent.set(0);
                    call(&Rank { case: self, comm: &comm, shard, stream, block_mask, cu_seqlens })
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
    let place = |&[b, i, h]: &[usize; 3]| {
        let [b, i] = case.row(b, i);
        (b * seqlen + i) * heads + h
    };
    let rows: Vec<usize> = reference.rows.iter().map(place).collect();
    let o: Vec<f64> = rows.iter().flat_map(|&row| o[row * d..][..d].iter().copied()).collect();
    let log = |&[b, i, h]: &[usize; 3]| {
        let [b, i] = case.row(b, i);
        lse[(b * heads + h) * seqlen + i]
    };
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
    if case.whole.scores.sink.is_some() {
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

/// Whether the forward pass gives the same bits where keys are gathered as where they come by
/// steps. Gives the number of all-gathers of a rank.
pub fn gathers_alike(case: &DistCase, device: &Device) -> Result<usize, String> {
    let data = AttentionData::generate(&case.whole);
    let run = |way| {
        case.ranks_by(way, device, |rank| {
            let output = rank.forward(&data)?;
            Ok((rank.bits(&[&output.o, &output.lse])?, rank.comm.gathered.get()))
        })
    };
    let (steps, gathered) = (run(Way::Plain)?, run(Way::Gathered)?);
    let count = gathered[0].1;
    if steps.iter().any(|(_, count)| *count > 0) || gathered.iter().any(|(_, n)| *n != count) {
        return Err(format!("not all ranks gather: {case:?}"));
    }
    match steps.iter().zip(&gathered).all(|((steps, _), (gathered, _))| steps == gathered) {
        true => Ok(count),
        false => Err(format!("gathered keys give other bits: {case:?}")),
    }
}

/// Whether the forward pass is right and repeats where keys are gathered under a block mask: one
/// call visits those of all other ranks, so bits differ from those of steps. Gives the number of
/// all-gathers of a rank; without any, the bits are those of steps.
pub fn gathers_blocks(case: &DistCase, device: &Device) -> Result<usize, String> {
    let mut gathered = case.clone();
    gathered.whole.seed = case.whole.seed / 4 * 4 + 2;
    assert_eq!(gathered.way(), Way::Gathered);
    run_forward(&gathered, device)?;
    let data = AttentionData::generate(&case.whole);
    let run = |way| {
        case.ranks_by(way, device, |rank| {
            let output = rank.forward(&data)?;
            Ok((rank.bits(&[&output.o, &output.lse])?, rank.comm.gathered.get()))
        })
    };
    let (first, again) = (run(Way::Gathered)?, run(Way::Gathered)?);
    let count = first[0].1;
    if first.iter().any(|(_, n)| *n != count) {
        return Err(format!("not all ranks gather: {case:?}"));
    }
    match first == again && (count > 0 || first == run(Way::Plain)?) {
        true => Ok(count),
        false => Err(format!("a repeat differs: {case:?}")),
    }
}
