//! Exchanges without GPUs: ranks are threads, or there is one alone.

mod common;

use blockflash_dist::{Communicator, DistributedAttention, Nccl, Scheme, Shard};
use blockflash_ops::{Attention, Mask};
use blockflash_safe::{DType, Device, Error, NcclCommunicator, NcclId, Result, Stream, Tensor};
use common::{MIB, TIMEOUT, address, alone, has_its_own_process, ranks_by, setup};

#[test]
fn memory_for_messages_is_used_again() -> Result<()> {
    let (nccl, device, stream, _turn) = setup();
    let comm = alone(&device);
    let tensor = |bytes| comm.tensor(&stream, DType::U8, &[bytes]);
    assert!(nccl.addresses().is_empty());
    drop(tensor(100)?);
    assert!(nccl.addresses().is_empty(), "nothing is reserved");

    comm.reserve(3 * MIB, &stream)?;
    let first = address(&tensor(100)?);
    assert_eq!(address(&tensor(3 * MIB)?), first, "it was given back");
    let [a, b] = [tensor(1)?, tensor(4 * MIB)?];
    assert_eq!(address(&a), first);
    let mut both = vec![address(&a), address(&b)];
    both.sort();
    assert_eq!(nccl.addresses(), both);
    // Equal calls take the same blocks, in whatever order they were given back.
    drop((b, a));
    let [a, b] = [tensor(2)?, tensor(2)?];
    assert_eq!((address(&a), both.contains(&address(&b))), (first, true));
    let large = tensor(5 * MIB)?;
    assert!(!both.contains(&address(&large)), "it is larger than a block");

    // Larger blocks take the place of those that nobody uses, and the others follow.
    drop(a);
    comm.reserve(9 * MIB, &stream)?;
    assert_eq!(nccl.addresses(), [address(&b)]);
    let large = tensor(9 * MIB)?;
    assert!(nccl.addresses().contains(&address(&large)));
    drop(b);
    assert_eq!(nccl.addresses(), [address(&large)]);
    comm.reserve(MIB, &stream)?;
    drop(large);
    assert_eq!(nccl.addresses().len(), 1, "blocks do not shrink");
    drop(comm);
    assert!(nccl.addresses().is_empty());
    assert_eq!(nccl.faults(), Vec::<String>::new());
    Ok(())
}

#[test]
fn tensors_outlive_their_communicator() -> Result<()> {
    let (nccl, device, stream, _turn) = setup();
    let comm = alone(&device);
    comm.reserve(MIB, &stream)?;
    let mut tensor = comm.tensor(&stream, DType::U8, &[MIB])?;
    drop(comm);
    tensor.fill_bytes(&stream, 7)?;
    assert_eq!(tensor.to_vec::<u8>(&stream)?, vec![7; MIB]);
    drop(tensor);
    assert!(nccl.addresses().is_empty());
    assert_eq!(nccl.faults(), Vec::<String>::new());
    Ok(())
}

#[test]
fn nothing_is_received_where_a_message_could_reach_further() -> Result<()> {
    let (nccl, device, stream, _turn) = setup();
    let comm = alone(&device);
    comm.reserve(2 * MIB, &stream)?;
    let mut tensor = comm.tensor(&stream, DType::U8, &[2 * MIB])?;
    let mut receive = |range| {
        let view = tensor.view_mut().slice(0, range).unwrap();
        comm.exchange(&[], &mut [(0, view)], &stream).unwrap_err().to_string()
    };
    assert!(receive(1..3).contains("beyond the block"));
    assert!(receive(0..3).contains("is not another rank"), "that is the next check");
    comm.reserve(4 * MIB, &stream)?;
    assert!(receive(0..3).contains("beyond the block"), "another rank may send more now");
    drop((tensor, comm));
    assert!(nccl.addresses().is_empty());
    assert_eq!(nccl.faults(), Vec::<String>::new());
    Ok(())
}

#[test]
fn absurd_sizes_are_errors() -> Result<()> {
    let (nccl, device, stream, _turn) = setup();
    let comm = alone(&device);
    comm.reserve(usize::MAX, &stream)?;
    let error = comm.tensor(&stream, DType::U8, &[1]).map(drop).unwrap_err();
    assert!(matches!(error, Error::Nccl { call: "ncclMemAlloc", .. }), "{error}");
    drop(comm);
    assert_eq!(nccl.faults(), Vec::<String>::new());
    Ok(())
}

#[test]
fn an_aborted_communicator_lends_nothing() -> Result<()> {
    if !has_its_own_process("an_aborted_communicator_lends_nothing") {
        return Ok(());
    }
    let (nccl, device, stream, _turn) = setup();
    let comm = alone(&device);
    comm.reserve(MIB, &stream)?;
    let tensor = comm.tensor(&stream, DType::U8, &[MIB])?;
    comm.abort("a test");
    let error = comm.tensor(&stream, DType::U8, &[1]).map(drop).unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
    let kept = address(&tensor);
    drop((tensor, comm));
    assert_eq!(nccl.addresses(), [kept], "another rank may still write there");
    assert_eq!(nccl.faults(), Vec::<String>::new());
    Ok(())
}

fn ranks<T: Send>(
    device: &Device,
    world: usize,
    call: impl Fn(NcclCommunicator, Stream) -> T + Sync,
) -> Vec<T> {
    let join = |id: &NcclId, rank| NcclCommunicator::new(device, id, rank, world, TIMEOUT);
    ranks_by(device, world, join, call)
}

#[test]
fn ranks_exchange() {
    if !has_its_own_process("ranks_exchange") {
        return;
    }
    let (nccl, device, _, _turn) = setup();
    let found = ranks(&device, 3, |comm, stream| {
        // Ranks of one process get no memory for messages.
        comm.reserve(MIB, &stream).unwrap();
        let mut theirs = comm.tensor(&stream, DType::I32, &[2]).unwrap();
        let ours = [comm.rank() as i32, 7];
        let ours = Tensor::from_slice(&stream, &ours, &[2]).unwrap();
        let (to, from) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
        comm.exchange(&[(to, ours.view())], &mut [(from, theirs.view_mut())], &stream).unwrap();
        comm.wait(&stream).unwrap();
        theirs.to_vec::<i32>(&stream).unwrap()
    });
    assert_eq!(found, [[2, 7], [0, 7], [1, 7]]);
    assert!(nccl.addresses().is_empty());
    assert_eq!(nccl.faults(), Vec::<String>::new());
}

#[test]
fn a_rank_that_does_not_send_is_lost() {
    if !has_its_own_process("a_rank_that_does_not_send_is_lost") {
        return;
    }
    let (nccl, device, _, _turn) = setup();
    let errors = ranks(&device, 2, |comm, stream| {
        if comm.rank() == 1 {
            return Vec::new();
        }
        let mut theirs = Tensor::empty(&stream, DType::U8, &[1]).unwrap();
        let mut receive =
            || comm.exchange(&[], &mut [(1, theirs.view_mut())], &stream).map(drop).unwrap_err();
        vec![receive(), receive(), comm.reserve(1, &stream).unwrap_err()]
    });
    assert_eq!(errors[0].len(), 3);
    for error in &errors[0] {
        assert!(matches!(error, Error::Lost { .. }), "{error}");
    }
    assert_eq!(nccl.faults(), Vec::<String>::new());
}

/// Kernels compute nothing here, but what is sent has the size that is received.
#[test]
fn attention_over_ranks_sends_what_is_expected() {
    if !has_its_own_process("attention_over_ranks_sends_what_is_expected") {
        return;
    }
    let (nccl, device, _, _turn) = setup();
    ranks(&device, 4, |comm, stream| {
        let comm = Nccl::direct(comm).unwrap();
        let shard = Shard::new(1003, comm.world(), comm.rank()).unwrap();
        let tensor = |heads| Tensor::zeros(&stream, DType::F16, &[1, shard.rows(), heads, 64]);
        let [q, k, v] = [tensor(8), tensor(4), tensor(4)].map(Result::unwrap);
        for scheme in Scheme::all(4, 4) {
            for mask in [Mask::Full, Mask::causal()] {
                let attention = Attention { mask, ..Attention::new(q.view(), k.view(), v.view()) };
                let (block_mask, cu_seqlens) = (None, None);
                let call =
                    DistributedAttention { attention, shard, scheme, block_mask, cu_seqlens };
                let output = call.forward(&comm, &stream).unwrap();
                call.backward(&output, q.view(), &comm, &stream).unwrap();
                comm.wait(&stream).unwrap();
            }
        }
    });
    assert_eq!(nccl.faults(), Vec::<String>::new());
}
