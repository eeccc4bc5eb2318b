use crate::check::{Operand, vector};
use crate::{BlockGeometry, BlockMask, Error, Result};
use blockflash_safe::{Stream, View};
use blockflash_sys::DType;

/// Where the sequences of a variable-length batch are in the packed tensors: sequence `i` has the
/// queries `q[i]..q[i + 1]` and the keys `kv[i]..kv[i + 1]`. Sequences may have length 0.
///
/// On a GPU the kernel reads the offsets, never the host, so a captured graph can be replayed with
/// other lengths under the same maxima. Valid offsets start at 0, never descend, end within the
/// packed rows, and make no sequence longer than the maximum; under a [`BlockMask`] each sequence
/// has exactly the length in the mask. Kernels clamp invalid offsets: nothing outside the tensors
/// is read or written whatever they are, but the content of the output rows is then unspecified.
/// [`Attention::check_cu_seqlens`](super::Attention::check_cu_seqlens) downloads and verifies the
/// offsets, and [`set_checks`](crate::set_checks) lets every call do so. On the CPU every call
/// verifies them. The maxima are promises: a greater one costs nothing but time. A maximum of 0 is
/// an error if there are sequences and packed rows.
///
/// Rows of the packed outputs beyond the last offset are left untouched.
#[derive(Clone, Copy, Debug)]
pub struct CuSeqlens<'a> {
    /// i32 `[batch + 1]`: offsets of the queries.
    pub q: View<'a>,
    /// i32 `[batch + 1]`: offsets of the keys and values.
    pub kv: View<'a>,
    /// Upper bound on the queries of a sequence.
    pub max_seqlen_q: usize,
    /// Upper bound on the keys of a sequence.
    pub max_seqlen_kv: usize,
}

impl CuSeqlens<'_> {
    /// Number of sequences.
    pub(crate) fn batch(&self) -> Result<usize> {
        let operand = Operand::new("cu_seqlens.q", &self.q);
        match *operand.shape {
            [length] if length >= 1 => {
                vector("cu_seqlens.q", &self.q, DType::I32, &[length])?;
                vector("cu_seqlens.kv", &self.kv, DType::I32, &[length])?;
                Ok(length - 1)
            }
            _ => Err(operand.wrong_shape("[batch + 1]")),
        }
    }

    /// Downloads the offsets, which synchronises the stream, and verifies that they start at 0,
    /// never descend, and make no sequence longer than the maximum.
    /// [`Attention::check_cu_seqlens`](super::Attention::check_cu_seqlens) also knows the number of
    /// packed rows.
    ///
    /// # Errors
    /// [`Error::InvalidCuSeqlens`] names the first bad entry; [`Error::Shape`] and [`Error::DType`]
    /// if the offsets are not i32 vectors of equal length.
    pub fn check(&self, stream: &Stream) -> Result<()> {
        self.batch()?;
        check_offsets("q", &self.q.to_vec::<i32>(stream)?, self.max_seqlen_q, None)?;
        check_offsets("kv", &self.kv.to_vec::<i32>(stream)?, self.max_seqlen_kv, None)
    }

    /// Like [`check`](Self::check), and also checks the offsets against the packed rows and the
    /// sequences of the block mask if there is one. Returns the offsets.
    pub(crate) fn read(
        &self,
        stream: &Stream,
        total_q: usize,
        total_kv: usize,
        mask: Option<&BlockMask>,
    ) -> Result<(Vec<i32>, Vec<i32>)> {
        self.batch()?;
        let (q, kv) = (self.q.to_vec::<i32>(stream)?, self.kv.to_vec::<i32>(stream)?);
        check_offsets("q", &q, self.max_seqlen_q, Some(total_q))?;
        check_offsets("kv", &kv, self.max_seqlen_kv, Some(total_kv))?;
        if let Some(mask) = mask {
            mask.check_lengths("q", &q, BlockGeometry::seqlen_q)?;
            mask.check_lengths("kv", &kv, BlockGeometry::seqlen_kv)?;
        }
        Ok((q, kv))
    }
}

/// Checks that a maximum of 0 is not of packed rows: a kernel would skip all of them.
pub(crate) fn check_maximum(
    what: &'static str,
    [batch, max_seqlen]: [usize; 2],
    rows: usize,
) -> Result<()> {
    if batch > 0 && max_seqlen == 0 && rows > 0 {
        return Err(Error::MaxSeqlen { what, rows });
    }
    Ok(())
}

/// Verifies one offset array.
pub(crate) fn check_offsets(
    which: &'static str,
    offsets: &[i32],
    max_seqlen: usize,
    total: Option<usize>,
) -> Result<()> {
    let bad = |index: usize, problem: String| {
        Err(Error::InvalidCuSeqlens { which, index, value: offsets[index], problem })
    };
    if offsets.first().is_some_and(|&first| first != 0) {
        return bad(0, "the first offset must be 0".into());
    }
    for (index, pair) in offsets.windows(2).enumerate() {
        // The first offset is 0 and none descends, so differences cannot overflow.
        if pair[1] < pair[0] {
            return bad(
                index + 1,
                format!("offsets must not descend, the one before is {}", pair[0]),
            );
        }
        let length = (pair[1] - pair[0]) as usize;
        if length > max_seqlen {
            return bad(
                index + 1,
                format!("sequence {index} has {length} rows, the maximum is {max_seqlen}"),
            );
        }
    }
    match (offsets.last(), total) {
        (Some(&last), Some(total)) if last as usize > total => {
            bad(offsets.len() - 1, format!("the packed tensor has {total} rows"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(offsets: &[i32], max_seqlen: usize, total: Option<usize>) -> String {
        check_offsets("q", offsets, max_seqlen, total).unwrap_err().to_string()
    }

    #[test]
    fn good_offsets() {
        for offsets in [&[0][..], &[0, 0], &[0, 3, 3, 10], &[0, 7, 8]] {
            check_offsets("q", offsets, 7, Some(10)).unwrap();
            check_offsets("q", offsets, 7, None).unwrap();
        }
    }

    #[test]
    fn bad_offsets_are_named() {
        assert_eq!(problem(&[1, 2], 7, None), "cu_seqlens.q[0] is 1: the first offset must be 0");
        assert_eq!(
            problem(&[0, 5, 4], 7, None),
            "cu_seqlens.q[2] is 4: offsets must not descend, the one before is 5"
        );
        assert!(problem(&[0, i32::MIN], 7, None).contains("must not descend"));
        assert_eq!(
            problem(&[0, 1, 9], 7, None),
            "cu_seqlens.q[2] is 9: sequence 1 has 8 rows, the maximum is 7"
        );
        assert_eq!(
            problem(&[0, 5, 10], 7, Some(9)),
            "cu_seqlens.q[2] is 10: the packed tensor has 9 rows"
        );
    }
}
