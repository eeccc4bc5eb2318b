use crate::driver::check;
use crate::map_cache::{EXTENTS, Key, SHAPE, STRIDES, WORDS};
use crate::{DType, Error, Result, View};
use blockflash_sys::params::blockflash_tensor_map;
use cudarc::driver::sys;
use std::ffi::c_void;

/// The permutation of the rows of a box in shared memory, which keeps reads free of bank conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// No permutation.
    None,
    /// Within 32 bytes.
    B32,
    /// Within 64 bytes.
    B64,
    /// Within 128 bytes.
    B128,
}

impl Swizzle {
    /// The largest inner extent of a box in bytes, where the swizzle limits it.
    const fn span(self) -> Option<usize> {
        match self {
            Swizzle::None => None,
            Swizzle::B32 => Some(32),
            Swizzle::B64 => Some(64),
            Swizzle::B128 => Some(128),
        }
    }
}

/// A tiled tensor for TMA (compute capability 9.0 and newer), before it is encoded.
///
/// Dimension 0 is the innermost one, which is contiguous: the reverse of the order of
/// [`Layout`](crate::Layout).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMapSpec<'s> {
    /// Element type.
    pub dtype: DType,
    /// Sizes in elements, innermost first; 1 to 5 of them, each 1 to 2^32.
    pub shape: &'s [u64],
    /// Bytes between neighbours along dimensions 1, 2, …: one fewer than `shape`, multiples of 16,
    /// below 2^40, in any order.
    pub strides_bytes: &'s [u64],
    /// Size in elements of the box that one instruction moves, 1 to 256 along each dimension. The
    /// innermost extent is a multiple of 16 bytes and at most the span of the swizzle.
    pub box_shape: &'s [u32],
    /// Arrangement in shared memory.
    pub swizzle: Swizzle,
}

/// Bytes of a sector of L2, the least that it delivers.
const SECTOR: u64 = 32;
/// Bits of an extent in a key: the driver takes at most 256.
const EXTENT_BITS: usize = 12;

impl TensorMapSpec<'_> {
    /// What a map of a view is kept by. `None` for host memory, and for some of the specifications
    /// that [`check`](Self::check) refuses.
    fn key(&self, view: &View<'_>) -> Option<Key> {
        let rank = self.shape.len();
        let ordinal = view.device().context()?.ordinal as u64;
        if rank > 5 || self.strides_bytes.len() + 1 != rank || self.box_shape.len() != rank {
            return None;
        }
        let small = [view.dtype() as u64, self.dtype as u64, self.swizzle as u64, rank as u64];
        let mut words = [0; WORDS];
        words[0] = view.device_ptr()?;
        words[1] = view.layout().span() as u64;
        words[2] = small.into_iter().fold(ordinal, |word, part| word << 8 | part);
        words[SHAPE..].iter_mut().zip(self.shape).for_each(|(word, &size)| *word = size);
        words[STRIDES..].iter_mut().zip(self.strides_bytes).for_each(|(word, &step)| *word = step);
        for &extent in self.box_shape {
            if extent >> EXTENT_BITS != 0 {
                return None;
            }
            words[EXTENTS] = words[EXTENTS] << EXTENT_BITS | u64::from(extent);
        }
        Some(Key(words))
    }

    /// Checks the rules of `cuTensorMapEncodeTiled`, whose own errors do not say which rule is
    /// broken.
    ///
    /// # Errors
    /// [`Error::TensorMap`].
    pub fn check(&self) -> Result<()> {
        let rank = self.shape.len();
        let rule = |holds: bool, what: &dyn Fn() -> String| {
            if holds { Ok(()) } else { Err(Error::TensorMap { what: what() }) }
        };
        rule((1..=5).contains(&rank), &|| format!("{rank} dimensions, not 1 to 5"))?;
        rule(self.strides_bytes.len() == rank - 1, &|| {
            format!("{rank} dimensions need {} strides", rank - 1)
        })?;
        rule(self.box_shape.len() == rank, &|| {
            format!("{rank} dimensions need as many box extents")
        })?;
        for &size in self.shape {
            rule((1..=1 << 32).contains(&size), &|| {
                format!("a dimension of {size}, not 1 to 2^32")
            })?;
        }
        for &stride in self.strides_bytes {
            rule(stride % 16 == 0, &|| {
                format!("a stride of {stride} bytes, not a multiple of 16")
            })?;
            rule(stride < 1 << 40, &|| format!("a stride of {stride} bytes, not below 2^40"))?;
        }
        for &extent in self.box_shape {
            rule((1..=256).contains(&extent), &|| {
                format!("a box extent of {extent}, not 1 to 256")
            })?;
        }
        let inner = self.box_shape[0] as usize * self.dtype.size();
        rule(inner.is_multiple_of(16), &|| {
            format!("an inner box extent of {inner} bytes, not a multiple of 16")
        })?;
        let limit = self.swizzle.span().unwrap_or(usize::MAX);
        rule(inner <= limit, &|| {
            format!("an inner box extent of {inner} bytes with a swizzle of {limit}")
        })
    }

    /// How much L2 fetches beside what is asked for. Where rows of a box begin within a sector, as
    /// those of a matrix do whose rows are an odd number of 16 bytes apart, fetching more than is
    /// asked for takes time even of what L2 has.
    fn promotion(&self, address: u64) -> sys::CUtensorMapL2promotion {
        use sys::CUtensorMapL2promotion as Promotion;
        let steps = self.shape[1..].iter().zip(self.strides_bytes);
        let mut starts = steps.filter(|(size, _)| **size > 1).map(|(_, &stride)| stride);
        if address.is_multiple_of(SECTOR) && starts.all(|stride| stride.is_multiple_of(SECTOR)) {
            Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B
        } else {
            Promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE
        }
    }

    /// Bytes of memory from the first element to the end of the last one.
    fn span_bytes(&self) -> u64 {
        let inner = self.shape[0] * self.dtype.size() as u64;
        let outer = self.shape[1..].iter().zip(self.strides_bytes);
        outer.fold(inner, |span, (&size, &stride)| {
            span.saturating_add((size - 1).saturating_mul(stride))
        })
    }

    /// Encodes a map of the memory of `view` for a kernel's parameters. The view must hold
    /// everything that the map reaches from its first element. Boxes that reach outside of the
    /// shape read zeros and do not write there. The map does not keep the memory alive, so the view
    /// must be passed to the launch that uses the map. For a shape without elements the map is all
    /// zeros, and the kernel does not use it.
    ///
    /// # Errors
    /// [`Error::TensorMap`], [`Error::NotOnGpu`], [`Error::DType`], [`Error::OutOfBounds`],
    /// [`Error::Unsupported`] for a GPU below compute capability 9.0, [`Error::Cuda`].
    pub fn encode(&self, view: &View<'_>) -> Result<blockflash_tensor_map> {
        if self.shape.contains(&0) {
            return Ok(blockflash_tensor_map { opaque: [0; 16] });
        }
        let key = self.key(view);
        if let Some(opaque) = key.as_ref().and_then(Key::find) {
            return Ok(blockflash_tensor_map { opaque });
        }
        self.check()?;
        if view.dtype() != self.dtype {
            return Err(Error::DType { expected: self.dtype, found: view.dtype() });
        }
        let available = view.layout().span();
        let needed =
            usize::try_from(self.span_bytes()).unwrap_or(usize::MAX).div_ceil(self.dtype.size());
        if needed > available {
            return Err(Error::OutOfBounds { needed, available });
        }
        let what = "a tensor map";
        let (Some(address), Some(context)) = (view.device_ptr(), view.device().context()) else {
            return Err(Error::NotOnGpu { what });
        };
        if address % 16 != 0 {
            return Err(Error::TensorMap {
                what: format!("the address {address:#x} is not a multiple of 16"),
            });
        }
        if context.properties.compute_capability.major < 9 {
            return Err(Error::Unsupported { device: *view.device(), what: "tensor maps" });
        }
        let rank = self.shape.len();
        // Padded to the largest rank, so that no length can be wrong.
        let (mut shape, mut strides, mut box_shape) = ([1u64; 5], [16u64; 5], [1u32; 5]);
        shape[..rank].copy_from_slice(self.shape);
        strides[..rank - 1].copy_from_slice(self.strides_bytes);
        box_shape[..rank].copy_from_slice(self.box_shape);
        let element_strides = [1u32; 5];
        let mut map = Encoded([0; 16]);
        let data_type = data_type(self.dtype)?;
        let _bound = context.bind()?;
        // SAFETY:
        // 1. `map` is valid for writes, as large as the driver's type and aligned at least as
        //    strictly.
        // 2. The arrays have at least `rank` entries (5).
        // 3. The address is only recorded.
        check("cuTensorMapEncodeTiled", unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                data_type,
                rank as u32,
                address as usize as *mut c_void,
                shape.as_ptr(),
                strides.as_ptr(),
                box_shape.as_ptr(),
                element_strides.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle(self.swizzle),
                self.promotion(address),
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        })?;
        if let Some(key) = key {
            key.keep(map.0);
        }
        Ok(blockflash_tensor_map { opaque: map.0 })
    }
}

/// The map as the driver writes it. The alignment of the type in cudarc changes with the version of
/// the bindings.
#[repr(C, align(128))]
struct Encoded([u64; 16]);

const _: () = assert!(
    size_of::<Encoded>() == size_of::<sys::CUtensorMap>()
        && align_of::<Encoded>() >= align_of::<sys::CUtensorMap>(),
    "a tensor map is 128 bytes, and the driver may demand less alignment"
);

fn data_type(dtype: DType) -> Result<sys::CUtensorMapDataType> {
    use sys::CUtensorMapDataType as Type;
    Ok(match dtype {
        DType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::BF16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        DType::I32 => Type::CU_TENSOR_MAP_DATA_TYPE_INT32,
        // Maps copy bytes.
        DType::U8 | DType::E4M3 | DType::E5M2 | DType::I8 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        other => return Err(Error::TensorMap { what: format!("of elements of type {other}") }),
    })
}

fn swizzle(swizzle: Swizzle) -> sys::CUtensorMapSwizzle {
    match swizzle {
        Swizzle::None => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle::B32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle::B64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle::B128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    }
}

#[cfg(test)]
#[path = "tensor_map_tests.rs"]
mod tests;
