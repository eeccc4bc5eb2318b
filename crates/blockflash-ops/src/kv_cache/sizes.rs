use super::latent_codes::check_rows;
use super::{KvCache, ScaleStrides};
use crate::attention::{MAX_SEQLEN, Strides, width_like};
use crate::check::{Operand, to_i32, vector};
use crate::{Error, Result};
use blockflash_safe::View;
use blockflash_sys::{DType, HeadDims};

/// Slots of a cache for kernels are less than this many elements apart.
const NEAR: usize = 1 << 30;

/// Longest keys whose first columns are the values that have no kernels of their own.
const WIDEST_OF_SHARED: usize = 256;

/// The types of keys and values.
pub(crate) const TYPES: [DType; 6] =
    [DType::F16, DType::BF16, DType::F32, DType::E4M3, DType::E5M2, DType::I8];

/// Those that are no codes.
pub(crate) const FLOATS: [DType; 3] = [DType::F16, DType::BF16, DType::F32];

/// A [`KvCache`] reduced to plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSizes {
    /// Element type of keys and values; u8 for [rows of codes](KvCache::latent_codes).
    pub dtype: DType,
    /// Sequences.
    pub batch: usize,
    /// Most keys of a sequence.
    pub capacity: usize,
    /// Slots of a page. A contiguous cache is one page for each sequence.
    pub page_size: usize,
    /// Pages that exist.
    pub pages: usize,
    /// Heads of keys and values.
    pub num_heads_kv: usize,
    /// Elements of a row of keys, and of values.
    pub head_dims: HeadDims,
    /// Strides of the keys; that of the batch is from page to page.
    pub k: Strides,
    /// Strides of the values.
    pub v: Strides,
    /// Whether the values are the first columns of the keys: v has the address and the strides of
    /// k, and rows that are no longer. Extents of 1 have no stride that counts.
    pub shared: bool,
    /// Set when pages are found by a table.
    pub table: Option<TableSizes>,
    /// Whether the device knows how many keys each sequence has.
    pub seqused_kv: bool,
    /// Set when codes of keys have scales.
    pub k_scale: Option<ScaleStrides>,
    /// Set when codes of values have scales.
    pub v_scale: Option<ScaleStrides>,
}

/// The sizes of a block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableSizes {
    /// Entries of a sequence.
    pub max_pages: usize,
    /// Elements from one sequence to the next.
    pub stride: usize,
}

impl CacheSizes {
    /// A contiguous cache with a length for each sequence: the start of a plan without tensors. Not
    /// checked.
    pub fn contiguous(
        dtype: DType,
        [batch, capacity]: [usize; 2],
        num_heads_kv: usize,
        head_dim: usize,
    ) -> Self {
        let (page_size, pages, seqused_kv) = (capacity, batch, true);
        let (k, table) = (Strides::contiguous(capacity, num_heads_kv, head_dim), None);
        Self {
            dtype,
            batch,
            capacity,
            page_size,
            pages,
            num_heads_kv,
            head_dims: HeadDims::all(head_dim),
            k,
            v: k,
            shared: false,
            table,
            seqused_kv,
            k_scale: None,
            v_scale: None,
        }
    }

    /// A contiguous cache of one head whose values are the first columns of the keys, with a length
    /// for each sequence: the start of a plan without tensors. Not checked.
    pub fn latent(dtype: DType, sizes: [usize; 2], head_dims: HeadDims) -> Self {
        Self { head_dims, shared: true, ..Self::contiguous(dtype, sizes, 1, head_dims.qk) }
    }

    /// Checks the type of queries and of new rows: that of the cache, or any beside codes.
    pub(crate) fn takes(&self, rows: &Operand<'_>) -> Result<()> {
        match self.dtype.is_code() || self.has_code_rows() {
            true => rows.dtype_in(&FLOATS),
            false => rows.dtype_in(&[self.dtype]),
        }
    }

    /// Whether the values are the first columns of keys that are too long for other kernels than
    /// those for latent rows.
    pub(crate) fn has_latent_rows(&self) -> bool {
        self.shared && self.head_dims.max() > WIDEST_OF_SHARED
    }

    /// Whether 16 keys from a multiple of 16 on are in one page. The only page of a sequence may be
    /// of any size.
    pub(crate) fn has_whole_steps(&self) -> bool {
        self.table.is_none_or(|table| table.max_pages <= 1) || self.page_size.is_multiple_of(16)
    }

    /// Whether 32 bits hold the strides of slots in bytes.
    pub(crate) fn has_near_slots(&self) -> bool {
        self.k.seq.max(self.v.seq) < NEAR
    }

    /// What breaks [`has_near_slots`](Self::has_near_slots), in words.
    pub(crate) fn far_slots(&self) -> String {
        let (k, v) = (self.k.seq, self.v.seq);
        format!("slots of k and v are {k} and {v} elements apart, expected less than {NEAR}")
    }

    /// What a cache without slots breaks, in words.
    pub(crate) fn no_slots(&self) -> String {
        format!("the cache has {} slots, expected at least 1", self.capacity)
    }
}

impl KvCache<'_> {
    /// Everything that can be checked without reading a tensor, and the result as plain numbers.
    ///
    /// # Errors
    /// [`Error::DType`], [`Error::Shape`] and [`Error::Stride`] for tensors that do not fit each
    /// other, also for scales of keys that are no codes, [`Error::TooLarge`] for a capacity beyond
    /// [`MAX_SEQLEN`].
    pub fn sizes(&self) -> Result<CacheSizes> {
        let (k, v) = (Operand::new("cache.k", &self.k), Operand::new("cache.v", &self.v));
        let has_code_rows = check_rows(&k).is_ok();
        if !has_code_rows {
            k.dtype_in(&TYPES)?;
        }
        v.dtype_in(&[k.dtype])?;
        let &[pages, page_size, num_heads_kv, qk] = k.shape else {
            return Err(k.wrong_shape(match self.block_table {
                None => "[batch, capacity, num_heads_kv, head_dim]",
                Some(_) => "[pages, page_size, num_heads_kv, head_dim]",
            }));
        };
        if qk == 0 {
            return Err(k.wrong_shape("a head_dim of at least 1"));
        }
        let shared = are_shared(&self.k, &self.v);
        let head_dims = match has_code_rows {
            true => self.code_rows(shared)?,
            false => HeadDims { qk, v: width_like(&v, &k)? },
        };
        k.last_dim_contiguous()?;
        v.last_dim_contiguous()?;

        let (mut batch, mut capacity, mut table) = (pages, page_size, None);
        if let Some(block_table) = &self.block_table {
            if page_size == 0 {
                return Err(k.wrong_shape("a page_size of at least 1"));
            }
            let (entries, of) = table_sizes(block_table)?;
            (batch, table) = (entries, Some(of));
            let all = of.max_pages.saturating_mul(page_size);
            // Without a page there is nothing that an entry could name.
            capacity = if pages == 0 { 0 } else { all };
        }
        if let Some(seqused_kv) = &self.seqused_kv {
            vector("cache.seqused_kv", seqused_kv, DType::I32, &[batch])?;
        }
        for (what, size) in [("batch", batch), ("pages", pages), ("num_heads_kv", num_heads_kv)] {
            to_i32(what, size)?;
        }
        if capacity > MAX_SEQLEN {
            return Err(Error::TooLarge { what: "capacity", value: capacity, limit: MAX_SEQLEN });
        }
        let strides = |of: &Operand<'_>| Strides {
            batch: of.strides[0],
            seq: of.strides[1],
            head: of.strides[2],
        };
        let mut sizes = CacheSizes {
            dtype: k.dtype,
            batch,
            capacity,
            page_size,
            pages,
            num_heads_kv,
            head_dims,
            k: strides(&k),
            v: strides(&v),
            shared,
            table,
            seqused_kv: self.seqused_kv.is_some(),
            k_scale: None,
            v_scale: None,
        };
        let strides = |what, (of, scale): (&Operand<'_>, &Option<View<'_>>)| {
            let Some(scale) = scale else { return Ok(None) };
            if !of.dtype.is_code() {
                let expected = format!("e4m3 or e5m2 or i8, since {what} is given");
                return Err(Error::DType { what: of.what, expected, found: of.dtype });
            }
            ScaleStrides::of(&Operand::new(what, scale), &sizes).map(Some)
        };
        let k_scale = strides("cache.k_scale", (&k, &self.k_scale))?;
        let v_scale = strides("cache.v_scale", (&v, &self.v_scale))?;
        (sizes.k_scale, sizes.v_scale) = (k_scale, v_scale);
        Ok(sizes)
    }
}

/// Whether the rows of v, which has the shape of k but for the last extent, are beginnings of those
/// of k.
fn are_shared(k: &View<'_>, v: &View<'_>) -> bool {
    let mut dims = k.shape().iter().zip(k.strides().iter().zip(v.strides()));
    v.starts_with(k)
        && v.shape().last() <= k.shape().last()
        && dims.all(|(&extent, (of_k, of_v))| extent == 1 || of_k == of_v)
}

/// The sequences of a block table, and its sizes.
fn table_sizes(block_table: &View<'_>) -> Result<(usize, TableSizes)> {
    let operand = Operand::new("cache.block_table", block_table);
    operand.dtype_in(&[DType::I32])?;
    let &[batch, max_pages] = operand.shape else {
        return Err(operand.wrong_shape("[batch, max_pages]"));
    };
    operand.last_dim_contiguous()?;
    Ok((batch, TableSizes { max_pages, stride: operand.strides[0] }))
}
