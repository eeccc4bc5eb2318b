//! Messages between ranks.

use crate::fake::{alone, expect_lost};
use blockflash_dist::{Communicator, DistributedAttention, Nccl, Scheme, Shard};
use blockflash_ops::{Attention, Mask};
use blockflash_safe::{DType, Result, Tensor};

#[test]
fn ranks_exchange() -> Result<()> {
    alone("exchange::ranks_exchange", |fake| {
        let found = fake.ranks(3, |comm, stream| {
            let mut theirs = Tensor::empty(&stream, DType::I32, &[2]).unwrap();
            let ours = [comm.rank() as i32, 7];
            let ours = Tensor::from_slice(&stream, &ours, &[2]).unwrap();
            let (to, from) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            comm.exchange(&[(to, ours.view())], &mut [(from, theirs.view_mut())], &stream).unwrap();
            comm.wait(&stream).unwrap();
            theirs.to_vec::<i32>(&stream).unwrap()
        });
        assert_eq!(found, [[2, 7], [0, 7], [1, 7]]);
        Ok(())
    })
}

#[test]
fn a_rank_that_does_not_send_is_lost() -> Result<()> {
    alone("exchange::a_rank_that_does_not_send_is_lost", |fake| {
        let errors = fake.ranks(2, |comm, stream| {
            if comm.rank() == 1 {
                return Vec::new();
            }
            let mut theirs = Tensor::empty(&stream, DType::U8, &[1]).unwrap();
            let mut receive =
                || comm.exchange(&[], &mut [(1, theirs.view_mut())], &stream).unwrap_err();
            vec![receive(), receive(), comm.wait(&stream).unwrap_err()]
        });
        expect_lost(&errors[0], 3);
        Ok(())
    })
}

/// Kernels compute nothing here, but what is sent has the size that is received.
#[test]
fn attention_over_ranks_sends_what_is_expected() -> Result<()> {
    alone("exchange::attention_over_ranks_sends_what_is_expected", |fake| {
        fake.ranks(4, |comm, stream| {
            let comm = Nccl::new(comm).unwrap();
            let shard = Shard::new(1003, comm.world(), comm.rank()).unwrap();
            let tensor = |heads| Tensor::zeros(&stream, DType::F16, &[1, shard.rows(), heads, 64]);
            let [q, k, v] = [tensor(8), tensor(4), tensor(4)].map(Result::unwrap);
            for scheme in Scheme::all(4, 4) {
                for mask in [Mask::Full, Mask::causal()] {
                    let attention = Attention {
                        scores: mask.into(),
                        ..Attention::new(q.view(), k.view(), v.view())
                    };
                    let (block_mask, cu_seqlens) = (None, None);
                    let call =
                        DistributedAttention { attention, shard, scheme, block_mask, cu_seqlens };
                    let output = call.forward(&comm, &stream).unwrap();
                    call.backward(&output, q.view(), &comm, &stream).unwrap();
                    comm.wait(&stream).unwrap();
                }
            }
        });
        Ok(())
    })
}
