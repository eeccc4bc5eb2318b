//! Attention over all GPUs of this machine, a process for each, by NCCL: compares the results with
//! those of one GPU, and measures.
//!
//! ```sh
//! cargo run --release -p blockflash-dist --example ring_attention -- 2 check
//! cargo run --release -p blockflash-dist --example ring_attention -- 2 131072x32x8
//! ```
//!
//! The first argument is the number of GPUs. Each other one is `check`, or a case
//! `<rows>x<heads of q>x<heads of k>` of which causal attention in bf16 with head_dim 128 is
//! measured. NCCL's library must be found (`LD_LIBRARY_PATH`).

use blockflash_dist::{
    Communicator, DistributedAttention, Nccl, NcclCommunicator, NcclId, Result, Scheme, Shard,
};
use blockflash_ops::{
    Attention, AttentionOutput, DType, Device, Event, Mask, Stream, Tensor, View,
};
use half::bf16;
use std::process::{Command, ExitCode};
use std::time::Duration;

type Failure = Box<dyn std::error::Error>;

const RANK: &str = "BLOCKFLASH_RANK";
const ID: &str = "BLOCKFLASH_NCCL_ID";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match std::env::var(RANK) {
        Ok(rank) => work(&rank, &arguments),
        Err(_) => start(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Starts a process for each GPU.
fn start(arguments: &[String]) -> Result<(), Failure> {
    let world: usize = arguments.first().ok_or("how many GPUs?")?.parse()?;
    let id: Vec<String> = NcclId::new()?.to_bytes().iter().map(|b| format!("{b:02x}")).collect();
    let program = std::env::current_exe()?;
    let ranks = (0..world).map(|rank| {
        let mut command = Command::new(&program);
        command.args(arguments).env(RANK, rank.to_string()).env(ID, id.concat()).spawn()
    });
    let ranks = ranks.collect::<Result<Vec<_>, _>>()?;
    let ends = ranks.into_iter().map(|mut rank| rank.wait());
    let failed = ends.filter(|end| !end.as_ref().is_ok_and(|status| status.success())).count();
    if failed > 0 { Err(format!("{failed} of {world} ranks failed").into()) } else { Ok(()) }
}

/// What one process does.
fn work(rank: &str, arguments: &[String]) -> Result<(), Failure> {
    let (rank, world) = (rank.parse()?, arguments[0].parse()?);
    let text = std::env::var(ID)?;
    let mut id = [0; 128];
    for (at, byte) in id.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2).ok_or("a short id")?, 16)?;
    }
    let device = Device::cuda(rank)?;
    let id = NcclId::from_bytes(id);
    let ranks = NcclCommunicator::new(&device, &id, rank, world, Duration::from_secs(20))?;
    let comm = Nccl::new(ranks)?;
    let stream = device.stream()?;
    for argument in &arguments[1..] {
        match argument.as_str() {
            "check" => check_all(&comm, &stream)?,
            case => {
                let sizes: Vec<usize> =
                    case.split('x').map(str::parse).collect::<Result<_, _>>()?;
                let &[rows, heads_q, heads_kv] = &sizes[..] else {
                    return Err(format!("{case} is no case").into());
                };
                measure(&comm, &stream, rows, [heads_q, heads_kv])?;
            }
        }
    }
    Ok(())
}

/// Numbers of N(0,1).
fn normal(seed: u64, count: usize) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let mut number = || {
        let radius = (-2.0 * uniform().ln()).sqrt();
        bf16::from_f64(radius * (std::f64::consts::TAU * uniform()).cos())
    };
    (0..count).map(|_| number()).collect()
}

/// The rows of a rank, of a tensor of the whole sequence.
fn rows_of(whole: &Tensor, shard: &Shard, stream: &Stream) -> Result<Tensor> {
    let mut shape = whole.shape().to_vec();
    shape[1] = shard.rows();
    let mut rows = Tensor::empty(stream, whole.dtype(), &shape)?;
    let places = [0..shard.first(), shard.first()..shard.rows()];
    for (range, place) in shard.ranges().into_iter().zip(places) {
        let source = whole.view().slice(1, range)?;
        rows.view_mut().slice(1, place)?.copy_from(&source, stream)?;
    }
    Ok(rows)
}

/// Every scheme and mask, at sizes that do not divide, against this GPU alone, and repeated.
fn check_all(comm: &dyn Communicator, stream: &Stream) -> Result<(), Failure> {
    let world = comm.world();
    for (seqlen, heads, batch) in
        [(1000, [4, 4], 1), (4099, [8, 2], 1), (777, [16, 8], 2), (3, [4, 2], 1)]
    {
        for scheme in Scheme::all(world, heads[1]) {
            for mask in [Mask::Full, Mask::causal()] {
                let worst = check(comm, stream, seqlen, heads, batch, scheme, mask)?;
                if comm.rank() == 0 {
                    println!(
                        "check rows {seqlen} heads {heads:?} batch {batch} {scheme} {mask:?}: \
                         error over that of one GPU {worst:.2?}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// Root of the mean square of differences between the ranks and one GPU, relative to the values,
/// in units of the roundoff of bf16: of o, dq, dk and dv. Where keys are divided there are no
/// gradients.
fn check(
    comm: &dyn Communicator,
    stream: &Stream,
    seqlen: usize,
    [heads_q, heads_kv]: [usize; 2],
    batch: usize,
    scheme: Scheme,
    mask: Mask,
) -> Result<[f64; 4], Failure> {
    let tensor = |seed, heads| {
        let shape = [batch, seqlen, heads, 128];
        Tensor::from_slice(stream, &normal(seed, shape.iter().product()), &shape)
    };
    let [q, d_o] = [tensor(1, heads_q)?, tensor(2, heads_q)?];
    let [k, v] = [tensor(3, heads_kv)?, tensor(4, heads_kv)?];
    let alone = Attention { mask, ..Attention::new(q.view(), k.view(), v.view()) };
    let output = alone.forward(stream)?;
    let gradients = alone.backward(&output, d_o.view(), stream)?;
    let shard = Shard::new(seqlen, comm.world(), comm.rank())?;
    let rows = |whole: &Tensor| rows_of(whole, &shard, stream);
    let [q, k, v, d_o] = [rows(&q)?, rows(&k)?, rows(&v)?, rows(&d_o)?];
    let attention = Attention { mask, ..Attention::new(q.view(), k.view(), v.view()) };
    let call = DistributedAttention { attention, seqlen, scheme };
    let run = || -> Result<Vec<Tensor>> {
        let output = call.forward(comm, stream)?;
        let mut results = vec![];
        if scheme.keys == 1 {
            let gradients = call.backward(&output, d_o.view(), comm, stream)?;
            results.extend([gradients.dq, gradients.dk, gradients.dv]);
        }
        comm.wait(stream)?;
        results.insert(0, output.o);
        Ok(results)
    };
    let (found, again) = (run()?, run()?);
    let expected =
        [rows(&output.o)?, rows(&gradients.dq)?, rows(&gradients.dk)?, rows(&gradients.dv)?];
    let mut errors = [0.0; 4];
    for (at, ((found, again), expected)) in found.iter().zip(&again).zip(&expected).enumerate() {
        let found = found.to_vec::<bf16>(stream)?;
        if found != again.to_vec::<bf16>(stream)? {
            return Err(format!("a repeat differs: result {at}, {scheme}, {mask:?}").into());
        }
        let expected = expected.to_vec::<bf16>(stream)?;
        let [mut error, mut size] = [0.0, 1e-30];
        for (found, expected) in found.iter().zip(&expected) {
            error += (found.to_f64() - expected.to_f64()).powi(2);
            size += expected.to_f64().powi(2);
        }
        errors[at] = f64::sqrt(error / size) * 256.0;
        if errors[at] > 2.0 || errors[at].is_nan() {
            return Err(format!("result {at} is off by {errors:?}: {scheme}, {mask:?}").into());
        }
    }
    Ok(errors)
}

/// Times of one GPU and of all of them.
fn measure(
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
        let call = DistributedAttention { attention, seqlen, scheme };
        let prepared = call.prepare(comm)?;
        let mut output: Option<AttentionOutput> = None;
        let forward = &mut || {
            output = Some(call.forward_prepared(&prepared, comm, stream)?);
            Ok(())
        };
        let all = slowest(comm, time(comm, stream, 5, forward)?)?;
        let output = output.ok_or("nothing was computed")?;
        let say = |pass, one: f64, all: f64, flops: f64| {
            let (scaling, rate) = (one / all / world as f64, flops / all * 1e-12);
            println!(
                "{{\"pass\":\"{pass}\",\"rows\":{seqlen},\"heads\":{heads_q},\"heads_kv\":{heads_kv},\
                 \"gpus\":{world},\"scheme\":\"{scheme}\",\"one_ms\":{:.3},\"ms\":{:.3},\
                 \"tflops\":{rate:.0},\"scaling\":{scaling:.3}}}",
                one * 1e3,
                all * 1e3
            );
        };
        if comm.rank() == 0 {
            say("forward", one, all, flops);
        }
        if scheme.keys == 1 {
            let backward = &mut || {
                let call = call.backward_prepared(&prepared, &output, d_o.view(), comm, stream);
                call.map(drop)
            };
            let all = slowest(comm, time(comm, stream, 3, backward)?)?;
            if comm.rank() == 0 {
                say("backward", one_backward, all, 2.5 * flops);
            }
        }
    }
    Ok(())
}

/// q, k, v and d_o of so many rows. Their rows repeat after 4099, which takes less time to make.
fn inputs(stream: &Stream, rows: usize, heads: [usize; 2]) -> Result<[Tensor; 4]> {
    let tensor = |seed, heads| -> Result<Tensor> {
        let period = rows.min(4099);
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
