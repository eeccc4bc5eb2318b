use super::convert::{Scalar, Values};
use crate::placement::Placed;
use blockflash_ops::{DType, E4M3, Stream, Tensor, View};
use blockflash_oracle::Elements;
use half::{bf16, f16, slice::HalfFloatSliceExt};
use ndarray::{ArrayD, Axis, Ix3, IxDyn};
use rayon::prelude::*;
use std::ops::Range;

/// A row-major array in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Array(Values);

macro_rules! with {
    ($array:expr, $values:ident => $body:expr) => {
        match $array {
            Values::F16($values) => $body,
            Values::Bf16($values) => $body,
            Values::F32($values) => $body,
            Values::I32($values) => $body,
            Values::U8($values) => $body,
            Values::E4m3($values) => $body,
            Values::E5m2($values) => $body,
            Values::I8($values) => $body,
        }
    };
}

/// Accepts any order of dimensions in memory; copies unless it is row-major.
impl<T: Scalar> From<ArrayD<T>> for Array {
    fn from(values: ArrayD<T>) -> Self {
        let row_major = values.is_standard_layout();
        Self(T::wrap(if row_major { values } else { values.as_standard_layout().into_owned() }))
    }
}

/// A vector.
impl<T: Scalar> From<Vec<T>> for Array {
    fn from(values: Vec<T>) -> Self {
        Self(T::wrap(ndarray::Array::from(values).into_dyn()))
    }
}

/// The elements in their order.
fn elements<T: Scalar>(values: &ArrayD<T>) -> &[T] {
    values.as_slice().unwrap_or_default() // every `Array` is row-major
}

fn dtype<T: Scalar>(_: &ArrayD<T>) -> DType {
    T::DTYPE
}

/// All bits are 1: as f16, bf16 and f32 a NaN that no computation produces.
fn nan<T: Scalar>() -> T {
    bytemuck::pod_read_unaligned(&[0xFF; 4][..size_of::<T>()])
}

impl Array {
    /// `None` if the number of values is not the product of the shape.
    pub fn new<T: Scalar>(shape: &[usize], values: Vec<T>) -> Option<Self> {
        ArrayD::from_shape_vec(IxDyn(shape), values).ok().map(Self::from)
    }

    /// Values in f32, rounded to nearest even into this floating-point type, f16, bf16, f32 or
    /// e4m3; `None` for any other type, or if the number of values is not the product of the
    /// shape.
    pub fn rounded(shape: &[usize], values: &[f32], dtype: DType) -> Option<Self> {
        fn halves<T: Scalar>(shape: &[usize], values: &[f32]) -> Option<Array>
        where
            [T]: HalfFloatSliceExt,
        {
            const PIECE: usize = 1 << 14;
            let mut rounded = vec![T::default(); values.len()];
            let pieces = rounded.par_chunks_mut(PIECE).zip(values.par_chunks(PIECE));
            pieces.for_each(|(rounded, values)| rounded.convert_from_f32_slice(values));
            Array::new(shape, rounded)
        }
        match dtype {
            DType::F16 => halves::<f16>(shape, values),
            DType::BF16 => halves::<bf16>(shape, values),
            DType::F32 => Array::new(shape, values.to_vec()),
            DType::E4M3 => Array::new(shape, values.iter().map(|&x| E4M3::from_f32(x)).collect()),
            _ => None,
        }
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        with!(&self.0, values => values.shape())
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        with!(&self.0, values => dtype(values))
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        with!(&self.0, values => values.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as they are stored.
    pub fn bytes(&self) -> &[u8] {
        with!(&self.0, values => bytemuck::cast_slice(elements(values)))
    }

    /// The elements, if they are i32.
    pub fn as_i32(&self) -> Option<&[i32]> {
        match &self.0 {
            Values::I32(values) => values.as_slice(),
            _ => None,
        }
    }

    /// A range of elements in f32; exact for every floating-point type here. Empty if the range
    /// is outside.
    pub fn to_f32(&self, range: Range<usize>) -> Vec<f32> {
        with!(&self.0, values => {
            let values = elements(values).get(range).unwrap_or_default();
            values.par_iter().with_min_len(1 << 14).map(|value| value.to_f32()).collect()
        })
    }

    /// Whether an element is not a number.
    pub fn has_nan(&self) -> bool {
        with!(&self.0, values => elements(values).par_iter().any(|value| value.to_f32().is_nan()))
    }

    /// The array as an operand of the CPU backend, without a copy.
    ///
    /// # Errors
    /// If the shape has more dimensions than a view can have.
    pub fn view(&self) -> blockflash_safe::Result<View<'_>> {
        with!(&self.0, values => View::try_from(values.view()))
    }

    /// Copies the array to the device of the stream.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub fn upload(&self, stream: &Stream) -> blockflash_safe::Result<Tensor> {
        with!(&self.0, values => Tensor::from_array(stream, values.view()))
    }

    /// Replaces the elements of a tensor of this type and size, whose memory stays where it is.
    ///
    /// # Errors
    /// If the tensor has another type or size, or the device fails.
    pub fn write(&self, tensor: &mut Tensor, stream: &Stream) -> blockflash_safe::Result<()> {
        with!(&self.0, values => tensor.copy_from_slice(stream, elements(values)))
    }

    /// Copies a tensor to host memory and waits for it.
    ///
    /// # Errors
    /// If the device fails, also because of work queued before.
    pub fn download(tensor: &Tensor, stream: &Stream) -> blockflash_safe::Result<Self> {
        Ok(Self(match tensor.dtype() {
            DType::F16 => Values::F16(tensor.to_array(stream)?),
            DType::BF16 => Values::Bf16(tensor.to_array(stream)?),
            DType::F32 => Values::F32(tensor.to_array(stream)?),
            DType::I32 => Values::I32(tensor.to_array(stream)?),
            DType::U8 => Values::U8(tensor.to_array(stream)?),
            DType::E4M3 => Values::E4m3(tensor.to_array(stream)?),
            DType::E5M2 => Values::E5m2(tensor.to_array(stream)?),
            DType::I8 => Values::I8(tensor.to_array(stream)?),
            found => return Err(blockflash_safe::Error::DType { expected: DType::F32, found }),
        }))
    }

    /// The array inside of a larger one, whose other elements are NaN.
    pub fn placed(&self, placed: &Placed) -> Self {
        with!(&self.0, values => {
            let physical: Vec<_> = placed.scatter(elements(values).iter().copied(), nan());
            ArrayD::from_shape_vec(IxDyn(&placed.physical), physical).unwrap_or_default().into()
        })
    }

    /// What a larger array holds there: the opposite of [`placed`](Self::placed).
    #[must_use]
    pub fn taken(self, placed: &Placed) -> Self {
        if placed.is_whole() {
            return self;
        }
        with!(&self.0, values => {
            let logical = placed.gather(elements(values));
            ArrayD::from_shape_vec(IxDyn(placed.shape()), logical).unwrap_or_default().into()
        })
    }

    /// The transposed matrix; `None` if this is none.
    pub fn transposed(&self) -> Option<Self> {
        with!(&self.0, values => {
            (values.ndim() == 2).then(|| values.t().as_standard_layout().into_owned().into())
        })
    }

    /// The matrices of `[matrices, rows, cols]` in the given order, each transposed; `None` if the
    /// array has another rank or the order names a missing matrix.
    pub fn matrices_transposed(&self, order: &[usize]) -> Option<Self> {
        with!(&self.0, values => {
            let values = values.view().into_dimensionality::<Ix3>().ok()?;
            let inside = order.iter().all(|&at| at < values.len_of(Axis(0)));
            let transposed = values.permuted_axes([0, 2, 1]);
            inside.then(|| transposed.select(Axis(0), order).into_dyn().into())
        })
    }

    /// Zeroes each matrix of `[matrices, rows, cols]` outside of its first rows and columns, whose
    /// numbers `kept` gives and which may exceed the matrix; `None` if the array has another rank.
    pub fn cropped(mut self, kept: impl IntoIterator<Item = [usize; 2]>) -> Option<Self> {
        with!(&mut self.0, values => {
            let mut matrices = values.view_mut().into_dimensionality::<Ix3>().ok()?;
            for (mut matrix, [rows, cols]) in matrices.outer_iter_mut().zip(kept) {
                let beyond = |&((row, col), _): &((usize, usize), _)| row >= rows || col >= cols;
                let outside = matrix.indexed_iter_mut().filter(beyond);
                outside.for_each(|(_, value)| *value = Default::default());
            }
        });
        Some(self)
    }
}

impl Elements for Array {
    fn shape(&self) -> &[usize] {
        self.shape()
    }

    fn dtype(&self) -> DType {
        self.dtype()
    }

    fn to_f32(&self, range: Range<usize>) -> Vec<f32> {
        self.to_f32(range)
    }
}
