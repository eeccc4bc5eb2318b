//! Block masks over ranks: what travels, and what is refused.

use blockflash_dist::{
    BlockMaskExchange, Communicator, DistributedAttention, DistributedBlockMask, Error, Memory,
    Pass, Result, Scheme, Shard,
};
use blockflash_ops::{
    Align, Attention, BlockGeometry, BlockMask, DType, Device, Mask, Scores, Tensor,
};
use std::time::{Duration, Instant};

const SEQLEN: usize = 1000;
/// Of exchanges between ranks: a busy machine does not come near half of it.
const TIMEOUT: Duration = Duration::from_secs(120);
const RING: Scheme = Scheme { heads: 1, keys: 3 };

fn geometry(seqlen: usize) -> BlockGeometry {
    BlockGeometry::new(seqlen, seqlen, 64, 64).unwrap()
}

/// The block before and the first one.
fn local_and_sink(seqlen: usize) -> BlockMask {
    let geometry = geometry(seqlen);
    let local = BlockMask::window(geometry, Some(1), Some(0), Align::TopLeft).unwrap();
    local.union(&BlockMask::sink(geometry, 1).unwrap()).unwrap()
}

/// Runs three ranks.
fn ranks<T: Send>(run: impl Fn(&Memory) -> Result<T> + Sync) -> Vec<Result<T>> {
    let group = Memory::group(&Device::cpu(), 3, TIMEOUT).unwrap();
    let start = Instant::now();
    let run = &run;
    let results = std::thread::scope(|threads| {
        let ranks: Vec<_> =
            group.into_iter().map(|comm| threads.spawn(move || run(&comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(start.elapsed() < TIMEOUT / 2, "nobody waits for the timeout");
    results
}

fn shard(comm: &Memory) -> Result<Shard> {
    Shard::new(SEQLEN, comm.world(), comm.rank())?.in_blocks(64, 64)
}

fn distributed(comm: &Memory, whole: &BlockMask, mask: Mask) -> Result<DistributedBlockMask> {
    let shard = shard(comm)?;
    DistributedBlockMask::new(&shard.block_mask(whole)?, mask, shard, RING, comm)
}

/// Bytes that the ranks send, forward and backward.
fn sent(whole: Option<&BlockMask>, mask: Mask) -> [usize; 2] {
    let sent = ranks(|comm| {
        let (stream, shard) = (Device::cpu().stream()?, shard(comm)?);
        let block_mask = whole.map(|whole| distributed(comm, whole, mask)).transpose()?;
        let x = Tensor::zeros(&stream, DType::F32, &[1, shard.rows(), 2, 8])?;
        let attention =
            Attention { scores: mask.into(), ..Attention::new(x.view(), x.view(), x.view()) };
        let block_mask = block_mask.as_ref();
        let call =
            DistributedAttention { attention, shard, scheme: RING, block_mask, cu_seqlens: None };
        let prepared = call.prepare(comm)?;
        call.forward_prepared(&prepared, comm, &stream)?;
        Ok([Pass::Forward, Pass::Backward].map(|pass| prepared.sent_bytes(pass)))
    });
    sent.into_iter().map(Result::unwrap).fold([0; 2], |a, b| [a[0] + b[0], a[1] + b[1]])
}

/// Sixteen blocks on three ranks: chunks of two or three, of which only the last one and the very
/// first block travel.
#[test]
fn only_visited_blocks_travel() {
    let row = 2 * 2 * 8 * 4;
    let dense = sent(None, Mask::causal());
    let whole = local_and_sink(SEQLEN);
    let some = sent(Some(&whole), Mask::causal());
    // The block before each chunk but the first one, and the one behind a chunk of the same rank;
    // block 0 to the two ranks that do not hold it.
    assert_eq!(some[0], (4 + 2) * 64 * row, "{dense:?}");
    assert!(2 * some[0] < dense[0] && some[1] == 2 * some[0], "{some:?} {dense:?}");
    // Every block: as without a mask; those that the token mask hides are not visited.
    let every = BlockMask::full(geometry(SEQLEN)).unwrap();
    assert_eq!(sent(Some(&every), Mask::causal()), dense);
    assert_eq!(sent(Some(&every), Mask::Full), sent(None, Mask::Full));
    let none = BlockMask::from_bool(geometry(SEQLEN), 1, 1, &[false; 256]).unwrap();
    assert_eq!(sent(Some(&none), Mask::Full), [0; 2]);
}

#[test]
fn densities_are_those_of_the_lists() {
    let whole = local_and_sink(SEQLEN);
    for result in ranks(|comm| distributed(comm, &whole, Mask::causal())) {
        let mask = result.unwrap();
        let density = mask.density();
        assert!(density.pairs > 0.1 && density.pairs < 0.7, "{mask}");
        assert!(density.keys > 0.05 && density.keys < 0.7, "{mask}");
        assert!(mask.to_string().contains("% of the keys of other ranks come"), "{mask}");
    }
    let every = BlockMask::full(geometry(SEQLEN)).unwrap();
    for result in ranks(|comm| distributed(comm, &every, Mask::causal())) {
        let density = result.unwrap().density();
        assert_eq!([density.pairs, density.keys], [1.0; 2]);
    }
}

/// Ranks that exchange messages themselves get the same mask, whose steps fit together.
#[test]
fn messages_and_steps() {
    let whole = local_and_sink(SEQLEN);
    let exchanges: Vec<_> = (0..3)
        .map(|rank| -> Result<_> {
            let shard = Shard::new(SEQLEN, 3, rank)?.in_blocks(64, 64)?;
            BlockMaskExchange::new(&shard.block_mask(&whole)?, Mask::causal(), shard, RING)
        })
        .collect::<Result<_>>()
        .unwrap();
    let messages: Vec<_> = exchanges.iter().map(BlockMaskExchange::messages).collect();
    let stream = Device::cpu().stream().unwrap();
    let masks: Vec<_> = exchanges
        .iter()
        .enumerate()
        .map(|(rank, exchange)| {
            let come: Vec<_> = messages.iter().map(|message| &message[rank]).collect();
            assert!(matches!(exchange.finish(&come[1..], &stream), Err(Error::Message { .. })));
            exchange.finish(&come, &stream).unwrap()
        })
        .collect();
    for (result, mask) in ranks(|comm| distributed(comm, &whole, Mask::causal())).iter().zip(&masks)
    {
        let usual = result.as_ref().unwrap();
        assert_eq!((usual.id(), usual.density()), (masks[0].id(), mask.density()));
    }
    let steps: Vec<_> = masks.iter().map(|mask| mask.steps().remove(0)).collect();
    for (rank, steps_of_rank) in steps.iter().enumerate() {
        let queries = steps_of_rank.iter().flat_map(|step| &step.calls).filter(|call| call.own);
        let queries: usize = queries.map(|call| call.queries.len()).sum();
        assert_eq!(queries, Shard::new(SEQLEN, 3, rank).unwrap().in_blocks(64, 64).unwrap().rows());
        for (at, step) in steps_of_rank.iter().enumerate().skip(1) {
            let there = &steps[step.to][at];
            let sent: usize = step.sent.iter().map(|rows| rows.len()).sum();
            assert_eq!((there.from, there.received), (rank, sent));
        }
    }
}

/// The other ranks learn that one has other lists than its calls need.
#[test]
fn lists_that_do_not_fit() {
    let window = Mask::Window { left: Some(100), right: Some(0), align: Align::TopLeft };
    type Make = fn(&Memory) -> Result<DistributedBlockMask>;
    let makes: [(&str, Make); 6] = [
        ("queries and keys", |comm| {
            let lists = BlockMask::full(geometry(SEQLEN))?;
            DistributedBlockMask::new(&lists, Mask::Full, shard(comm)?, RING, comm)
        }),
        ("blocks", |comm| {
            let rows = Shard::new(SEQLEN, 3, 1)?;
            let lists = BlockMask::full(BlockGeometry::new(rows.rows(), SEQLEN, 64, 64)?)?;
            DistributedBlockMask::new(&lists, Mask::Full, rows, RING, comm)
        }),
        ("heads", |comm| {
            let rows = shard(comm)?;
            let geometry = BlockGeometry::new(rows.rows(), SEQLEN, 64, 64)?;
            let blocks = vec![true; 2 * geometry.rows() * geometry.cols()];
            let lists = BlockMask::from_bool(geometry, 1, 2, &blocks)?;
            let scheme = Scheme { heads: 3, keys: 1 };
            DistributedBlockMask::new(&lists, Mask::Full, rows, scheme, comm)
        }),
        ("the rank", |comm| {
            let rows = Shard::new(SEQLEN, 3, 0)?.in_blocks(64, 64)?;
            let lists = rows.block_mask(&BlockMask::full(geometry(SEQLEN))?)?;
            DistributedBlockMask::new(&lists, Mask::Full, rows, RING, comm)
        }),
        ("partial blocks", |comm| {
            let rows = shard(comm)?;
            let partial = |mask: BlockMask| {
                let full = vec![-1; mask.nnz()];
                mask.with_bits(&full, &[])
            };
            let whole = partial(BlockMask::full(geometry(SEQLEN))?)?;
            assert!(matches!(rows.block_mask(&whole), Err(Error::BlockMask { what: "bits", .. })));
            let lists = partial(rows.block_mask(&BlockMask::full(geometry(SEQLEN))?)?)?;
            DistributedBlockMask::new(&lists, Mask::Full, rows, RING, comm)
        }),
        ("packed", |comm| {
            let lists = BlockMask::packed(&[&BlockMask::full(geometry(SEQLEN))?])?;
            DistributedBlockMask::new(&lists, Mask::Full, shard(comm)?, RING, comm)
        }),
    ];
    let whole = local_and_sink(SEQLEN);
    for (name, make) in makes {
        let usual = |comm: &Memory| distributed(comm, &whole, Mask::Full);
        for (rank, result) in ranks(|comm| if comm.rank() == 1 { make(comm) } else { usual(comm) })
            .into_iter()
            .enumerate()
        {
            match result.unwrap_err() {
                Error::Refused { rank: 1 } => assert_ne!(rank, 1),
                error => {
                    assert!(rank == 1 && error.to_string().contains(name), "{name}: {error}");
                }
            }
        }
    }
    for result in ranks(|comm| distributed(comm, &whole, window)) {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Unsupported { what: "a block mask with a window", .. }));
    }
    let mask = |rank| if rank == 2 { Mask::causal() } else { Mask::Full };
    for result in ranks(|comm| distributed(comm, &whole, mask(comm.rank()))) {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Mismatch { what: "kind of mask", rank: 2, .. }), "{error}");
    }
}

/// A call names what does not fit its mask, and ranks with masks of other lists differ.
#[test]
fn calls_that_do_not_fit() {
    let [one, other] = [local_and_sink(SEQLEN), BlockMask::full(geometry(SEQLEN)).unwrap()];
    let run = |comm: &Memory, change: &str| -> Result<()> {
        let (stream, shard) = (Device::cpu().stream()?, shard(comm)?);
        let masks = [&one, &other].map(|whole| distributed(comm, whole, Mask::causal()));
        let [one, other] = masks;
        let (one, other) = (one?, other?);
        let x = Tensor::zeros(&stream, DType::F32, &[1, shard.rows(), 2, 8])?;
        let attention = Attention::new(x.view(), x.view(), x.view());
        let mut call = DistributedAttention {
            attention: Attention {
                scores: Scores { mask: Mask::causal(), ..attention.scores },
                ..attention
            },
            shard,
            scheme: RING,
            block_mask: Some(if change == "lists" && comm.rank() == 2 { &other } else { &one }),
            cu_seqlens: None,
        };
        match change {
            "token mask" => call.attention.scores.mask = Mask::Full,
            "rows and scheme" => {
                call.shard = Shard::new(SEQLEN, 3, comm.rank())?.in_blocks(64, 128)?
            }
            "prepared" => {
                let prepared = call.prepare(comm)?;
                call.block_mask = Some(&other);
                return call.forward_prepared(&prepared, comm, &stream).map(drop);
            }
            _ => {}
        }
        call.forward(comm, &stream).map(drop)
    };
    for change in ["token mask", "lists", "prepared"] {
        for result in ranks(|comm| run(comm, change)) {
            let error = result.unwrap_err();
            let named = match (&error, change) {
                (Error::BlockMask { what, .. }, _) => *what == change,
                (Error::Mismatch { what: "block mask", rank: 2, .. }, "lists") => true,
                (Error::Ops(blockflash_ops::Error::NotPrepared { .. }), "prepared") => true,
                _ => false,
            };
            assert!(named, "{change}: {error}");
        }
    }
    for result in ranks(|comm| run(comm, "rows and scheme")) {
        assert!(matches!(
            result.unwrap_err(),
            Error::BlockMask { .. } | Error::Rows { .. } | Error::Refused { .. }
        ));
    }
}
