//! Which ranks exchange what.

use crate::scheme::Scheme;
use crate::{Communicator, Error, Result, Shard};
use std::ops::Range;

impl Scheme {
    /// # Errors
    /// [`Error::Scheme`].
    fn check_ranks(&self, world: usize) -> Result<()> {
        if self.heads == 0 || self.heads.checked_mul(self.keys) != Some(world) {
            let what = format!("there are {world} ranks, expected {} · {}", self.heads, self.keys);
            return Err(Error::Scheme { scheme: *self, what });
        }
        Ok(())
    }

    /// # Errors
    /// [`Error::Scheme`].
    pub(crate) fn check_heads(&self, heads_q: usize, heads_kv: usize) -> Result<()> {
        if ![heads_q, heads_kv].iter().all(|heads| heads.is_multiple_of(self.heads)) {
            let what = format!(
                "there are {heads_q} heads of q and {heads_kv} of k, expected multiples of {}",
                self.heads
            );
            return Err(Error::Scheme { scheme: *self, what });
        }
        Ok(())
    }
}

/// A chunk of a rank of a group.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    /// The place of the rank in the group.
    pub(crate) member: usize,
    /// Its rows in the tensors of that rank.
    pub(crate) own: Range<usize>,
    /// Its rows in the tensors of the group.
    pub(crate) common: Range<usize>,
}

/// The place of a rank in a scheme that fits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Grid {
    pub(crate) scheme: Scheme,
    /// The rows of this rank.
    pub(crate) shard: Shard,
}

impl Grid {
    /// # Errors
    /// [`Error::Scheme`]; [`Error::Size`] for the rows of another rank.
    pub(crate) fn new(scheme: Scheme, shard: Shard, comm: &dyn Communicator) -> Result<Grid> {
        for (what, value, expected) in [
            ("the number of ranks of the shard", shard.world(), comm.world()),
            ("the rank of the shard", shard.rank(), comm.rank()),
        ] {
            if value != expected {
                return Err(Error::Size { what, value, expected: expected.to_string() });
            }
        }
        Grid::of(scheme, shard)
    }

    /// # Errors
    /// [`Error::Scheme`].
    pub(crate) fn of(scheme: Scheme, shard: Shard) -> Result<Grid> {
        scheme.check_ranks(shard.world())?;
        Ok(Grid { scheme, shard })
    }

    /// The group of this rank.
    pub(crate) fn group(&self) -> usize {
        self.shard.rank() / self.scheme.heads
    }

    /// The place of this rank in its group.
    pub(crate) fn member(&self) -> usize {
        self.shard.rank() % self.scheme.heads
    }

    /// The rank with a place in the group of this rank.
    pub(crate) fn in_group(&self, member: usize) -> usize {
        self.group() * self.scheme.heads + member
    }

    /// The rank in another group with the heads of this one.
    pub(crate) fn in_ring(&self, group: usize) -> usize {
        group * self.scheme.heads + self.member()
    }

    /// The rows of a group: its ranks' first chunks are one range of the sequence, and so are their
    /// second chunks, which makes a group a rank of a larger kind.
    pub(crate) fn rows_of(&self, group: usize) -> Shard {
        self.shard.of(self.scheme.keys, group)
    }

    /// The most rows that any rank has.
    pub(crate) fn most_rows(&self) -> usize {
        let world = self.shard.world();
        (0..world).map(|rank| self.shard.of(world, rank).rows()).max().unwrap_or(0)
    }

    /// The heads of this rank, of this many.
    pub(crate) fn heads(&self, of: usize) -> Range<usize> {
        let heads = of / self.scheme.heads;
        self.member() * heads..(self.member() + 1) * heads
    }

    /// Both chunks of each rank of this group.
    pub(crate) fn pieces(&self) -> Vec<Piece> {
        let group = self.rows_of(self.group());
        let starts = group.ranges().map(|range| range.start);
        let mut pieces = Vec::with_capacity(2 * self.scheme.heads);
        for member in 0..self.scheme.heads {
            let shard = self.shard.of(self.shard.world(), self.in_group(member));
            let bases = [(0, 0), (shard.first(), group.first())];
            for ((range, start), (own, common)) in shard.ranges().into_iter().zip(starts).zip(bases)
            {
                let common = range.start - start + common;
                let [own, common] = [own, common].map(|start| start..start + range.len());
                pieces.push(Piece { member, own, common });
            }
        }
        pieces
    }
}
