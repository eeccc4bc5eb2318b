use super::*;
use crate::{DistributedAttention, Memory, Scheme, Shard};
use blockflash_ops::{Attention, Device, Mask};
use std::time::Duration;

#[test]
fn turns_have_the_same_heads() {
    assert_eq!([1, 2, 3, 4, 6, 7, 8].map(|heads| count(heads, 100)), [1, 2, 3, 4, 3, 1, 4]);
    assert_eq!(count(8, 0), 1);
}

const SEQLEN: usize = 37;
/// Of q, of k, and elements of a row.
const SIZES: [usize; 3] = [16, 8, 8];

/// Numbers that depend on the place in the whole sequence alone.
fn tensor(rows: &[usize], heads: usize, seed: usize, stream: &Stream) -> Tensor {
    let at =
        |row: usize, i: usize| ((row * 977 + i * 131 + seed * 7919) % 251) as f32 / 125.0 - 1.0;
    let width = heads * SIZES[2];
    let values = rows.iter().flat_map(|&row| (0..width).map(move |i| at(row, i)));
    let shape = [1, rows.len(), heads, SIZES[2]];
    Tensor::from_slice(stream, &values.collect::<Vec<f32>>(), &shape).unwrap()
}

/// o, lse, dq, dk, dv and the gradient of the sink, row by row.
fn results(comm: &Memory, scheme: Scheme) -> [Vec<f32>; 6] {
    let stream = Device::cpu().stream().unwrap();
    let shard = Shard::new(SEQLEN, comm.world(), comm.rank()).unwrap();
    let rows: Vec<usize> = shard.ranges().into_iter().flatten().collect();
    let [heads_q, heads_kv, _] = SIZES;
    let x = |heads, seed| tensor(&rows, heads, seed, &stream);
    let (q, k, v, d_o) = (x(heads_q, 0), x(heads_kv, 1), x(heads_kv, 2), x(heads_q, 3));
    let sink: Vec<f32> = (0..heads_q).map(|head| head as f32 * 0.125 - 1.0).collect();
    let sink = Tensor::from_slice(&stream, &sink, &[heads_q]).unwrap();
    let sink = Some(sink.view());
    let attention = Attention::new(q.view(), k.view(), v.view());
    let attention = Attention { mask: Mask::causal(), sink, ..attention };
    let call =
        DistributedAttention { attention, shard, scheme, block_mask: None, cu_seqlens: None };
    let output = call.forward(comm, &stream).unwrap();
    let gradients = call.backward(&output, d_o.view(), comm, &stream).unwrap();
    comm.wait(&stream).unwrap();
    let d_sink = gradients.d_sink.unwrap();
    [&output.o, &output.lse, &gradients.dq, &gradients.dk, &gradients.dv, &d_sink]
        .map(|tensor| tensor.to_vec::<f32>(&stream).unwrap())
}

fn all_ranks(scheme: Scheme) -> Vec<[Vec<f32>; 6]> {
    let world = scheme.heads * scheme.keys;
    let group = Memory::group(&Device::cpu(), world, Duration::from_secs(20)).unwrap();
    std::thread::scope(|threads| {
        let run = |comm: Memory| threads.spawn(move || results(&comm, scheme));
        let ranks: Vec<_> = group.into_iter().map(run).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Heads in turns have the bits of one device, whose rows are those of the ranks.
#[test]
fn turns_change_no_bit() {
    let alone = all_ranks(Scheme { heads: 1, keys: 1 }).remove(0);
    for heads in [2, 4] {
        let ranks = all_ranks(Scheme { heads, keys: 1 });
        for (rank, results) in ranks.iter().enumerate() {
            let shard = Shard::new(SEQLEN, heads, rank).unwrap();
            let rows: Vec<usize> = shard.ranges().into_iter().flatten().collect();
            for (at, width) in [(0, SIZES[0]), (2, SIZES[0]), (3, SIZES[1]), (4, SIZES[1])] {
                let width = width * SIZES[2];
                let row = |&row: &usize| alone[at][row * width..(row + 1) * width].to_vec();
                let expected: Vec<f32> = rows.iter().flat_map(row).collect();
                assert_eq!(results[at], expected, "{at} of rank {rank} of {heads}");
            }
            let log = |head: usize| rows.iter().map(move |row| head * SEQLEN + row);
            let logs = (0..SIZES[0]).flat_map(log).map(|at| alone[1][at]);
            assert_eq!(results[1], logs.collect::<Vec<f32>>(), "rank {rank} of {heads}");
            assert_eq!(results[5], alone[5], "rank {rank} of {heads}");
        }
    }
}
