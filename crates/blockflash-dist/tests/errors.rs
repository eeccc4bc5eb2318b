//! What goes wrong on one rank is a typed error on every rank, within the timeout.

use blockflash_dist::{
    Communicator, DistributedAttention, Error, Memory, Nccl, NcclCommunicator, NcclId, Result,
    Scheme, Shard,
};
use blockflash_ops::{
    Align, Attention, BlockGeometry, BlockMask, DType, Device, Mask, Scores, Tensor,
};
use std::time::{Duration, Instant};

const SEQLEN: usize = 40;
/// Of exchanges between ranks: a busy machine does not come near half of it.
const TIMEOUT: Duration = Duration::from_secs(120);

/// What one rank does differently.
#[derive(Clone, Copy)]
struct Change {
    seqlen: usize,
    heads: usize,
    mask: Mask,
    scheme: Scheme,
    scale: Option<f32>,
    sink: bool,
    block_mask: bool,
    dtype: DType,
}

const USUAL: Change = Change {
    seqlen: SEQLEN,
    heads: 4,
    mask: Mask::Full,
    scheme: Scheme { heads: 1, keys: 3 },
    scale: None,
    sink: false,
    block_mask: false,
    dtype: DType::F32,
};

/// Runs three ranks, of which rank 1 makes another call, and gives their results.
fn ranks(change: Change) -> Vec<Result<()>> {
    let group = Memory::group(&Device::cpu(), 3, TIMEOUT).unwrap();
    let run = |comm: Memory| -> Result<()> {
        let call = if comm.rank() == 1 { change } else { USUAL };
        let stream = Device::cpu().stream()?;
        let shard = Shard::new(call.seqlen, 3, comm.rank())?;
        let x = Tensor::zeros(&stream, call.dtype, &[1, shard.rows(), call.heads, 8])?;
        let sink = Tensor::zeros(&stream, DType::F32, &[call.heads])?;
        let geometry = BlockGeometry::new(shard.rows(), shard.rows(), 64, 64)?;
        let block_mask = BlockMask::full(geometry)?;
        let attention = Attention {
            scores: Scores {
                mask: call.mask,
                softmax_scale: call.scale,
                sink: call.sink.then_some(sink.view()),
                ..Scores::default()
            },
            block_mask: call.block_mask.then_some(&block_mask),
            ..Attention::new(x.view(), x.view(), x.view())
        };
        let scheme = call.scheme;
        let call =
            DistributedAttention { attention, shard, scheme, block_mask: None, cu_seqlens: None };
        call.forward(&comm, &stream).map(drop)
    };
    let start = Instant::now();
    let results = std::thread::scope(|threads| {
        let ranks: Vec<_> =
            group.into_iter().map(|comm| threads.spawn(move || run(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(start.elapsed() < TIMEOUT / 2, "nobody waits for the timeout");
    results
}

#[test]
fn the_same_call_works() {
    ranks(USUAL).into_iter().for_each(|result| result.unwrap());
}

#[test]
fn other_arguments_are_named_on_every_rank() {
    let causal = Mask::Causal { align: Align::TopLeft };
    let window = Mask::Window { left: Some(3), right: None, align: Align::TopLeft };
    let changes = [
        ("seqlen", Change { seqlen: 41, ..USUAL }),
        ("num_heads_q", Change { heads: 2, ..USUAL }),
        ("kind of mask", Change { mask: causal, ..USUAL }),
        ("kind of mask", Change { mask: window, ..USUAL }),
        ("sink", Change { sink: true, ..USUAL }),
        ("softmax_scale", Change { scale: Some(0.5), ..USUAL }),
        ("element type", Change { dtype: DType::F16, ..USUAL }),
    ];
    for (expected, change) in changes {
        for result in ranks(change) {
            let error = result.unwrap_err();
            let named =
                matches!(&error, Error::Mismatch { what, rank: 1, .. } if *what == expected);
            assert!(named, "{expected}: {error}");
        }
    }
}

#[test]
fn a_call_that_one_rank_refuses() {
    let changes = [
        Change { block_mask: true, ..USUAL },
        Change { scheme: Scheme { heads: 3, keys: 1 }, ..USUAL },
        Change { scheme: Scheme { heads: usize::MAX, keys: 3 }, ..USUAL },
        Change { scheme: Scheme { heads: 0, keys: 3 }, ..USUAL },
        Change { scale: Some(f32::NAN), ..USUAL },
    ];
    for change in changes {
        for (rank, result) in ranks(change).into_iter().enumerate() {
            match result.unwrap_err() {
                Error::Refused { rank: 1 } => assert_ne!(rank, 1),
                Error::Unsupported { .. } | Error::Scheme { .. } | Error::Ops(_) => {
                    assert_eq!(rank, 1);
                }
                error => panic!("{error}"),
            }
        }
    }
}

#[test]
fn rows_that_are_not_those_of_the_rank() {
    let comm = Memory::group(&Device::cpu(), 1, Duration::ZERO).unwrap().remove(0);
    let stream = Device::cpu().stream().unwrap();
    let x = Tensor::zeros(&stream, DType::F32, &[1, 7, 1, 8]).unwrap();
    let attention = Attention::new(x.view(), x.view(), x.view());
    let call = |seqlen, world| {
        let (shard, scheme) = (Shard::new(seqlen, world, 0)?, Scheme { heads: 1, keys: 1 });
        DistributedAttention { attention, shard, scheme, block_mask: None, cu_seqlens: None }
            .forward(&comm, &stream)
    };
    call(7, 1).unwrap();
    assert!(matches!(call(8, 1), Err(Error::Rows { expected: 8, found: 7, .. })));
    assert!(matches!(call(14, 2), Err(Error::Size { value: 2, .. })), "a shard of two ranks");
    assert!(matches!(call(usize::MAX, 1), Err(Error::Size { what: "seqlen", .. })));
}

#[test]
fn a_prepared_call_is_for_its_arguments() {
    let comm = Memory::group(&Device::cpu(), 1, Duration::ZERO).unwrap().remove(0);
    let stream = Device::cpu().stream().unwrap();
    let x = Tensor::zeros(&stream, DType::F32, &[1, 7, 1, 8]).unwrap();
    let attention = Attention::new(x.view(), x.view(), x.view());
    let scheme = Scheme { heads: 1, keys: 1 };
    let shard = Shard::new(7, 1, 0).unwrap();
    let call =
        DistributedAttention { attention, shard, scheme, block_mask: None, cu_seqlens: None };
    let prepared = call.prepare(&comm).unwrap();
    call.forward_prepared(&prepared, &comm, &stream).unwrap();
    let attention =
        Attention { scores: Scores { mask: Mask::causal(), ..attention.scores }, ..attention };
    let error = DistributedAttention { attention, ..call }
        .forward_prepared(&prepared, &comm, &stream)
        .unwrap_err();
    assert!(matches!(error, Error::Ops(blockflash_ops::Error::NotPrepared { .. })), "{error}");
}

/// A rank that is dropped, and one that never answers.
#[test]
fn a_lost_rank_is_an_error() {
    let stream = Device::cpu().stream().unwrap();
    let x = Tensor::zeros(&stream, DType::F32, &[1, 20, 4, 8]).unwrap();
    let attention = Attention::new(x.view(), x.view(), x.view());
    let scheme = Scheme { heads: 1, keys: 2 };
    let shard = Shard::new(40, 2, 0).unwrap();
    let call =
        DistributedAttention { attention, shard, scheme, block_mask: None, cu_seqlens: None };
    let mut group = Memory::group(&Device::cpu(), 2, TIMEOUT).unwrap();
    drop(group.pop());
    assert!(matches!(call.forward(&group[0], &stream), Err(Error::Gone { rank: 1 })));
    let group = Memory::group(&Device::cpu(), 2, Duration::from_millis(50)).unwrap();
    assert!(matches!(call.forward(&group[0], &stream), Err(Error::Timeout { rank: 1, .. })));
}

#[test]
fn messages_are_checked() {
    let group = Memory::group(&Device::cpu(), 2, Duration::from_millis(50)).unwrap();
    let stream = Device::cpu().stream().unwrap();
    let sent = Tensor::zeros(&stream, DType::F32, &[3]).unwrap();
    let mut received = Tensor::zeros(&stream, DType::F32, &[4]).unwrap();
    group[0].exchange(&[(1, sent.view())], &mut []).unwrap();
    let error = group[1].exchange(&[], &mut [(0, received.view_mut())]).unwrap_err();
    assert!(matches!(error, Error::Message { from: 0, .. }), "{error}");
    for peer in [0, 2, usize::MAX] {
        let error = group[0].exchange(&[(peer, sent.view())], &mut []).unwrap_err();
        assert!(matches!(error, Error::Size { what: "a peer", .. }), "{error}");
    }
}

/// On the CPU, and without NCCL, asking for it is an error value.
#[test]
fn nccl_needs_gpus() {
    match NcclId::new() {
        Err(error) => {
            assert!(error.to_string().contains("nccl") || error.to_string().contains("NCCL"))
        }
        Ok(id) => {
            let ranks = NcclCommunicator::new(&Device::cpu(), &id, 0, 1, Duration::from_secs(1));
            assert!(ranks.map(Nccl::new).is_err());
        }
    }
    let id = NcclId::from_bytes([0; 128]);
    assert!(NcclCommunicator::new(&Device::cpu(), &id, 0, 1, Duration::from_secs(1)).is_err());
}

#[test]
fn what_is_added_to_scores_is_refused() {
    let comm = Memory::group(&Device::cpu(), 1, Duration::ZERO).unwrap().remove(0);
    let stream = Device::cpu().stream().unwrap();
    let x = Tensor::zeros(&stream, DType::F32, &[1, 7, 1, 8]).unwrap();
    let bias = Tensor::zeros(&stream, DType::F32, &[1, 1, 7, 7]).unwrap();
    let slopes = Tensor::zeros(&stream, DType::F32, &[1]).unwrap();
    for scores in [
        Scores { bias: Some(bias.view()), ..Scores::default() },
        Scores { alibi: Some(slopes.view()), ..Scores::default() },
    ] {
        let attention = Attention { scores, ..Attention::new(x.view(), x.view(), x.view()) };
        let (shard, scheme) = (Shard::new(7, 1, 0).unwrap(), Scheme { heads: 1, keys: 1 });
        let call =
            DistributedAttention { attention, shard, scheme, block_mask: None, cu_seqlens: None };
        let (name, _) = scores.tensors().next().unwrap();
        assert!(matches!(
            call.forward(&comm, &stream),
            Err(Error::Unsupported { what, .. }) if what == name
        ));
    }
}
