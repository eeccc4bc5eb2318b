//! When keys are gathered: all ranks, and where most of what is gathered is of use.

use blockflash_dist::{Communicator, DistributedAttention, Memory, Pass, Result, Scheme, Shard};
use blockflash_ops::{Align, Attention, DType, Device, Mask, Tensor};
use std::time::Duration;

const SEQLEN: usize = 80;

/// Bytes that each of four ranks sends in a forward pass, which they make.
fn sent(scheme: Scheme, mask: Mask, gathers: impl Fn(usize) -> bool + Sync) -> Vec<usize> {
    let run = |comm: &Memory| -> Result<usize> {
        let stream = Device::cpu().stream()?;
        let shard = Shard::new(SEQLEN, 4, comm.rank())?;
        let x = Tensor::zeros(&stream, DType::F32, &[1, shard.rows(), 4, 8])?;
        let attention =
            Attention { scores: mask.into(), ..Attention::new(x.view(), x.view(), x.view()) };
        let call =
            DistributedAttention { attention, shard, scheme, block_mask: None, cu_seqlens: None };
        let prepared = call.prepare(comm)?;
        call.forward_prepared(&prepared, comm, &stream)?;
        Ok(prepared.sent_bytes(Pass::Forward))
    };
    let group = Memory::group(&Device::cpu(), 4, Duration::from_secs(20)).unwrap();
    std::thread::scope(|threads| {
        let start = |comm: Memory| {
            let comm = if gathers(comm.rank()) { comm.gathering() } else { comm };
            let run = &run;
            threads.spawn(move || run(&comm).unwrap())
        };
        let ranks: Vec<_> = group.into_iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Of a row of keys and values.
const ROW: usize = 2 * 4 * 8 * 4;

#[test]
fn keys_are_gathered_where_most_of_them_travel() {
    let keys = Scheme { heads: 1, keys: 4 };
    let window = |left| Mask::Window { left: Some(left), right: Some(0), align: Align::TopLeft };
    // All 20 rows of a rank go to three others; by steps, only half of them to those behind it.
    assert_eq!(sent(keys, Mask::causal(), |_| true), [60 * ROW; 4]);
    assert_eq!(sent(keys, Mask::causal(), |_| false), [30, 40, 50, 60].map(|rows| rows * ROW));
    assert_eq!(sent(keys, Mask::Full, |_| true), [60 * ROW; 4]);
    // The last four rows of each chunk of ten go to the next one.
    assert_eq!(sent(keys, window(4), |_| true), [4, 8, 8, 4].map(|rows| rows * ROW));
    // With heads over ranks, too, only half of the ranks have the same heads.
    let both = Scheme { heads: 2, keys: 2 };
    assert_eq!(sent(both, Mask::Full, |_| true), sent(both, Mask::Full, |_| false));
}

#[test]
fn all_ranks_gather_or_none() {
    let keys = Scheme { heads: 1, keys: 4 };
    let steps = sent(keys, Mask::causal(), |_| false);
    assert_eq!(sent(keys, Mask::causal(), |rank| rank != 2), steps);
}
