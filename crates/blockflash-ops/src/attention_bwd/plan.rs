use super::AttentionBackwardProblem;
use crate::{Error, Result};
use blockflash_sys::Kernel;

/// Queries that a kernel takes at a time. In the workspace each sequence starts at a multiple, so
/// that statistics of a tile are never those of two sequences.
const ROWS: usize = 64;

/// Bytes of workspace that a kernel needs for a problem that it accepts: for each query of each
/// head of q the sum of `o · d_o` in f32.
///
/// # Errors
/// [`Error::TooLarge`] beyond the address space.
pub fn workspace_bytes(_: &Kernel, problem: &AttentionBackwardProblem) -> Result<usize> {
    let forward = &problem.forward;
    let (groups, rows) = match forward.packed {
        None => (forward.batch, forward.seqlen_q.checked_next_multiple_of(ROWS)),
        // Sequence `i` starts at `(cu_seqlens[i] / ROWS + i) · ROWS`.
        Some(packed) => (1, (packed.total_q / ROWS + forward.batch).checked_mul(ROWS)),
    };
    rows.and_then(|rows| rows.checked_mul(groups))
        .and_then(|rows| rows.checked_mul(forward.num_heads_q))
        .and_then(|sums| sums.checked_mul(size_of::<f32>()))
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or(Error::TooLarge { what: "workspace", value: usize::MAX, limit: isize::MAX as usize })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{AttentionProblem, PackedRows};
    use blockflash_sys::{DType, manifest};

    fn bytes(forward: AttentionProblem) -> Result<usize> {
        workspace_bytes(&manifest::kernels()[0], &AttentionBackwardProblem::of(forward))
    }

    #[test]
    fn sums_of_whole_tiles() {
        let dense = AttentionProblem::dense(DType::F16, [2, 65, 7], [6, 3], 64);
        assert_eq!(bytes(dense).unwrap(), 2 * 6 * 128 * 4);
        let packed = Some(PackedRows { total_q: 130, total_kv: 7 });
        assert_eq!(bytes(AttentionProblem { packed, ..dense }).unwrap(), 6 * (2 + 2) * 64 * 4);
        assert_eq!(bytes(AttentionProblem { seqlen_q: 0, ..dense }).unwrap(), 0);
        let huge = AttentionProblem { batch: 1 << 31, seqlen_q: 1 << 30, ..dense };
        assert!(matches!(bytes(huge), Err(Error::TooLarge { what: "workspace", .. })));
    }

    /// Whatever the lengths are, no sequence reaches into the next one or beyond the end.
    #[test]
    fn packed_sequences_have_room() {
        for lengths in [&[1usize, 64, 0, 63, 2][..], &[64; 3], &[0, 0], &[200]] {
            let mut end = 0;
            let mut first = 0;
            for (i, &length) in lengths.iter().enumerate() {
                let start = (first / ROWS + i) * ROWS;
                assert!(start >= end, "{lengths:?}");
                end = start + length.next_multiple_of(ROWS);
                first += length;
            }
            assert!(end <= (first / ROWS + lengths.len()) * ROWS, "{lengths:?}");
        }
    }
}
