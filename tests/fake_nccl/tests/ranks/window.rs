//! All-gathers in windows.

use crate::fake::{Fake, TIMEOUT, alone, expect_lost, with_fake};
use blockflash_dist::{Communicator, DistributedAttention, Nccl, Scheme, Shard};
use blockflash_ops::{Attention, Mask};
use blockflash_safe::{DType, Error, NcclCommunicator, NcclId, Result, Tensor};

const MIB: usize = 1 << 20;

fn address(tensor: &Tensor) -> u64 {
    tensor.view().device_ptr().unwrap()
}

/// Nothing is left of a window.
fn expect_no_memory(fake: &Fake) -> Result<()> {
    assert_eq!(fake.nccl.addresses(), Vec::<u64>::new());
    Ok(())
}

#[test]
fn a_window_is_one_tensor_at_a_time_and_grows() -> Result<()> {
    with_fake(|fake| {
        let (nccl, stream, comm) = (fake.nccl, &fake.stream, fake.gathering(TIMEOUT)?);
        let window = |bytes| comm.window(stream, DType::U8, &[1, bytes]);
        assert!(window(1).is_err(), "nothing is reserved");
        assert!(!comm.reserve_gather(0, stream)?);
        assert!(comm.reserve_gather(3 * MIB, stream)?);
        let mut first = window(4 * MIB)?;
        let place = address(&first);
        assert_eq!(nccl.addresses(), [place]);
        assert!(window(1).unwrap_err().to_string().contains("another tensor"));
        comm.all_gather(&mut first.view_mut(), stream)?;
        drop(first);
        assert!(window(4 * MIB + 1).is_err());
        assert!(comm.reserve_gather(MIB, stream)?, "it does not shrink");
        let mut first = window(4 * MIB)?;
        assert_eq!(address(&first), place);

        // A larger one takes its place, and the tensor keeps its memory.
        assert!(comm.reserve_gather(5 * MIB, stream)?);
        let mut second = comm.window(&fake.device.stream()?, DType::F16, &[1, MIB])?;
        assert_ne!(address(&second), place);
        assert!(comm.all_gather(&mut first.view_mut(), stream).is_err());
        comm.all_gather(&mut second.view_mut(), stream)?;
        assert_eq!(nccl.addresses().len(), 2);
        drop(first);
        assert_eq!(nccl.addresses(), [address(&second)]);

        // It outlives its communicator.
        drop(comm);
        second.fill_bytes(stream, 7)?;
        drop(second);
        expect_no_memory(fake)
    })
}

#[test]
fn other_tensors_are_refused() -> Result<()> {
    with_fake(|fake| {
        let (stream, comm) = (&fake.stream, fake.gathering(TIMEOUT)?);
        assert!(comm.reserve_gather(MIB, stream)?);
        let mut window = comm.window(stream, DType::U8, &[2, 8])?;
        let refused = |result: Result<()>| result.unwrap_err().to_string();
        assert!(refused(comm.all_gather(&mut window.view_mut(), stream)).contains("slots of 1"));
        let part = window.view_mut().slice(1, 0..4)?.slice(0, 0..1)?;
        comm.all_gather(&mut { part }, stream)?;
        let columns = window.view_mut().slice(1, 0..4)?.permute(&[1, 0])?.slice(0, 0..1)?;
        assert!(refused(comm.all_gather(&mut { columns }, stream)).contains("contiguous"));
        let mut other = Tensor::zeros(stream, DType::U8, &[1, 8])?;
        let error = refused(comm.all_gather(&mut other.view_mut(), stream));
        assert!(error.contains("not in the window"));
        let mut receives = [(0, window.view_mut())];
        assert!(refused(comm.exchange(&[], &mut receives, stream)).contains("takes no messages"));
        drop((window, comm));

        // Who has not asked for them has no all-gathers.
        let comm = NcclCommunicator::new(&fake.device, &NcclId::new()?, 0, 1, TIMEOUT)?;
        assert!(!comm.reserve_gather(MIB, stream)?);
        // More than there is.
        let comm = fake.gathering(TIMEOUT)?;
        assert!(!comm.reserve_gather(1 << 42, stream)?);
        assert!(!comm.reserve_gather(usize::MAX, stream)?);
        assert!(comm.reserve_gather(MIB, stream)?);
        drop(comm);
        expect_no_memory(fake)
    })
}

#[test]
fn an_aborted_communicator_keeps_its_window() -> Result<()> {
    alone("window::an_aborted_communicator_keeps_its_window", |fake| {
        let (stream, comm) = (&fake.stream, fake.gathering(TIMEOUT)?);
        assert!(comm.reserve_gather(MIB, stream)?);
        let window = comm.window(stream, DType::U8, &[1, 1])?;
        comm.abort("a test");
        let error = comm.reserve_gather(2 * MIB, stream).unwrap_err();
        assert!(matches!(error, Error::Lost { .. }), "{error}");
        let kept = address(&window);
        drop(window);
        assert!(matches!(comm.window(stream, DType::U8, &[1, 1]), Err(Error::Lost { .. })));
        drop(comm);
        assert_eq!(fake.nccl.addresses(), [kept], "another rank may still write there");
        Ok(())
    })
}

#[test]
fn ranks_gather() -> Result<()> {
    alone("window::ranks_gather", |fake| {
        let found = fake.gathering_ranks(4, |comm, stream| {
            // The largest number of all ranks counts.
            assert!(comm.reserve_gather(MIB * (1 + comm.rank()), &stream).unwrap());
            let mut window = comm.window(&stream, DType::I32, &[3, 4, 2]).unwrap();
            window.copy_from_slice(&stream, &[comm.rank() as i32; 24]).unwrap();
            for part in [0, 2] {
                let slots = window.view_mut().slice(0, part..part + 1).unwrap().flatten(0..2);
                comm.all_gather(&mut slots.unwrap(), &stream).unwrap();
            }
            comm.wait(&stream).unwrap();
            let found = window.to_vec::<i32>(&stream).unwrap();
            drop(window);
            assert!(comm.window(&stream, DType::U8, &[4, 4 * MIB]).is_ok());
            assert!(comm.reserve_gather(8 * MIB, &stream).unwrap(), "all ranks replace it");
            found
        });
        for (rank, found) in found.iter().enumerate() {
            let gathered = [0, 0, 1, 1, 2, 2, 3, 3];
            assert_eq!(found[..8], gathered);
            assert_eq!(found[8..16], [rank as i32; 8]);
            assert_eq!(found[16..], gathered);
        }
        expect_no_memory(fake)
    })
}

#[test]
fn all_ranks_gather_or_none() -> Result<()> {
    alone("window::all_ranks_gather_or_none", |fake| {
        let join = |id: &_, rank| match rank {
            2 => NcclCommunicator::new(&fake.device, id, rank, 4, TIMEOUT),
            _ => NcclCommunicator::gathering(&fake.device, id, rank, 4, TIMEOUT),
        };
        let found = fake.ranks_by(4, join, |comm, stream| comm.reserve_gather(MIB, &stream));
        assert!(found.into_iter().all(|gathers| !gathers.unwrap()));
        expect_no_memory(fake)
    })
}

#[test]
fn a_rank_that_does_not_gather_is_lost() -> Result<()> {
    alone("window::a_rank_that_does_not_gather_is_lost", |fake| {
        let errors = fake.gathering_ranks(2, |comm, stream| {
            assert!(comm.reserve_gather(MIB, &stream).unwrap());
            if comm.rank() == 1 {
                return Vec::new();
            }
            let mut window = comm.window(&stream, DType::U8, &[2, 8]).unwrap();
            let mut gather = || comm.all_gather(&mut window.view_mut(), &stream).unwrap_err();
            vec![gather(), gather(), comm.reserve_gather(1, &stream).unwrap_err()]
        });
        expect_lost(&errors[0], 3);
        assert_eq!(fake.nccl.addresses().len(), 2, "the other rank may still write there");
        Ok(())
    })
}

/// Kernels compute nothing here, but what is gathered is in windows of all ranks.
#[test]
fn attention_over_ranks_gathers_in_windows() -> Result<()> {
    alone("window::attention_over_ranks_gathers_in_windows", |fake| {
        fake.gathering_ranks(4, |comm, stream| {
            let comm = Nccl::gathering(comm).unwrap();
            for seqlen in [1003, 2051, 77] {
                let shard = Shard::new(seqlen, comm.world(), comm.rank()).unwrap();
                let tensor =
                    |heads| Tensor::zeros(&stream, DType::F16, &[2, shard.rows(), heads, 64]);
                let [q, k, v] = [tensor(8), tensor(4), tensor(4)].map(Result::unwrap);
                let schemes = Scheme::all(4, 4).into_iter();
                for (scheme, mask) in
                    schemes.flat_map(|of| [Mask::causal(), Mask::Full].map(|mask| (of, mask)))
                {
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
                assert!(!fake.nccl.addresses().is_empty());
            }
        });
        expect_no_memory(fake)
    })
}
