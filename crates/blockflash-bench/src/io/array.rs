use super::convert::{Scalar, Values};
use blockflash_ops::{DType, Stream, Tensor, View};
use blockflash_oracle::Elements;
use std::ops::Range;

/// A row-major array in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    shape: Vec<usize>,
    values: Values,
}

macro_rules! with {
    ($values:expr, $vec:ident => $body:expr) => {
        match $values {
            Values::F16($vec) => $body,
            Values::Bf16($vec) => $body,
            Values::F32($vec) => $body,
            Values::I32($vec) => $body,
            Values::U8($vec) => $body,
        }
    };
}

impl Array {
    /// `None` if the number of values is not the product of the shape.
    pub fn new(shape: &[usize], values: Values) -> Option<Self> {
        let elements = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size))?;
        (with!(&values, vec => vec.len()) == elements)
            .then(|| Self { shape: shape.to_vec(), values })
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements.
    pub fn values(&self) -> &Values {
        &self.values
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match self.values {
            Values::F16(_) => DType::F16,
            Values::Bf16(_) => DType::BF16,
            Values::F32(_) => DType::F32,
            Values::I32(_) => DType::I32,
            Values::U8(_) => DType::U8,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        with!(&self.values, vec => vec.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as they lie in memory.
    pub fn bytes(&self) -> &[u8] {
        with!(&self.values, vec => bytemuck::cast_slice(vec))
    }

    /// The elements, if they are i32.
    pub fn as_i32(&self) -> Option<&[i32]> {
        match &self.values {
            Values::I32(values) => Some(values),
            _ => None,
        }
    }

    /// A range of elements in f32; exact for every floating-point type here. Empty if the range
    /// lies outside.
    pub fn to_f32(&self, range: Range<usize>) -> Vec<f32> {
        with!(&self.values, vec => {
            vec.get(range).unwrap_or_default().iter().map(|value| value.to_f32()).collect()
        })
    }

    /// The array as an operand of the CPU backend, without a copy.
    ///
    /// # Errors
    /// If the shape has more dimensions than a view can have.
    pub fn view(&self) -> blockflash_safe::Result<View<'_>> {
        with!(&self.values, vec => View::from_slice(vec, &self.shape))
    }

    /// Copies the array to the device of the stream.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub fn upload(&self, stream: &Stream) -> blockflash_safe::Result<Tensor> {
        with!(&self.values, vec => Tensor::from_slice(stream, vec, &self.shape))
    }

    /// Copies a tensor to host memory and waits for it.
    ///
    /// # Errors
    /// If the device fails, also because of work queued before.
    pub fn download(tensor: &Tensor, stream: &Stream) -> blockflash_safe::Result<Self> {
        let values = match tensor.dtype() {
            DType::F16 => Values::F16(tensor.to_vec(stream)?),
            DType::BF16 => Values::Bf16(tensor.to_vec(stream)?),
            DType::F32 => Values::F32(tensor.to_vec(stream)?),
            DType::I32 => Values::I32(tensor.to_vec(stream)?),
            DType::U8 => Values::U8(tensor.to_vec(stream)?),
            found => return Err(blockflash_safe::Error::DType { expected: DType::F32, found }),
        };
        Ok(Self { shape: tensor.shape().to_vec(), values })
    }

    /// An array of this shape whose element at a row-major position is the one of this array at
    /// `source` of that position. `None` if there are not as many positions as the shape has, or
    /// one lies outside.
    pub fn rearranged(&self, shape: &[usize], source: impl Fn(usize) -> usize) -> Option<Self> {
        let positions = 0..self.len();
        macro_rules! picked {
            ($variant:ident, $vec:expr) => {
                Values::$variant(
                    positions.map(|at| $vec.get(source(at)).copied()).collect::<Option<_>>()?,
                )
            };
        }
        let values = match &self.values {
            Values::F16(vec) => picked!(F16, vec),
            Values::Bf16(vec) => picked!(Bf16, vec),
            Values::F32(vec) => picked!(F32, vec),
            Values::I32(vec) => picked!(I32, vec),
            Values::U8(vec) => picked!(U8, vec),
        };
        Self::new(shape, values)
    }

    /// The transposed matrix; `None` if this is none.
    pub fn transposed(&self) -> Option<Self> {
        let &[rows, cols] = self.shape() else { return None };
        self.rearranged(&[cols, rows], |at| at % rows * cols + at / rows)
    }

    /// Zeroes the elements at which the predicate, of the row-major position, is false.
    #[must_use]
    pub fn keep(mut self, inside: impl Fn(usize) -> bool) -> Self {
        with!(&mut self.values, vec => {
            let outside = vec.iter_mut().enumerate().filter(|(at, _)| !inside(*at));
            outside.for_each(|(_, value)| *value = Default::default());
        });
        self
    }
}

impl Elements for Array {
    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn dtype(&self) -> DType {
        self.dtype()
    }

    fn to_f32(&self, range: Range<usize>) -> Vec<f32> {
        self.to_f32(range)
    }
}
