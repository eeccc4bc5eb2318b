//! Times of several GPUs and of one.

use crate::{Failure, normal};
use blockflash_dist::{Communicator, DistributedAttention, Pass, Result, Scheme, Shard};
use blockflash_ops::{Attention, AttentionOutput, DType, Event, Mask, Stream, Tensor, View};

/// Times of one GPU and of all of them.
pub(crate) fn measure(
    comm: &dyn Communicator,
    stream: &Stream,
    seqlen: usize,
    [heads_q, heads_kv]: [usize; 2],
) -> Result<(), Failure> {
    let world = comm.world();
    let mask = Mask::causal();
    let [one, one_backward] = {
        // Every GPU computes it, so that all are as warm as in the cases below.
        let [q, k, v, d_o] = inputs(stream, seqlen, [heads_q, heads_kv])?;
        let call = Attention { mask, ..Attention::new(q.view(), k.view(), v.view()) };
        let mut output = None;
        let forward = &mut || {
            output = Some(call.forward(stream)?);
            Ok(())
        };
        let one = slowest(comm, time(comm, stream, 5, forward)?)?;
        let output = output.ok_or("nothing was computed")?;
        let backward = &mut || Ok(call.backward(&output, d_o.view(), stream).map(drop)?);
        [one, slowest(comm, time(comm, stream, 3, backward)?)?]
    };
    let flops = 2.0 * (seqlen as f64).powi(2) * (heads_q * 128) as f64;
    let shard = Shard::new(seqlen, world, comm.rank())?;
    let [q, k, v, d_o] = inputs(stream, shard.rows(), [heads_q, heads_kv])?;
    let attention = Attention { mask, ..Attention::new(q.view(), k.view(), v.view()) };
    for scheme in Scheme::all(world, heads_kv) {
        let call = DistributedAttention { attention, shard, scheme, block_mask: None };
        let prepared = call.prepare(comm)?;
        let mut output: Option<AttentionOutput> = None;
        let forward = &mut || {
            output = Some(call.forward_prepared(&prepared, comm, stream)?);
            Ok(())
        };
        let all = slowest(comm, time(comm, stream, 5, forward)?)?;
        let output = output.ok_or("nothing was computed")?;
        let say = |pass: Pass, one: f64, all: f64, flops: f64| {
            let (scaling, rate) = (one / all / world as f64, flops / all * 1e-12);
            let sent = prepared.sent_bytes(pass) as f64 * 1e-6;
            let pass = format!("{pass:?}").to_lowercase();
            println!(
                "{{\"pass\":\"{pass}\",\"rows\":{seqlen},\"heads\":{heads_q},\
                 \"heads_kv\":{heads_kv},\
                 \"gpus\":{world},\"scheme\":\"{scheme}\",\"one_ms\":{:.3},\"ms\":{:.3},\
                 \"tflops\":{rate:.0},\"scaling\":{scaling:.3},\"sent_mb\":{sent:.1}}}",
                one * 1e3,
                all * 1e3
            );
        };
        if comm.rank() == 0 {
            say(Pass::Forward, one, all, flops);
        }
        if scheme.keys == 1 {
            let backward = &mut || {
                let call = call.backward_prepared(&prepared, &output, d_o.view(), comm, stream);
                call.map(drop)
            };
            let all = slowest(comm, time(comm, stream, 3, backward)?)?;
            if comm.rank() == 0 {
                say(Pass::Backward, one_backward, all, 2.5 * flops);
            }
        }
    }
    Ok(())
}

/// q, k, v and d_o of so many rows. Their rows repeat after 509, which takes less time to make.
fn inputs(stream: &Stream, rows: usize, heads: [usize; 2]) -> Result<[Tensor; 4]> {
    let tensor = |seed, heads| -> Result<Tensor> {
        let period = rows.min(509);
        let some = normal(seed, period * heads * 128);
        let some = Tensor::from_slice(stream, &some, &[1, period, heads, 128])?;
        let mut all = Tensor::empty(stream, DType::BF16, &[1, rows, heads, 128])?;
        for start in (0..rows).step_by(period.max(1)) {
            let range = start..rows.min(start + period);
            let source: View<'_> = some.view().slice(1, 0..range.len())?;
            all.view_mut().slice(1, range)?.copy_from(&source, stream)?;
        }
        Ok(all)
    };
    let [heads_q, heads_kv] = heads;
    Ok([tensor(1, heads_q)?, tensor(3, heads_kv)?, tensor(4, heads_kv)?, tensor(2, heads_q)?])
}

/// Median of the seconds of a call on this rank.
fn time(
    comm: &dyn Communicator,
    stream: &Stream,
    repeats: usize,
    call: &mut dyn FnMut() -> Result<()>,
) -> Result<f64> {
    let mut times = Vec::new();
    for repeat in 0..=repeats {
        slowest(comm, 0.0)?; // all ranks start together
        let [start, end] = [Event::new(stream.device(), true)?, Event::new(stream.device(), true)?];
        start.record(stream)?;
        call()?;
        end.record(stream)?;
        comm.wait(stream)?;
        if repeat > 0 {
            times.push(start.elapsed_us(&end)? * 1e-6);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// The largest number of all ranks.
fn slowest(comm: &dyn Communicator, seconds: f64) -> Result<f64> {
    let own = Tensor::from_slice(comm.stream(), &[seconds as f32], &[1])?;
    let others: Vec<usize> = (0..comm.world()).filter(|&rank| rank != comm.rank()).collect();
    let zero = |_| Tensor::zeros(comm.stream(), DType::F32, &[1]);
    let mut theirs = others.iter().map(zero).collect::<Result<Vec<_>, _>>()?;
    let sends: Vec<_> = others.iter().map(|&rank| (rank, own.view())).collect();
    let receives = others.iter().zip(&mut theirs);
    let mut receives: Vec<_> = receives.map(|(&rank, tensor)| (rank, tensor.view_mut())).collect();
    comm.exchange(&sends, &mut receives)?;
    comm.wait(comm.stream())?;
    let mut most = seconds;
    for tensor in &theirs {
        most = most.max(tensor.to_vec::<f32>(comm.stream())?[0].into());
    }
    Ok(most)
}
