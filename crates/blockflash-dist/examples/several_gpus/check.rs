//! Results of several GPUs against those of one.

use crate::Failure;
use crate::dense::normal;
use blockflash_dist::{Communicator, DistributedAttention, Result, Scheme, Shard};
use blockflash_ops::{Align, Attention, CuSeqlens, Mask, Stream, Tensor};
use half::bf16;
use std::time::Instant;

/// The rows of a rank, of a tensor of the whole sequence, packed or with a batch.
pub fn rows_of(whole: &Tensor, shard: &Shard, stream: &Stream) -> Result<Tensor> {
    let mut shape = whole.shape().to_vec();
    let axis = shape.len() - 3;
    shape[axis] = shard.rows();
    let mut rows = Tensor::empty(stream, whole.dtype(), &shape)?;
    let places = [0..shard.first(), shard.first()..shard.rows()];
    for (range, place) in shard.ranges().into_iter().zip(places) {
        let source = whole.view().slice(axis, range)?;
        rows.view_mut().slice(axis, place)?.copy_from(&source, stream)?;
    }
    Ok(rows)
}

/// What is compared.
#[derive(Debug)]
struct Case<'a> {
    seqlen: usize,
    heads: [usize; 2],
    batch: usize,
    scheme: Scheme,
    mask: Mask,
    /// Where the sequences of a packed batch begin and end.
    cu_seqlens: Option<&'a [i32]>,
}

/// Every scheme and mask, at sizes that do not divide, against this GPU alone, and repeated.
pub fn all(comm: &dyn Communicator, stream: &Stream) -> Result<(), Failure> {
    let world = comm.world();
    let packed: [&[i32]; 2] = [&[0, 700, 1100, 1100, 1900, 2051], &[0, 5, 64, 1000, 1003, 2051]];
    for (seqlen, heads, batch, cu_seqlens) in [
        (1000, [4, 4], 1, None),
        (2051, [8, 2], 1, None),
        (2051, [8, 2], 1, Some(packed[0])),
        (2051, [4, 4], 1, Some(packed[1])),
        (777, [16, 8], 2, None),
        (3, [4, 2], 1, None),
    ] {
        for scheme in Scheme::all(world, heads[1]) {
            let (left, align) = (Some(300), Align::TopLeft);
            let window = Mask::Window { left, right: Some(0), align };
            for mask in [Mask::Full, Mask::causal(), window] {
                let worst =
                    check(comm, stream, &Case { seqlen, heads, batch, scheme, mask, cu_seqlens })?;
                if comm.rank() == 0 {
                    let packed = cu_seqlens.map_or(String::new(), |of| format!(" packed {of:?}"));
                    println!(
                        "check rows {seqlen} heads {heads:?} batch {batch}{packed} {scheme} \
                         {mask:?}: error over that of one GPU {worst:.2?}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// Root of the mean square of differences between the ranks and one GPU, relative to the values,
/// in units of the roundoff of bf16: of o, dq, dk and dv.
fn check(comm: &dyn Communicator, stream: &Stream, case: &Case<'_>) -> Result<[f64; 4], Failure> {
    let Case { seqlen, heads: [heads_q, heads_kv], batch, scheme, mask, cu_seqlens } = *case;
    let tensor = |seed, heads| {
        let shape = [batch, seqlen, heads, 128];
        Tensor::from_slice(stream, &normal(seed, shape.iter().product()), &shape)
    };
    let [q, d_o] = [tensor(1, heads_q)?, tensor(2, heads_q)?];
    let [k, v] = [tensor(3, heads_kv)?, tensor(4, heads_kv)?];
    let offsets = cu_seqlens.map(|of| Tensor::from_slice(stream, of, &[of.len()])).transpose()?;
    let [on_q, on_k, on_v, on_o] = [&q, &k, &v, &d_o].map(|x| match cu_seqlens {
        None => Ok(x.view()),
        Some(_) => x.view().flatten(0..2),
    });
    let alone = Attention {
        scores: mask.into(),
        cu_seqlens: offsets.as_ref().map(|offsets| CuSeqlens {
            q: offsets.view(),
            kv: offsets.view(),
            max_seqlen_q: seqlen,
            max_seqlen_kv: seqlen,
        }),
        ..Attention::new(on_q?, on_k?, on_v?)
    };
    let output = alone.forward(stream)?;
    let gradients = alone.backward(&output, on_o?, stream)?;
    let shard = Shard::new(seqlen, comm.world(), comm.rank())?;
    let rows = |whole: &Tensor| rows_of(whole, &shard, stream);
    let [q, k, v, d_o] = [rows(&q)?, rows(&k)?, rows(&v)?, rows(&d_o)?];
    let attention =
        Attention { scores: mask.into(), ..Attention::new(q.view(), k.view(), v.view()) };
    let call = DistributedAttention { attention, shard, scheme, block_mask: None, cu_seqlens };
    let run = || -> Result<Vec<Tensor>> {
        let output = call.forward(comm, stream)?;
        let gradients = call.backward(&output, d_o.view(), comm, stream)?;
        comm.wait(stream)?;
        Ok(vec![output.o, gradients.dq, gradients.dk, gradients.dv])
    };
    let (found, again) = (run()?, run()?);
    let expected =
        [rows(&output.o)?, rows(&gradients.dq)?, rows(&gradients.dk)?, rows(&gradients.dv)?];
    let mut errors = [0.0; 4];
    for (at, ((found, again), expected)) in found.iter().zip(&again).zip(&expected).enumerate() {
        let found = found.to_vec::<bf16>(stream)?;
        if found != again.to_vec::<bf16>(stream)? {
            return Err(format!("a repeat differs: result {at}, {case:?}").into());
        }
        let expected = expected.to_vec::<bf16>(stream)?;
        let [mut error, mut size] = [0.0, 1e-30];
        for (found, expected) in found.iter().zip(&expected) {
            error += (found.to_f64() - expected.to_f64()).powi(2);
            size += expected.to_f64().powi(2);
        }
        errors[at] = f64::sqrt(error / size) * 256.0;
        if errors[at] > 2.0 || errors[at].is_nan() {
            return Err(format!("result {at} is off by {errors:?}: {case:?}").into());
        }
    }
    Ok(errors)
}

/// The last rank ends its process while the others exchange keys with it.
pub fn lost(comm: &dyn Communicator, stream: &Stream) -> Result<(), Failure> {
    let (world, seqlen) = (comm.world(), 4096);
    let shard = Shard::new(seqlen, world, comm.rank())?;
    let shape = [1, shard.rows(), 4, 128];
    let x = Tensor::from_slice(stream, &normal(1, shard.rows() * 4 * 128), &shape)?;
    let attention = Attention::new(x.view(), x.view(), x.view());
    let scheme = Scheme { heads: 1, keys: world };
    let call =
        DistributedAttention { attention, shard, scheme, block_mask: None, cu_seqlens: None };
    let prepared = call.prepare(comm)?;
    if comm.rank() == world - 1 {
        std::process::exit(0);
    }
    let start = Instant::now();
    let result = call.forward_prepared(&prepared, comm, stream).and_then(|_| comm.wait(stream));
    match result {
        Ok(()) => Err("the loss was not noticed".into()),
        Err(error) => {
            println!("rank {} after {:.1?}: {error}", comm.rank(), start.elapsed());
            Ok(())
        }
    }
}
