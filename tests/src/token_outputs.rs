//! Outputs of the last tokens of sequences over their keys: where they are, poisoned before a call,
//! and judged after it.

use crate::host::{download, poisoned};
use crate::number::{decode, poison, unit_roundoff};
use crate::tolerance::{Reference, check};
use blockflash_ops::{DType, Stream, Tensor, View, ViewMut};
use blockflash_oracle::{PRODUCTS, Rounding};

/// Columns of NaN behind each row of queries and outputs.
pub(crate) const GAP: usize = 8;

/// The tokens of a call.
#[derive(Clone)]
pub(crate) struct Tokens {
    /// Of each sequence.
    pub(crate) queries: Vec<usize>,
    pub(crate) packed: bool,
    pub(crate) heads: usize,
    /// Columns of an output.
    pub(crate) width: usize,
    pub(crate) dtype: DType,
}

impl Tokens {
    /// Rows with a gap behind this many columns.
    pub(crate) fn rows_shape(&self, columns: usize) -> Vec<usize> {
        match self.packed {
            true => vec![self.total(), self.heads, columns + GAP],
            false => vec![self.queries.len(), self.longest(), self.heads, columns + GAP],
        }
    }

    fn total(&self) -> usize {
        self.queries.iter().sum()
    }

    fn longest(&self) -> usize {
        self.queries.iter().copied().max().unwrap_or(0)
    }

    /// Where the log-sum-exp of each token and head is, by sequences, tokens, and then heads.
    fn places_of_lse(&self) -> Vec<usize> {
        let (heads, total) = (self.heads, self.total());
        let (mut places, mut start) = (Vec::with_capacity(total * heads), 0);
        for (b, &queries) in self.queries.iter().enumerate() {
            for (query, head) in (0..queries).flat_map(|i| (0..heads).map(move |h| (i, h))) {
                places.push(match self.packed {
                    true => head * total + start + query,
                    false => (b * heads + head) * queries + query,
                });
            }
            start += queries;
        }
        places
    }
}

/// The outputs of a case on a device.
pub(crate) struct TokenOutputs {
    tokens: Tokens,
    o: Tensor,
    lse: Tensor,
}

impl TokenOutputs {
    pub(crate) fn poisoned(tokens: Tokens, stream: &Stream) -> Result<Self, String> {
        let lse = match tokens.packed {
            true => vec![tokens.heads, tokens.total()],
            false => vec![tokens.queries.len(), tokens.heads, tokens.longest()],
        };
        let o = poisoned(stream, tokens.dtype, &tokens.rows_shape(tokens.width))?;
        Ok(Self { tokens, o, lse: poisoned(stream, DType::F32, &lse)? })
    }

    /// What a call writes: o without its gap, and the log-sum-exp.
    pub(crate) fn views(&mut self) -> (ViewMut<'_>, ViewMut<'_>) {
        let o = self.o.view_mut();
        let last = o.shape().len() - 1;
        let o = o.slice(last, 0..self.tokens.width).expect("a tensor with a gap");
        (o, self.lse.view_mut())
    }

    pub(crate) fn bits(&self, stream: &Stream) -> Result<[Vec<u32>; 2], String> {
        Ok([download(stream, &self.o)?, download(stream, &self.lse)?])
    }

    /// Judges the outputs by references of o and lse, of rows that see `most_keys` at most, with
    /// queries of this many columns; returns how many were compared.
    pub(crate) fn check(
        &self,
        [reference, of_lse]: &[Reference; 2],
        most_keys: usize,
        columns: usize,
        stream: &Stream,
    ) -> Result<usize, String> {
        let (Tokens { heads, width, dtype, .. }, [o, lse]) = (&self.tokens, self.bits(stream)?);
        let (heads, width, dtype) = (*heads, *width, *dtype);
        let mut found = Vec::with_capacity(o.len());
        for (row, bits) in o.chunks(width + GAP).enumerate() {
            if bits[width..].iter().any(|&bits| bits != poison(dtype)) {
                return Err(format!("the gap behind row {row} of o was written"));
            }
            if bits[..width].contains(&poison(dtype)) {
                return Err(format!("row {row} of o was not written"));
            }
            found.extend(bits[..width].iter().map(|&bits| f64::from(decode(dtype, bits))));
        }
        let largest = of_lse.magnitude.iter().copied().filter(|size| size.is_finite());
        let largest = largest.fold(0.0, f64::max);
        let steps = 8 + columns.div_ceil(PRODUCTS);
        let rounding = Rounding {
            factor: Some(dtype),
            exponent: steps as f64 * unit_roundoff(DType::F32) * largest,
            ..Rounding::of_products(most_keys, 1, dtype)
        };
        let name = |row: usize| format!("token {}, head {}", row / heads, row % heads);
        check(&found, reference, &rounding, |at| {
            format!("o[{}, {}]", name(at / width), at % width)
        })?;
        let logs = self.tokens.places_of_lse().into_iter();
        let logs: Vec<_> = logs.map(|at| f64::from(f32::from_bits(lse[at]))).collect();
        let rounding = Rounding::of_products(0, steps, DType::F32);
        check(&logs, of_lse, &rounding, |row| format!("lse[{}]", name(row)))?;
        Ok(2)
    }
}

/// The first columns of a tensor.
pub(crate) fn columns(tensor: &Tensor, count: usize) -> View<'_> {
    columns_of(tensor.view(), count)
}

/// The first columns of a view.
pub(crate) fn columns_of(view: View<'_>, count: usize) -> View<'_> {
    let last = view.shape().len() - 1;
    view.slice(last, 0..count).expect("a tensor with a gap")
}
