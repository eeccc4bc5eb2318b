//! Times of several GPUs and of one, in turns.

use crate::Failure;
use crate::case::{BLOCK, Case, HEAD_DIM};
use crate::check::rows_of;
use crate::dense;
use crate::document::{self, squares};
use crate::links::Links;
use crate::report::{Report, Row};
use crate::watch::{Kind, Mode, Watched};
use blockflash_dist::{
    Communicator, DistributedAttention, DistributedBlockMask, Machine, Pass, PreparedAttention,
    Result, Scheme, Shard, Workload,
};
use blockflash_ops::{Attention, AttentionOutput, DType, Event, Mask, Stream, Tensor, View};
use std::time::Instant;

/// The ranks of this machine, seen from one of them.
pub struct Ranks {
    pub comm: Watched,
    /// Of the computation.
    pub stream: Stream,
}

impl Ranks {
    /// Seconds of a call on the slowest rank, on a stream.
    fn once(&self, stream: &Stream, call: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        self.most(&[0.0])?; // All ranks start together.
        let [start, end] = [Event::new(stream.device(), true)?, Event::new(stream.device(), true)?];
        start.record(stream)?;
        call()?;
        end.record(stream)?;
        self.comm.wait(stream)?;
        Ok(self.most(&[start.elapsed_us(&end)? * 1e-6])?[0])
    }

    /// The median of this many, after one that does not count.
    pub fn median(
        &self,
        repeats: usize,
        stream: &Stream,
        call: &mut dyn FnMut() -> Result<()>,
    ) -> Result<f64> {
        let times = (0..=repeats).map(|_| self.once(stream, call));
        let mut times = times.collect::<Result<Vec<_>>>()?;
        Ok(median(&mut times[1..]))
    }

    /// The largest of each number of all ranks.
    fn most(&self, own: &[f64]) -> Result<Vec<f64>> {
        let mut most = own.to_vec();
        for theirs in self.all(own)? {
            most.iter_mut().zip(theirs).for_each(|(most, their)| *most = most.max(their));
        }
        Ok(most)
    }

    /// As many numbers of each rank.
    fn all(&self, own: &[f64]) -> Result<Vec<Vec<f64>>> {
        let (comm, stream) = (&self.comm, self.comm.stream());
        let numbers: Vec<f32> = own.iter().map(|&number| number as f32).collect();
        let sent = Tensor::from_slice(stream, &numbers, &[own.len()])?;
        let empty = |_| Tensor::zeros(stream, DType::F32, &[own.len()]);
        let mut come = (0..comm.world()).map(empty).collect::<Result<Vec<_>, _>>()?;
        let others = |&rank: &usize| rank != comm.rank();
        let sends = (0..comm.world()).filter(others).map(|rank| (rank, sent.view()));
        let receives = come.iter_mut().enumerate().filter(|(rank, _)| others(rank));
        let mut receives: Vec<_> = receives.map(|(rank, x)| (rank, x.view_mut())).collect();
        let mode = self.comm.set(Mode::Exchange);
        comm.exchange(&sends.collect::<Vec<_>>(), &mut receives)?;
        comm.wait(stream)?;
        self.comm.set(mode);
        let read = |(rank, tensor): (usize, &Tensor)| match others(&rank) {
            true => Ok(tensor.to_vec::<f32>(stream)?.into_iter().map(f64::from).collect()),
            false => Ok(own.to_vec()),
        };
        come.iter().enumerate().map(read).collect()
    }
}

/// Everything on one GPU, and what it gives.
struct One<'a> {
    call: Attention<'a>,
    d_o: Option<View<'a>>,
    output: AttentionOutput,
}

impl One<'_> {
    /// The pass that is measured; results are o, or dq, dk and dv.
    fn run(&self, stream: &Stream) -> Result<Vec<Tensor>> {
        Ok(match self.d_o {
            None => vec![self.call.forward(stream)?.o],
            Some(d_o) => {
                let gradients = self.call.backward(&self.output, d_o, stream)?;
                vec![gradients.dq, gradients.dk, gradients.dv]
            }
        })
    }
}

/// A scheme, ready to run on the rows of this rank.
struct Divided<'a> {
    ranks: &'a Ranks,
    call: DistributedAttention<'a>,
    prepared: PreparedAttention,
    d_o: Option<View<'a>>,
    output: AttentionOutput,
    lists_ms: Option<f64>,
    times: Vec<f64>,
    repeats: Vec<f64>,
}

impl Divided<'_> {
    fn run(&self) -> Result<Vec<Tensor>> {
        let Ranks { comm, stream } = self.ranks;
        Ok(match self.d_o {
            None => vec![self.call.forward_prepared(&self.prepared, comm, stream)?.o],
            Some(d_o) => {
                let call = &self.call;
                let gradients =
                    call.backward_prepared(&self.prepared, &self.output, d_o, comm, stream)?;
                vec![gradients.dq, gradients.dk, gradients.dv]
            }
        })
    }

    fn seconds(&self) -> Result<f64> {
        self.ranks.once(&self.ranks.stream, &mut || self.run().map(drop))
    }
}

/// Measures a case with one GPU and with every scheme, compares the results, writes rows.
pub fn case(
    ranks: &Ranks,
    case: Case,
    rounds: usize,
    links: &Links,
    report: &mut Report,
) -> Result<(), Failure> {
    let Ranks { comm, stream } = ranks;
    let Case { pass, seqlen, heads_q, heads_kv, top_k } = case;
    let (world, mask) = (comm.world(), Mask::causal());
    let make = |seed, heads| dense::tensor(stream, seed, seqlen, heads, HEAD_DIM);
    let [q, k, v] = match top_k {
        None => [make(1, heads_q)?, make(2, heads_kv)?, make(3, heads_kv)?],
        Some(_) => document::draw(case, stream)?,
    };
    let d_o = (pass == Pass::Backward).then(|| make(4, heads_q)).transpose()?;
    let lists = top_k.map(|blocks| document::choose(blocks, q.view(), k.view(), stream));
    let lists = lists.transpose()?;
    let lists_there = lists.as_ref().map(|lists| lists.to(stream)).transpose()?;

    // Every GPU computes everything, so that all are as warm as when they share it.
    let block_mask = lists_there.as_ref();
    let call = Attention {
        scores: mask.into(),
        block_mask,
        ..Attention::new(q.view(), k.view(), v.view())
    };
    let output = call.forward(stream)?;
    let one = One { call, d_o: d_o.as_ref().map(Tensor::view), output };
    let expected = one.run(stream)?;
    let error_of_choice = match top_k {
        None => None,
        Some(_) => Some(document::error_of_choice(
            [q.view(), k.view(), v.view()],
            expected[0].view(),
            stream,
        )?),
    };

    let mut shard = Shard::new(seqlen, world, comm.rank())?;
    if top_k.is_some() {
        shard = shard.in_blocks(BLOCK, BLOCK)?;
    }
    let rows = |whole: &Tensor| rows_of(whole, &shard, stream);
    let [q, k, v] = [rows(&q)?, rows(&k)?, rows(&v)?];
    let d_o = d_o.as_ref().map(rows).transpose()?;
    let expected = expected.iter().map(rows).collect::<Result<Vec<_>>>()?;
    let schemes = Scheme::all(world, heads_kv);
    let masks = schemes.iter().map(|&scheme| -> Result<_> {
        let Some(lists) = &lists else { return Ok(None) };
        let start = Instant::now();
        let lists = shard.block_mask(lists)?;
        let mask = DistributedBlockMask::new(&lists, mask, shard, scheme, comm)?;
        Ok(Some((mask, start.elapsed().as_secs_f64() * 1e3)))
    });
    let masks = masks.collect::<Result<Vec<_>>>()?;
    let attention =
        Attention { scores: mask.into(), ..Attention::new(q.view(), k.view(), v.view()) };
    let divided = schemes.iter().zip(&masks).map(|(&scheme, mask)| -> Result<_> {
        let block_mask = mask.as_ref().map(|(mask, _)| mask);
        let call = DistributedAttention { attention, shard, scheme, block_mask, cu_seqlens: None };
        let prepared = call.prepare(comm)?;
        let output = call.forward_prepared(&prepared, comm, stream)?;
        comm.wait(stream)?;
        let (d_o, times, repeats) = (d_o.as_ref().map(Tensor::view), Vec::new(), Vec::new());
        let lists_ms = mask.as_ref().map(|(_, ms)| *ms);
        Ok(Divided { ranks, call, prepared, d_o, output, lists_ms, times, repeats })
    });
    let mut divided = divided.collect::<Result<Vec<_>>>()?;

    // One GPU and all schemes take turns of a few calls.
    let (mut one_times, mut one_repeats) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        for turn in 0..=divided.len() {
            let at = (round + turn) % (divided.len() + 1);
            let ((first, later), [times, repeats]) = match divided.get_mut(at) {
                Some(scheme) => {
                    (turn_of(|| scheme.seconds())?, [&mut scheme.times, &mut scheme.repeats])
                }
                None => {
                    let run = || ranks.once(stream, &mut || one.run(stream).map(drop));
                    (turn_of(run)?, [&mut one_times, &mut one_repeats])
                }
            };
            if round > 0 {
                times.push(first);
                repeats.extend(later);
            }
        }
    }
    let one_seconds = median(&mut one_times);
    let one_repeated = median(&mut one_repeats);
    let pairs = match &lists {
        None => mask.visited_pairs(seqlen, seqlen) as f64 * heads_q as f64,
        Some(lists) => lists.visited_pairs(mask)? as f64 * (heads_q / lists.heads().max(1)) as f64,
    };
    let products = if pass == Pass::Backward { 10.0 } else { 4.0 };
    let flops = products * pairs * HEAD_DIM as f64;
    for scheme in &mut divided {
        let repeated = median(&mut scheme.repeats);
        let seconds = median(&mut scheme.times);
        comm.gathered();
        let first = scheme.run()?;
        let gathers = comm.gathered();
        let again = scheme.run()?;
        comm.wait(stream)?;
        let (error, repeats) = compare(&first, &again, &expected, stream)?;
        drop((first, again));
        let repeats = if repeats { 0.0 } else { 1.0 };
        let agreed = ranks.most(&[error, repeats])?;
        comm.set(Mode::LeaveOut);
        let computing = ranks.median(rounds, stream, &mut || scheme.run().map(drop));
        comm.set(Mode::Exchange);
        let computing = computing?;
        let bars = timeline(ranks, scheme)?;
        let density = scheme.call.block_mask.map(DistributedBlockMask::density);
        let workload = Workload {
            batch: 1,
            seqlen,
            num_heads_q: heads_q,
            num_heads_kv: heads_kv,
            head_dim: HEAD_DIM,
            element_bytes: 2,
            mask,
            density,
            cu_seqlens: None,
            pass,
        };
        let machine = Machine {
            ranks: world,
            ranks_per_host: world,
            flops: flops / one_seconds,
            copies: links.copies,
            link: links.link,
            network: links.link,
            latency: links.latency,
        };
        let mut forecasts = workload.forecasts(&machine).into_iter();
        let forecast = match gathers {
            0 => forecasts.find(|forecast| forecast.scheme == scheme.call.scheme),
            _ => workload.gathered(&machine),
        };
        let row = Row {
            case: case.to_string(),
            gpus: world,
            gather: comm.gathers(),
            gathers,
            scheme: scheme.call.scheme.to_string(),
            one_ms: one_seconds * 1e3,
            ms: seconds * 1e3,
            one_repeated_ms: one_repeated * 1e3,
            repeated_ms: repeated * 1e3,
            tflops: flops / seconds * 1e-12,
            scaling: one_seconds / seconds / world as f64,
            sent_mb: scheme.prepared.sent_bytes(pass) as f64 * 1e-6,
            computing_ms: computing * 1e3,
            exposed_ms: (seconds - computing).max(0.0) * 1e3,
            forecast_ms: forecast.map(|forecast| forecast.total() * 1e3),
            forecast_exposed_ms: forecast.map(|forecast| forecast.exposed * 1e3),
            error: agreed[0],
            repeats: agreed[1] == 0.0,
            visited: density.map(|density| density.pairs),
            keys_come: density.map(|density| density.keys),
            lists_ms: scheme.lists_ms,
            error_of_choice,
        };
        if comm.rank() == 0 {
            report.row(row, &bars)?;
        }
    }
    Ok(())
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    let middle = times.len() / 2;
    match times.len() % 2 {
        0 => times[..middle].last().map_or(f64::NAN, |below| (below + times[middle]) / 2.0),
        _ => times[middle],
    }
}

/// A turn lasts so long, and four calls at least: the clocks of a GPU at its power limit follow
/// what it has done for some 50 ms before.
const TURN_SECONDS: f64 = 0.2;

/// The times of the calls of a turn: of the first one, which follows another scheme, and of the
/// later half of all.
fn turn_of(call: impl Fn() -> Result<f64>) -> Result<(f64, Vec<f64>)> {
    let mut times = vec![call()?];
    // All ranks have the same times, those of the slowest one.
    while times.len() < 4 || times.iter().sum::<f64>() < TURN_SECONDS {
        times.push(call()?);
    }
    let later = times.split_off(times.len() / 2);
    Ok((times[0], later))
}

/// Relative error of the results of this rank, and whether repeats have the same bits: on 16 parts
/// of 64 rows of each.
fn compare(
    first: &[Tensor],
    again: &[Tensor],
    expected: &[Tensor],
    stream: &Stream,
) -> Result<(f64, bool), Failure> {
    let (mut worst, mut repeats) = (0.0f64, true);
    for ((first, again), expected) in first.iter().zip(again).zip(expected) {
        let rows = first.shape()[1];
        let mut sums = [0.0; 2];
        for part in 0..16 {
            let start = (rows * part / 16).min(rows.saturating_sub(64));
            let part = |x: &Tensor| -> Result<Tensor> {
                Ok(x.view().slice(1, start..rows.min(start + 64))?.to_tensor(stream)?)
            };
            let [first, again, expected] = [part(first)?, part(again)?, part(expected)?];
            let [error, size] = squares(&first, &expected, stream)?;
            sums = [sums[0] + error, sums[1] + size];
            let [difference, _] = squares(&first, &again, stream)?;
            repeats &= difference == 0.0;
        }
        let error = (sums[0] / sums[1].max(f64::MIN_POSITIVE)).sqrt();
        worst = if error.is_nan() { f64::NAN } else { worst.max(error) };
    }
    Ok((worst, repeats))
}

/// Bars of every rank: beginning and end in milliseconds.
pub type Bars = Vec<Vec<(Kind, [f64; 2])>>;

/// What the ranks do in one call.
fn timeline(ranks: &Ranks, scheme: &Divided<'_>) -> Result<Bars> {
    /// More bars of a rank are not drawn.
    const MOST: usize = 128;
    let Ranks { comm, stream } = ranks;
    ranks.most(&[0.0])?;
    let base = Event::new(stream.device(), true)?;
    base.record(stream)?;
    comm.set(Mode::Watch);
    let result = scheme.run();
    comm.set(Mode::Exchange);
    drop(result?);
    comm.wait(stream)?;
    let mut numbers = vec![-1.0; 3 * MOST];
    for (place, (kind, [start, end])) in numbers.chunks_mut(3).zip(comm.bars(&base)?) {
        let kind = if kind == Kind::Attention { 0.0 } else { 1.0 };
        place.copy_from_slice(&[kind, start * 1e-3, end * 1e-3]);
    }
    let bars = |numbers: Vec<f64>| {
        let bars = numbers.chunks(3).filter(|bar| bar[0] >= 0.0).map(|bar| {
            let kind = if bar[0] == 0.0 { Kind::Attention } else { Kind::Exchange };
            (kind, [bar[1], bar[2]])
        });
        bars.collect()
    };
    Ok(ranks.all(&numbers)?.into_iter().map(bars).collect())
}
