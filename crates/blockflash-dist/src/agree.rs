//! Whether all ranks make the same call.

use crate::exchange::{Messages, exchange};
use crate::{Communicator, Error, Result};
use blockflash_ops::{DType, Tensor};

/// Compares the arguments of all ranks. `valid`: whether this rank accepts its own. Gives the other
/// words of all ranks, in their order.
///
/// # Errors
/// [`Error::Refused`] and [`Error::Mismatch`], the same on every rank; those of an exchange.
pub(crate) fn agree<const N: usize>(
    comm: &dyn Communicator,
    valid: bool,
    arguments: &[(&'static str, u64)],
    others: [u64; N],
) -> Result<Vec<[u64; N]>> {
    const WORD: usize = size_of::<u64>();
    let values = arguments.iter().map(|(_, value)| *value);
    let words: Vec<u64> = [u64::from(valid)].into_iter().chain(values).chain(others).collect();
    let (stream, size) = (comm.stream(), words.len() * WORD);
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let ours = Tensor::from_slice(stream, &bytes, &[size])?;
    let empty = || Tensor::empty(stream, DType::U8, &[size]);
    let mut theirs = (0..comm.world()).map(|_| empty()).collect::<Result<Vec<_>, _>>()?;
    let peers = |&rank: &usize| rank != comm.rank();
    let sends = (0..comm.world()).filter(peers).map(|rank| (rank, ours.view())).collect();
    let receives = theirs.iter_mut().enumerate().filter(|(rank, _)| peers(rank));
    let receives = receives.map(|(rank, tensor)| (rank, tensor.view_mut())).collect();
    exchange(comm, Messages { sends, receives })?;
    comm.wait(stream)?;
    let read = |(rank, tensor): (usize, &Tensor)| -> Result<Vec<u64>> {
        if rank == comm.rank() {
            return Ok(words.clone());
        }
        let bytes = tensor.to_vec::<u8>(stream)?;
        let word =
            |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
        Ok(bytes.chunks(WORD).map(word).collect())
    };
    let all = theirs.iter().enumerate().map(read).collect::<Result<Vec<_>>>()?;
    if let Some(rank) = all.iter().position(|words| words[0] == 0) {
        return Err(Error::Refused { rank });
    }
    for (rank, words) in all.iter().enumerate() {
        for (at, (what, _)) in arguments.iter().enumerate() {
            let [found, expected] = [words[at + 1], all[0][at + 1]];
            if found != expected {
                return Err(Error::Mismatch { what, rank, found, expected });
            }
        }
    }
    let others = |words: &Vec<u64>| std::array::from_fn(|at| words[arguments.len() + 1 + at]);
    Ok(all.iter().map(others).collect())
}
