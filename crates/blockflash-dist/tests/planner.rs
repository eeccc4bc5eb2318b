//! Shards, schemes and forecasts as plain data.

use blockflash_dist::{
    Communicator, Density, DistributedAttention, Error, Forecast, Machine, Memory, Pass, Result,
    Scheme, Shard, Workload,
};
use blockflash_ops::{Align, Attention, DType, Device, Mask, Tensor};
use std::time::Duration;

#[test]
fn shards_hold_every_row_once() {
    for world in 1..=9 {
        for seqlen in [0, 1, 2, 7, 16, 17, 100, 101] {
            let mut seen = vec![0; seqlen];
            let shards = (0..world).map(|rank| Shard::new(seqlen, world, rank).unwrap());
            for shard in shards {
                let [first, second] = shard.ranges();
                assert!(first.end <= second.start);
                assert_eq!(
                    (first.len(), first.len() + second.len()),
                    (shard.first(), shard.rows())
                );
                first.chain(second).for_each(|row| seen[row] += 1);
            }
            assert_eq!(seen, vec![1; seqlen], "{world} {seqlen}");
        }
    }
    // The work of a causal mask is the same for all.
    let work = |rank| -> usize {
        let shard = Shard::new(800, 4, rank).unwrap();
        shard.ranges().into_iter().flatten().map(|row| row + 1).sum()
    };
    assert!((0..4).all(|rank| work(rank) == work(0)));
    for (seqlen, world, rank) in [(5, 0, 0), (5, 2, 2), (usize::MAX, 2, 0), (5, usize::MAX, 0)] {
        assert!(matches!(Shard::new(seqlen, world, rank), Err(Error::Size { .. })));
    }
}

#[test]
fn schemes_divide_heads_and_ranks() {
    let schemes = |world, heads| -> Vec<(usize, usize)> {
        Scheme::all(world, heads).into_iter().map(|s| (s.heads, s.keys)).collect()
    };
    assert_eq!(schemes(8, 8), [(8, 1), (4, 2), (2, 4), (1, 8)]);
    assert_eq!(schemes(6, 4), [(2, 3), (1, 6)]);
    assert_eq!(schemes(5, 8), [(1, 5)]);
    assert_eq!(schemes(1, 3), [(1, 1)]);
    let text = |heads, keys| Scheme { heads, keys }.to_string();
    assert_eq!([text(4, 1), text(1, 4)], ["heads over 4", "keys over 4"]);
    assert_eq!(text(2, 4), "heads over 2, keys over 4");
}

const WORKLOAD: Workload<'static> = Workload {
    batch: 1,
    seqlen: 131_072,
    num_heads_q: 32,
    num_heads_kv: 32,
    head_dim: 128,
    element_bytes: 2,
    mask: Mask::Causal { align: Align::TopLeft },
    density: None,
    cu_seqlens: None,
    pass: Pass::Forward,
};

const MACHINE: Machine = Machine {
    ranks: 4,
    ranks_per_host: 8,
    flops: 550e12,
    copies: 1.9e12,
    link: 260e9,
    network: 45e9,
    latency: 50e-6,
};

fn close(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-3, "{found} {expected}");
}

#[test]
fn a_forecast_is_the_arithmetic_of_its_bytes() {
    let of = |workload: Workload, machine: Machine, heads| -> Forecast {
        let all = workload.forecasts(&machine);
        *all.iter().find(|forecast| forecast.scheme.heads == heads).unwrap()
    };
    // 2 · S² · H · D FLOPs over four ranks; S / 4 · H · D · 2 bytes of each tensor.
    let ideal = 2.0 * 131_072f64.powi(2) * 4096.0 / 550e12 / 4.0;
    let tensor = 131_072.0 / 4.0 * 4096.0 * 2.0;
    let ring = of(WORKLOAD, MACHINE, 1);
    close(ring.ideal, ideal);
    close(ring.exchange, 3.0 * (2.0 * tensor / 260e9 + 50e-6));
    // Each step computes longer than it exchanges, on the SMs that this leaves.
    close(ring.exposed, 0.24 * ring.exchange);
    let heads = of(WORKLOAD, MACHINE, 4);
    close(heads.exchange, 4.0 * tensor * 0.75 / 260e9 + 2.0 * 50e-6);
    assert_eq!(heads.exchange, heads.exposed);
    // Keys of eight heads are a quarter of the bytes; short sequences hide less.
    let grouped = Workload { num_heads_kv: 8, ..WORKLOAD };
    close(of(grouped, MACHINE, 1).exchange, 3.0 * (0.5 * tensor / 260e9 + 50e-6));
    let short = Workload { seqlen: 4096, ..WORKLOAD };
    assert!(of(short, MACHINE, 1).exposed > 0.0);
    // Over the network every step takes as long as the slower link.
    let hosts = Machine { ranks: 16, ..MACHINE };
    close(of(WORKLOAD, hosts, 1).exchange, 15.0 * (2.0 * tensor / 4.0 / 45e9 + 50e-6));
    // The backward pass has 2.5 times the work, and the gradients of keys go back.
    let backward = of(Workload { pass: Pass::Backward, ..WORKLOAD }, MACHINE, 1);
    close(backward.ideal, 2.5 * ideal);
    close(backward.exchange, 6.0 * (2.0 * tensor / 260e9 + 50e-6));
    assert!(backward.exposed > 0.0, "that of the last step");
}

/// Two parts of half the heads, which own keys and the first part hide, at no cost of SMs.
#[test]
fn gathered_keys_are_exposed_where_attention_is_short() {
    let own = |f: &Forecast, rows: f64| f.ideal * (0.25 * rows + 1.0) / (rows + 1.0);
    let tensor = 131_072.0 / 4.0 * 4096.0 * 2.0;
    let long = WORKLOAD.gathered(&MACHINE).unwrap();
    assert_eq!(long.scheme, Scheme { heads: 1, keys: 4 });
    close(long.sent_bytes, 3.0 * 2.0 * tensor);
    close(long.exchange, 3.0 * 2.0 * tensor / 260e9 + 2.0 * 50e-6);
    assert_eq!(long.exposed, 0.0);
    let steps = WORKLOAD.forecasts(&MACHINE);
    let steps = steps.iter().find(|f| f.scheme == long.scheme).unwrap();
    // Keys are copied once more than by steps.
    close(long.compute - steps.compute, 2.0 * tensor / 1.9e12);
    assert!(long.total() < steps.total());

    // The first part is longer than attention of the own keys, the second one is hidden.
    let middle = Workload { seqlen: 24_576, ..WORKLOAD }.gathered(&MACHINE).unwrap();
    assert!(middle.exposed > 0.0);
    close(middle.exposed, 0.5 * middle.exchange - own(&middle, 24_576.0));
    // Both parts are longer: what is left is attention of the last one.
    let short = Workload { seqlen: 4096, ..WORKLOAD }.gathered(&MACHINE).unwrap();
    let others = short.ideal - own(&short, 4096.0);
    close(short.exposed, short.exchange + 0.5 * others - own(&short, 4096.0) - others);
    // Of one head there is one part.
    let one = Workload { seqlen: 4096, num_heads_kv: 1, ..WORKLOAD }.gathered(&MACHINE).unwrap();
    close(one.exchange, 3.0 * 2.0 * tensor / 1024.0 / 260e9 + 50e-6);
    close(one.exposed, one.exchange - own(&one, 4096.0));
}

#[test]
fn keys_are_gathered_where_calls_gather_them() {
    let gathers = |workload: Workload<'_>| workload.gathered(&MACHINE).is_some();
    let window = |left| Mask::Window { left: Some(left), right: Some(0), align: Align::TopLeft };
    let density = |keys| Some(Density { pairs: 0.1, keys });
    assert!(!gathers(Workload { mask: window(4095), ..WORKLOAD }));
    assert!(gathers(Workload { mask: window(100_000), ..WORKLOAD }));
    // Under a causal mask three quarters of the keys travel by steps.
    assert!(gathers(Workload { density: density(0.7), ..WORKLOAD }));
    assert!(!gathers(Workload { density: density(0.6), ..WORKLOAD }));
    assert!(!gathers(Workload { pass: Pass::Backward, ..WORKLOAD }));
    assert!(!gathers(Workload { seqlen: 0, ..WORKLOAD }));
    let offsets: Vec<i32> = (0..=128).map(|at| at * 1024).collect();
    assert!(!gathers(Workload { cu_seqlens: Some(&offsets), ..WORKLOAD }));
    for (ranks, found) in [(1, false), (2, true), (8, true), (16, false)] {
        assert_eq!(WORKLOAD.gathered(&Machine { ranks, ..MACHINE }).is_some(), found);
    }
    // As many bytes as a call sends.
    let ranks = Memory::group(&Device::cpu(), 3, Duration::from_secs(20)).unwrap();
    let sent = |comm: Memory| -> Result<usize> {
        let comm = comm.gathering();
        let shard = Shard::new(100, comm.world(), comm.rank())?;
        let x = Tensor::zeros(comm.stream(), DType::F32, &[2, shard.rows(), 3, 8])?;
        let attention = Attention::new(x.view(), x.view(), x.view());
        let scheme = Scheme { heads: 1, keys: 3 };
        let (block_mask, cu_seqlens) = (None, None);
        let call = DistributedAttention { attention, shard, scheme, block_mask, cu_seqlens };
        Ok(call.prepare(&comm)?.sent_bytes(Pass::Forward))
    };
    let sent: Vec<_> = std::thread::scope(|threads| {
        let threads: Vec<_> =
            ranks.into_iter().map(|comm| threads.spawn(|| sent(comm).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let (batch, seqlen, head_dim, element_bytes) = (2, 100, 8, 4);
    let (num_heads_q, num_heads_kv, mask) = (3, 3, Mask::Full);
    let sizes = Workload { batch, seqlen, num_heads_q, num_heads_kv, head_dim, ..WORKLOAD };
    let workload = Workload { element_bytes, mask, ..sizes };
    let forecast = workload.gathered(&Machine { ranks: 3, ..MACHINE }).unwrap();
    assert_eq!(sent, [forecast.sent_bytes as usize; 3]);
}

/// A window moves the keys next to each chunk, and all queries; so heads over ranks cost more.
#[test]
fn a_window_moves_few_keys() {
    let window = Mask::Window { left: Some(4095), right: Some(0), align: Align::TopLeft };
    let workload = Workload { mask: window, ..WORKLOAD };
    let forecasts = workload.forecasts(&MACHINE);
    assert_eq!(forecasts[0].scheme, Scheme { heads: 1, keys: 4 });
    let bytes = 2.0 * 2.0 * 4095.0 * 4096.0 * 2.0;
    close(forecasts[0].sent_bytes, bytes);
    close(forecasts[0].exchange, bytes / 260e9 + 2.0 * 50e-6);
    assert!(forecasts[0].exposed <= 0.24 * forecasts[0].exchange, "all is hidden");
    let pairs = 131_072.0 * 4096.0 - 4095.0 * 4096.0 / 2.0;
    close(forecasts[0].ideal, 4.0 * pairs * 4096.0 / 550e12 / 4.0);
    let heads = forecasts.iter().find(|forecast| forecast.scheme.keys == 1).unwrap();
    close(heads.sent_bytes, 4.0 * 0.75 * 32_768.0 * 4096.0 * 2.0);
}

/// The bytes of a forecast are those that the slowest rank sends.
#[test]
fn forecasts_count_what_calls_send() {
    let window = |left, right| Mask::Window { left, right, align: Align::TopLeft };
    let masks = [Mask::Full, Mask::causal(), window(Some(5), Some(0)), window(Some(33), Some(12))];
    let offsets = [None, Some(&[0, 7, 7, 12, 61, 64, 93, 100][..]), Some(&[0, 50, 100])];
    let passes = masks.into_iter().flat_map(|m| [(m, Pass::Forward), (m, Pass::Backward)]);
    let cases = passes.flat_map(|(mask, pass)| offsets.map(|offsets| (mask, pass, offsets)));
    for (mask, pass, cu_seqlens) in cases {
        let sent = |comm: Memory| -> Result<usize> {
            let shard = Shard::new(100, comm.world(), comm.rank())?;
            let x = Tensor::zeros(comm.stream(), DType::F32, &[1, shard.rows(), 2, 8])?;
            let attention =
                Attention { scores: mask.into(), ..Attention::new(x.view(), x.view(), x.view()) };
            let scheme = Scheme { heads: 1, keys: 5 };
            let call =
                DistributedAttention { attention, shard, scheme, block_mask: None, cu_seqlens };
            Ok(call.prepare(&comm)?.sent_bytes(pass))
        };
        let ranks = Memory::group(&Device::cpu(), 5, Duration::from_secs(20)).unwrap();
        let sent: Vec<usize> = std::thread::scope(|threads| {
            let threads: Vec<_> =
                ranks.into_iter().map(|comm| threads.spawn(move || sent(comm).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let (num_heads_q, num_heads_kv, head_dim, element_bytes) = (2, 2, 8, 4);
        let workload = Workload {
            seqlen: 100,
            num_heads_q,
            num_heads_kv,
            head_dim,
            element_bytes,
            mask,
            cu_seqlens,
            pass,
            ..WORKLOAD
        };
        let forecast = workload.forecasts(&Machine { ranks: 5, ..MACHINE })[0];
        assert_eq!(forecast.scheme, Scheme { heads: 1, keys: 5 });
        let found = forecast.sent_bytes as usize;
        assert!(sent.contains(&found), "{mask:?} {pass:?} {cu_seqlens:?}: {found} {sent:?}");
    }
}

/// Of sequences that are within ranks no keys travel, and only their own pairs are work. Offsets
/// that a call refuses have no forecast.
#[test]
fn packed_sequences_are_less_work() {
    let offsets: Vec<i32> = (0..=128).map(|at| at * 1024).collect();
    let of = |cu_seqlens| Workload { cu_seqlens, ..WORKLOAD }.forecasts(&MACHINE);
    let packed = of(Some(&offsets))[0];
    assert_eq!((packed.scheme, packed.sent_bytes), (Scheme { heads: 1, keys: 4 }, 0.0));
    close(packed.ideal, 4.0 * 128.0 * 1024.0 * 1025.0 / 2.0 * 4096.0 / 550e12 / 4.0);
    let rows: i32 = 131_072;
    let one = [0, rows];
    assert_eq!(of(Some(&one)), of(None));
    let bad: [&[i32]; 4] = [&[], &[0, rows - 1], &[0, rows + 1], &[0, 3, 2, rows]];
    for offsets in &bad {
        assert!(of(Some(offsets)).is_empty());
    }
    let batch = Workload { batch: 2, cu_seqlens: Some(&offsets), ..WORKLOAD };
    assert!(batch.forecasts(&MACHINE).is_empty());
}

/// Half the blocks are half the work; half the keys are half the bytes.
#[test]
fn a_block_mask_leaves_its_density() {
    let ring = |density| {
        let workload = Workload { density, ..WORKLOAD };
        *workload.forecasts(&MACHINE).iter().find(|f| f.scheme.heads == 1).unwrap()
    };
    let (dense, some) = (ring(None), ring(Some(Density { pairs: 0.5, keys: 0.25 })));
    close(some.ideal, 0.5 * dense.ideal);
    close(some.sent_bytes, 0.25 * dense.sent_bytes);
    close(some.exchange - 3.0 * 50e-6, 0.25 * (dense.exchange - 3.0 * 50e-6));
    assert!(some.compute < dense.compute);
    assert!(some.to_string().contains(" MB in "), "{some}");
}

#[test]
fn the_fastest_scheme_comes_first() {
    for seqlen in [1000, 32_768, 1 << 20] {
        for ranks in [1, 2, 8, 64, 1024] {
            let machine = Machine { ranks, ..MACHINE };
            let workload = Workload { seqlen, ..WORKLOAD };
            let forecasts = workload.forecasts(&machine);
            assert!(!forecasts.is_empty());
            assert!(forecasts.windows(2).all(|pair| pair[0].total() <= pair[1].total()));
            assert!(forecasts.iter().all(|f| (0.0..=1.0).contains(&f.scaling())));
        }
    }
    // A block mask with a window is for heads over ranks only.
    let window = Mask::Window { left: Some(100), right: Some(0), align: Align::TopLeft };
    let density = Some(Density { pairs: 0.5, keys: 0.5 });
    let schemes = Workload { mask: window, density, ..WORKLOAD }.forecasts(&MACHINE);
    assert!(schemes.iter().all(|forecast| forecast.scheme.keys == 1));
    let one = WORKLOAD.forecasts(&Machine { ranks: 1, ..MACHINE });
    assert_eq!((one.len(), one[0].exposed, one[0].scaling()), (1, 0.0, 1.0));
    assert!(one[0].to_string().starts_with("heads over 1: compute"), "{}", one[0]);
}
