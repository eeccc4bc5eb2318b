//! Whether strided tensors share memory, exactly: does a sum of multiples, each up to a limit, give
//! a certain number?

use crate::layout::MAX_RANK;
use crate::{DType, Layout};
use std::ops::Range;

/// The bytes that a tensor's elements take: all of its span but the gaps.
#[derive(Clone, Copy, Debug)]
pub struct Footprint<'l> {
    /// Of the first element.
    pub address: usize,
    /// Element type.
    pub dtype: DType,
    /// Shape and strides.
    pub layout: &'l Layout,
}

impl Footprint<'_> {
    /// Addresses from the first element to the end of the last one, gaps included.
    #[inline]
    pub fn span(&self) -> Range<usize> {
        self.address..self.address.wrapping_add(self.layout.span() * self.dtype.size())
    }

    /// Whether the spans have a byte in common, if only one in a gap.
    #[inline]
    fn interleaves(&self, other: &Footprint<'_>) -> bool {
        let (own, others) = (self.span(), other.span());
        own.start.max(others.start) < own.end.min(others.end)
    }

    /// Whether an element of one shares a byte with an element of the other. K and V in one buffer
    /// `[batch, slots, 2, heads, head_dim]` do not.
    ///
    /// Exact, but for strides that have nothing to do with each other over very many elements:
    /// where some thousands of steps decide nothing, tensors count as sharing.
    #[inline]
    pub fn overlaps(&self, other: &Footprint<'_>) -> bool {
        self.interleaves(other) && self.meets(other)
    }

    fn meets(&self, other: &Footprint<'_>) -> bool {
        // An own offset equals an offset of the other one, seen from the end of the other span:
        // then all multiples are positive.
        let target = other.span().end - 1 - self.address;
        let mut sum = Sum::default();
        for Footprint { dtype, layout, .. } in [self, other] {
            sum.add(1, dtype.size() - 1);
            for (&size, &stride) in layout.shape().iter().zip(layout.strides()) {
                sum.add(stride * dtype.size(), size - 1);
            }
        }
        sum.gives(target)
    }
}

/// See [`Layout::overlaps_itself`], for a layout with elements.
pub(crate) fn overlaps_itself(layout: &Layout) -> bool {
    // The difference of two indices of one element: `first` is the first dimension in which they
    // differ, by at least one.
    let dims = || layout.shape().iter().zip(layout.strides()).filter(|&(&size, _)| size > 1);
    dims().enumerate().any(|(first, (&size, &stride))| {
        let mut sum = Sum::default();
        sum.add(stride, size - 2);
        let mut target = 0;
        for (&size, &stride) in dims().skip(first + 1) {
            // From `1 - size` to `size - 1`.
            sum.add(stride, 2 * (size - 1));
            target += stride * (size - 1);
        }
        target >= stride && sum.gives(target - stride)
    })
}

/// Dimensions of two tensors, and the bytes of their elements.
const MOST: usize = 2 * (MAX_RANK + 1);

/// Steps after which a search gives up.
const PATIENCE: usize = 10_000;

/// `step * n` with `n` from 0 to `most`.
#[derive(Clone, Copy, Default)]
struct Term {
    step: usize,
    most: usize,
}

/// Terms of positive steps, descending.
#[derive(Default)]
struct Sum {
    terms: [Term; MOST],
    count: usize,
}

impl Sum {
    fn add(&mut self, step: usize, most: usize) {
        if step == 0 || most == 0 {
            return;
        }
        let at = self.terms().partition_point(|term| term.step >= step);
        self.terms.copy_within(at..self.count, at + 1);
        self.terms[at] = Term { step, most };
        self.count += 1;
    }

    fn terms(&self) -> &[Term] {
        &self.terms[..self.count]
    }

    /// Terms whose sum has no gaps become one: all but one term for a contiguous tensor.
    fn join(&mut self) {
        let mut at = self.count;
        while at > 1 {
            at -= 1;
            let [large, small] = [self.terms[at - 1], self.terms[at]];
            let times = large.step / small.step;
            if times * small.step == large.step && times <= small.most + 1 {
                self.terms[at - 1] =
                    Term { step: small.step, most: small.most + times * large.most };
                self.terms.copy_within(at + 1..self.count, at);
                self.count -= 1;
            }
        }
    }

    /// Whether the sum can be `target`; true, too, if the search gives up.
    fn gives(mut self, target: usize) -> bool {
        self.join();
        // The largest sum of the terms from each one on.
        let mut reach = [0; MOST + 1];
        for (at, term) in self.terms().iter().enumerate().rev() {
            reach[at] = reach[at + 1] + term.step * term.most;
        }
        let mut patience = PATIENCE;
        search(self.terms(), &reach[..=self.count], target, &mut patience).unwrap_or(true)
    }
}

/// Whether the sum of these terms can be `target`; `None` when patience is at its end.
fn search(terms: &[Term], reach: &[usize], target: usize, patience: &mut usize) -> Option<bool> {
    let ([term, rest @ ..], [_, after @ ..]) = (terms, reach) else { return Some(target == 0) };
    *patience = patience.checked_sub(1)?;
    if target > reach[0] {
        return Some(false);
    }
    // The first terms give multiples of their common divisor, so the others give the remainder.
    let mut divisor = 0;
    for (term, &others) in terms.iter().zip(after) {
        divisor = common_divisor(divisor, term.step);
        if target % divisor > others {
            return Some(false);
        }
    }
    let least = target.saturating_sub(after[0]).div_ceil(term.step);
    for times in (least..=term.most.min(target / term.step)).rev() {
        if search(rest, after, target - times * term.step, patience)? {
            return Some(true);
        }
    }
    Some(false)
}

fn common_divisor(mut a: usize, mut b: usize) -> usize {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
#[path = "overlap_tests.rs"]
mod tests;
