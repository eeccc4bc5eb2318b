use crate::check::{Operand, contiguous, to_i32};
use crate::kv_cache::CacheSizes;
use crate::{Error, Result};
use blockflash_safe::{Stream, View};
use blockflash_sys::DType;

/// The pages that the queries of a sequence visit, chosen for each head of keys. Lists and counts
/// are read on the device at each launch.
///
/// A list holds columns of the block table, ascending and without repeats. A count below 0 is 0,
/// and one beyond the capacity is the capacity. For other lists the content of the output is
/// unspecified ([`set_checks`](crate::set_checks) makes them errors), but nothing outside the
/// tensors is touched. Masks look at the positions that keys
/// have in their sequence; keys at or beyond its length do not exist in listed pages either.
#[derive(Clone, Copy, Debug)]
pub struct PageLists<'a> {
    /// i32 `[batch, num_heads_kv, capacity]`, contiguous.
    pub lists: View<'a>,
    /// i32 `[batch]`: entries of the lists of each sequence, the same for all heads.
    pub counts: View<'a>,
}

/// [`PageLists`] reduced to plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageListSizes {
    /// Room of a list.
    pub capacity: usize,
}

impl PageLists<'_> {
    /// The sizes, checked for a cache.
    pub(super) fn sizes(&self, cache: &CacheSizes) -> Result<PageListSizes> {
        let (lists, counts) =
            (Operand::new("pages.lists", &self.lists), Operand::new("pages.counts", &self.counts));
        let &[_, _, capacity] = lists.shape else {
            return Err(lists.wrong_shape("[batch, num_heads_kv, capacity]"));
        };
        if cache.table.is_none() {
            let (expected, found) = ("no lists without a block table".into(), lists.shape.to_vec());
            return Err(Error::Shape { what: "pages.lists", expected, found });
        }
        let shape = [cache.batch, cache.num_heads_kv, capacity];
        contiguous("pages.lists", &self.lists, DType::I32, &shape)?;
        contiguous(
            "pages.counts",
            &self.counts,
            DType::I32,
            &[counts.shape.len(), cache.batch][1..],
        )?;
        to_i32("pages.lists", capacity)?;
        Ok(PageListSizes { capacity })
    }
}

/// The lists of a call in host memory.
pub(super) struct HostPages {
    lists: Vec<i32>,
    counts: Vec<i32>,
    capacity: usize,
    cache: CacheSizes,
}

impl HostPages {
    pub(super) fn new(pages: &PageLists<'_>, cache: CacheSizes, stream: &Stream) -> Result<Self> {
        let (lists, counts) = (pages.lists.to_vec(stream)?, pages.counts.to_vec(stream)?);
        Ok(Self { lists, counts, capacity: pages.lists.shape()[2], cache })
    }

    /// Verifies that counts are within the room of the lists, and that columns of the block table
    /// exist and ascend.
    pub(super) fn verify(&self) -> Result<()> {
        let (capacity, heads) = (self.capacity, self.cache.num_heads_kv);
        let columns = self.cache.table.map_or(0, |table| table.max_pages);
        for (entry, &value) in self.counts.iter().enumerate() {
            let wrong = |what, index, value, problem| {
                Err(Error::InvalidData { what, index, value, problem })
            };
            let Some(count) = usize::try_from(value).ok().filter(|&count| count <= capacity) else {
                let problem = format!("a list has 0 to {capacity} entries");
                return wrong("pages.counts", vec![entry], value, problem);
            };
            for head in 0..heads {
                let list = &self.lists[(entry * heads + head) * capacity..][..count];
                let mut next = 0;
                for (at, &column) in list.iter().enumerate() {
                    let problem = match usize::try_from(column) {
                        Ok(column) if column >= next && column < columns => {
                            next = column + 1;
                            continue;
                        }
                        Ok(column) if column < columns => {
                            format!("columns must ascend, the one before is {}", next - 1)
                        }
                        _ => format!("the block table has {columns} columns"),
                    };
                    return wrong("pages.lists", vec![entry, head, at], column, problem);
                }
            }
        }
        Ok(())
    }

    /// The positions below `length` of the keys in listed pages, ascending.
    pub(super) fn keys(&self, [entry, head]: [usize; 2], length: usize) -> Vec<usize> {
        let start = (entry * self.cache.num_heads_kv + head) * self.capacity;
        let count = self.counts[entry].clamp(0, self.capacity as i32) as usize;
        let last = self.cache.table.map_or(0, |table| table.max_pages as i64 - 1);
        let column = |&page: &i32| i64::from(page).clamp(0, last.max(0)) as usize;
        let mut columns: Vec<usize> = self.lists[start..][..count].iter().map(column).collect();
        columns.sort_unstable();
        columns.dedup();
        let size = self.cache.page_size;
        let keys = |column: usize| {
            let first = column.saturating_mul(size).min(length);
            first..first.saturating_add(size).min(length)
        };
        columns.into_iter().flat_map(keys).collect()
    }
}
