//! What a packed batch refuses, the same on every rank, and what it is prepared for.

use blockflash_dist::{
    Communicator, DistributedAttention, DistributedBlockMask, Error, Memory, Result, Scheme, Shard,
};
use blockflash_ops::{Attention, BlockGeometry, BlockMask, CuSeqlens, DType, Device, Mask, Tensor};
use std::time::{Duration, Instant};

const SEQLEN: usize = 40;
/// Of exchanges between ranks: a busy machine does not come near half of it.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Offsets that are wrong on rank 1, or differ there, are an error on every rank.
#[test]
fn sequences_that_do_not_fit() {
    const OFFSETS: &[i32] = &[0, 3, 17, 40];
    let run = |comm: &Memory, offsets: Option<&[i32]>, batch: usize, blocks: bool| -> Result<()> {
        let stream = Device::cpu().stream()?;
        let scheme = Scheme { heads: 1, keys: 3 };
        let mut shard = Shard::new(SEQLEN, 3, comm.rank())?;
        let mut mask = None;
        if blocks {
            shard = shard.in_blocks(64, 64)?;
            let lists = BlockMask::full(BlockGeometry::new(shard.rows(), SEQLEN, 64, 64)?)?;
            mask = Some(DistributedBlockMask::new(&lists, Mask::Full, shard, scheme, comm)?);
        }
        let cu_seqlens = if comm.rank() == 1 { offsets } else { Some(OFFSETS) };
        let x = Tensor::zeros(&stream, DType::F32, &[batch, shard.rows(), 4, 8])?;
        let attention = Attention::new(x.view(), x.view(), x.view());
        let block_mask = mask.as_ref();
        let call = DistributedAttention { attention, shard, scheme, block_mask, cu_seqlens };
        let output = call.forward(comm, &stream)?;
        call.backward(&output, x.view(), comm, &stream).map(drop)
    };
    let ranks = |offsets: Option<&[i32]>, batch: usize, blocks: bool| -> Vec<Result<()>> {
        let group = Memory::group(&Device::cpu(), 3, TIMEOUT).unwrap();
        std::thread::scope(|threads| {
            let start = |comm: Memory| threads.spawn(move || run(&comm, offsets, batch, blocks));
            let ranks: Vec<_> = group.into_iter().map(start).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    };
    let start = Instant::now();
    ranks(Some(OFFSETS), 1, false).into_iter().for_each(Result::unwrap);
    let long = [0, i32::MAX];
    for bad in [&[][..], &[0], &[3, 40], &[0, 17, 3, 40], &[0, 3, 39], &[0, 41], &long, &[0, -1]] {
        for (rank, result) in ranks(Some(bad), 1, false).into_iter().enumerate() {
            match result.unwrap_err() {
                Error::Refused { rank: 1 } => assert_ne!(rank, 1),
                Error::CuSeqlens { .. } => assert_eq!(rank, 1),
                Error::Size { what: "the length of cu_seqlens", .. } => assert_eq!(rank, 1),
                error => panic!("{bad:?}: {error}"),
            }
        }
    }
    for other in [None, Some(&[0, 4, 17, 40][..]), Some(&[0, 40])] {
        for result in ranks(other, 1, false) {
            let error = result.unwrap_err();
            let named = matches!(error, Error::Mismatch { what: "cu_seqlens", rank: 1, .. });
            assert!(named, "{other:?}: {error}");
        }
    }
    for result in ranks(Some(OFFSETS), 2, false) {
        let error = result.unwrap_err();
        let named = matches!(error, Error::Size { what: "the batch of packed sequences", .. });
        assert!(named, "{error}");
    }
    for result in ranks(Some(OFFSETS), 1, true) {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Unsupported { what, .. } if what.contains("packed")));
    }
    assert!(start.elapsed() < TIMEOUT / 2, "nobody waits for the timeout");
}

/// A prepared call is for its sequences.
#[test]
fn prepared_sequences() {
    let comm = Memory::group(&Device::cpu(), 1, Duration::ZERO).unwrap().remove(0);
    let stream = Device::cpu().stream().unwrap();
    let x = Tensor::zeros(&stream, DType::F32, &[1, 7, 1, 8]).unwrap();
    let attention = Attention::new(x.view(), x.view(), x.view());
    let (shard, scheme) = (Shard::new(7, 1, 0).unwrap(), Scheme { heads: 1, keys: 1 });
    let cu_seqlens = Some(&[0, 3, 7][..]);
    let call = DistributedAttention { attention, shard, scheme, block_mask: None, cu_seqlens };
    let prepared = call.prepare(&comm).unwrap();
    call.forward_prepared(&prepared, &comm, &stream).unwrap();
    for cu_seqlens in [None, Some(&[0, 4, 7][..])] {
        let error = DistributedAttention { cu_seqlens, ..call }
            .forward_prepared(&prepared, &comm, &stream)
            .unwrap_err();
        assert!(matches!(error, Error::Ops(blockflash_ops::Error::NotPrepared { .. })), "{error}");
    }
}

/// Offsets on the device are those of the rows of one device.
#[test]
fn sequences_of_one_rank_are_refused() {
    let comm = Memory::group(&Device::cpu(), 1, Duration::ZERO).unwrap().remove(0);
    let stream = Device::cpu().stream().unwrap();
    let x = Tensor::zeros(&stream, DType::F32, &[7, 1, 8]).unwrap();
    let offsets = Tensor::from_slice(&stream, &[0, 3, 7], &[3]).unwrap();
    let cu_seqlens = Some(CuSeqlens {
        q: offsets.view(),
        kv: offsets.view(),
        max_seqlen_q: 4,
        max_seqlen_kv: 4,
    });
    let attention = Attention { cu_seqlens, ..Attention::new(x.view(), x.view(), x.view()) };
    let (shard, scheme) = (Shard::new(7, 1, 0).unwrap(), Scheme { heads: 1, keys: 1 });
    let call =
        DistributedAttention { attention, shard, scheme, block_mask: None, cu_seqlens: None };
    let error = call.forward(&comm, &stream).unwrap_err();
    assert!(
        matches!(error, Error::Unsupported { what: "cu_seqlens of the rows of one rank", .. }),
        "{error}"
    );
}
