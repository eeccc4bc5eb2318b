use super::CacheSizes;
use crate::Result;
use crate::check::{Operand, finite_positive};
use blockflash_safe::{NewScales, Stream, View, ViewMut};
use blockflash_sys::DType;
use std::borrow::Cow;

/// The scales of keys or of values in a [`KvCacheMut`](super::KvCacheMut) of codes.
#[derive(Debug)]
pub enum CacheScale<'a> {
    /// In a shape of [`KvCache::k_scale`](super::KvCache::k_scale): an append divides by them.
    Given(View<'a>),
    /// f32 `[pages, page_size, num_heads_kv]`, of a contiguous cache `[batch, capacity, …]`: an
    /// append chooses the scale of every row that it stores, so that the greatest magnitude of the
    /// row is the greatest code, and writes it here. The scale of a row of zeros is 1.
    PerToken(ViewMut<'a>),
}

impl CacheScale<'_> {
    /// The same scales for reading.
    pub fn as_view(&self) -> View<'_> {
        match self {
            Self::Given(view) => *view,
            Self::PerToken(view) => view.as_view(),
        }
    }

    /// The same scales for one of several calls.
    pub fn reborrow(&mut self) -> CacheScale<'_> {
        match self {
            Self::Given(view) => CacheScale::Given(*view),
            Self::PerToken(view) => CacheScale::PerToken(view.reborrow()),
        }
    }
}

impl<'a> From<CacheScale<'a>> for NewScales<'a> {
    fn from(scale: CacheScale<'a>) -> Self {
        match scale {
            CacheScale::Given(view) => Self::Given(view),
            CacheScale::PerToken(view) => Self::Chosen(view),
        }
    }
}

/// Elements from one scale to the next, 0 where all have the same one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScaleStrides {
    /// From sequence to sequence.
    pub sequence: usize,
    /// From page to page.
    pub page: usize,
    /// From slot to slot of a page.
    pub slot: usize,
    /// From head to head of the keys.
    pub head: usize,
}

impl ScaleStrides {
    /// Those of scales in one of the shapes that [`KvCache::k_scale`](super::KvCache::k_scale)
    /// names.
    pub(super) fn of(scale: &Operand<'_>, cache: &CacheSizes) -> Result<Self> {
        scale.dtype_in(&[DType::F32])?;
        Self::by(scale, scale.strides, cache)
    }

    fn by(scale: &Operand<'_>, strides: &[usize], cache: &CacheSizes) -> Result<Self> {
        let CacheSizes { batch, pages, page_size, num_heads_kv: heads, .. } = *cache;
        let stride = |dim, extent| stride(scale, strides, dim, extent);
        let found = match scale.shape.len() {
            1 | 2 => Self::by_sequence(scale, strides, [batch, heads]),
            3 => stride(0, pages)
                .zip(stride(1, page_size))
                .zip(stride(2, heads))
                .map(|((page, slot), head)| Self { sequence: 0, page, slot, head }),
            _ => None,
        };
        found.ok_or_else(|| {
            scale.wrong_shape(format!(
                "[1], [{batch} or 1, {heads} or 1] or [{pages} or 1, {page_size} or 1, {heads} or \
                 1]"
            ))
        })
    }

    /// Those of scales `[1]` or `[batch or 1, heads or 1]`; `None` for another shape.
    pub(crate) fn by_sequence(
        scale: &Operand<'_>,
        strides: &[usize],
        [batch, heads]: [usize; 2],
    ) -> Option<Self> {
        let stride = |dim, extent| stride(scale, strides, dim, extent);
        match scale.shape.len() {
            1 => stride(0, 1).map(|_| Self::default()),
            2 => stride(0, batch).zip(stride(1, heads)).map(|(sequence, head)| Self {
                sequence,
                head,
                ..Self::default()
            }),
            _ => None,
        }
    }

    /// Position of the scale of a row.
    pub(crate) fn at(&self, entry: usize, [page, slot]: [usize; 2], head: usize) -> usize {
        entry * self.sequence + page * self.page + slot * self.slot + head * self.head
    }
}

/// The stride of a dimension of scales: 0 where one serves all, `None` for a wrong extent.
fn stride(scale: &Operand<'_>, strides: &[usize], dim: usize, extent: usize) -> Option<usize> {
    match scale.shape[dim] {
        1 => Some(0),
        found => (found == extent).then_some(strides[dim]),
    }
}

/// Scales in host memory.
pub(crate) struct HostScale<'a> {
    what: &'static str,
    values: Cow<'a, [f32]>,
    strides: ScaleStrides,
}

impl<'a> HostScale<'a> {
    /// Scales whose strides `by` makes of those of their tensor.
    pub(crate) fn new(
        what: &'static str,
        view: Option<View<'a>>,
        by: impl Fn(&Operand<'_>, &[usize]) -> Result<ScaleStrides>,
        stream: &Stream,
    ) -> Result<Option<Self>> {
        let Some(view) = view else { return Ok(None) };
        let operand = Operand::new(what, &view);
        operand.dtype_in(&[DType::F32])?;
        if view.is_cpu() {
            let (values, strides) = (view.as_slice()?.into(), by(&operand, operand.strides)?);
            return Ok(Some(Self { what, values, strides }));
        }
        // The copy is without gaps.
        let mut strides = vec![1; operand.shape.len()];
        for dim in (1..operand.shape.len()).rev() {
            strides[dim - 1] = strides[dim] * operand.shape[dim];
        }
        let strides = by(&operand, &strides)?;
        Ok(Some(Self { what, values: view.to_vec(stream)?.into(), strides }))
    }

    /// Those of the keys and of the values of a cache.
    pub(crate) fn both(
        [k, v]: [Option<View<'a>>; 2],
        sizes: &CacheSizes,
        stream: &Stream,
    ) -> Result<[Option<Self>; 2]> {
        let by = |scale: &Operand<'_>, strides: &[usize]| ScaleStrides::by(scale, strides, sizes);
        let k = Self::new("cache.k_scale", k, by, stream)?;
        Ok([k, Self::new("cache.v_scale", v, by, stream)?])
    }

    /// The scale of a row.
    pub(crate) fn get(&self, entry: usize, slot: [usize; 2], head: usize) -> f32 {
        self.values[self.strides.at(entry, slot, head)]
    }

    /// Verifies the scales of all sequences and heads, where rows of a sequence share theirs.
    pub(crate) fn verify_all(&self, [batch, heads]: [usize; 2]) -> Result<()> {
        let mut all = (0..batch).flat_map(|entry| (0..heads).map(move |head| [entry, head]));
        all.try_for_each(|[entry, head]| self.verify(entry, [0; 2], head))
    }

    /// How many of these keys and heads may have scales that differ, the first ones.
    pub(super) fn unequal(&self, keys: usize, heads: usize) -> [usize; 2] {
        let ScaleStrides { page, slot, head, .. } = self.strides;
        let rows = |strides: [usize; 2], rows: usize| match strides {
            [0, 0] => rows.min(1),
            _ => rows,
        };
        [rows([page, slot], keys), rows([head, 0], heads)]
    }

    /// Verifies one scale.
    pub(super) fn verify(&self, entry: usize, slot: [usize; 2], head: usize) -> Result<()> {
        finite_positive(self.what, self.get(entry, slot, head)).map(drop)
    }
}
