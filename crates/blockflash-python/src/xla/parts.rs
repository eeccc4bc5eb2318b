//! The batch dimensions that `vmap` puts before those of a call.

use crate::error::{Failure, Result};

/// What of a call is computed at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Part {
    /// All of it: dimensions of vmap are a part of the batch.
    All,
    /// One entry of vmap.
    Entry(usize),
}

/// The dimensions of vmap.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lead<'a>(pub(super) &'a [i64]);

/// Elements of a row-major buffer.
#[derive(Debug, PartialEq)]
pub(super) struct Region {
    /// The first element.
    pub(super) offset: usize,
    pub(super) shape: Vec<i64>,
    /// In elements.
    pub(super) strides: Vec<i64>,
}

impl Lead<'_> {
    /// How many entries there are.
    pub(super) fn count(self) -> usize {
        // They are dimensions of a buffer, whose elements can be counted.
        self.0.iter().map(|&size| size as usize).product()
    }

    /// The sizes of vmap among those of a buffer, which are as of all or 1, and the others.
    fn split<'d>(self, what: &str, dims: &'d [i64]) -> Result<(&'d [i64], &'d [i64])> {
        let lead = dims.get(..self.0.len());
        let fits =
            |lead: &&[i64]| lead.iter().zip(self.0).all(|(&one, &all)| one == all || one == 1);
        match lead.filter(fits) {
            Some(lead) => Ok((lead, &dims[lead.len()..])),
            None => {
                let text = format!("{what} has shape {dims:?}, expected {:?} first", self.0);
                Err(Failure::value(text))
            }
        }
    }

    /// The elements of a part, where the batch of a call has this size; `None` if those of all
    /// entries are no tensor.
    pub(super) fn region(
        self,
        what: &str,
        dims: &[i64],
        part: Part,
        batch: Option<i64>,
    ) -> Result<Option<Region>> {
        let (lead, own) = self.split(what, dims)?;
        let all = strides(dims);
        let mut offset = 0;
        let mut shape = own.to_vec();
        match part {
            Part::Entry(entry) => {
                let mut rest = entry;
                for ((&size, &of_all), stride) in lead.iter().zip(self.0).zip(&all).rev() {
                    let at = rest % (of_all as usize).max(1);
                    rest /= (of_all as usize).max(1);
                    offset += if size == 1 { 0 } else { at * *stride as usize };
                }
            }
            Part::All if self.count() == 1 => {}
            Part::All if own.len() > 1 && lead == self.0 && own.first() == batch.as_ref() => {
                shape[0] *= self.count() as i64;
            }
            // What has no batch, or one for all.
            Part::All if lead.iter().all(|&size| size == 1) => {
                if own.len() > 1 && own[0] != 1 || is_of_tokens(what) {
                    return Ok(None);
                }
            }
            Part::All => return Ok(None),
        }
        let strides = strides(&shape);
        Ok(Some(Region { offset, shape, strides }))
    }
}

/// Whether one batch entry does not serve all, as it does in what is broadcast.
fn is_of_tokens(what: &str) -> bool {
    matches!(what, "q" | "k" | "v" | "o" | "lse" | "d_o")
}

/// The strides of a row-major shape.
fn strides(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1i64; shape.len()];
    for at in (1..shape.len()).rev() {
        // A buffer without elements may have sizes whose product is too large.
        strides[at - 1] = strides[at].saturating_mul(shape[at]);
    }
    strides
}
