//! Arrays of the crate ndarray as tensors in host memory, and back.

use crate::view::check_dtype;
use crate::{Element, Error, Result, Stream, Tensor, View};
use ndarray::{ArrayD, ArrayView, CowArray, Dimension, IxDyn};

/// A view of the array's memory. The dimensions may be in memory in any order, but without gaps,
/// because other views may be writing to the elements in between. [`Tensor::from_array`] copies any
/// array.
///
/// ```
/// # use blockflash_safe::View;
/// # use ndarray::array;
/// let array = array![[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]];
/// let transposed = View::try_from(array.t())?;
/// assert_eq!((transposed.shape(), transposed.strides()), (&[3, 2][..], &[1, 3][..]));
/// # Ok::<(), blockflash_safe::Error>(())
/// ```
///
/// Fails with [`Error::Array`] for gaps, repeated elements and negative strides, and with
/// [`Error::Rank`] for more than [`MAX_RANK`](crate::MAX_RANK) dimensions.
impl<'a, T: Element, D: Dimension> TryFrom<ArrayView<'a, T, D>> for View<'a> {
    type Error = Error;

    fn try_from(array: ArrayView<'a, T, D>) -> Result<View<'a>> {
        // Also covers every empty array, whose strides ndarray sets to zero.
        if let Some(rows) = array.to_slice() {
            return View::from_slice(rows, array.shape());
        }
        let strides = array.shape().iter().zip(array.strides());
        let strides = strides.map(|(&size, &stride)| match usize::try_from(stride) {
            Ok(stride) => Ok(stride),
            // No element is ever one stride away from another.
            Err(_) if size <= 1 => Ok(0),
            Err(_) => Err(Error::Array { what: format!("has a negative stride, {stride}") }),
        });
        let strides = strides.collect::<Result<Vec<_>>>()?;
        let shape = array.shape().to_vec();
        let data = array.to_slice_memory_order();
        let data = data.ok_or_else(|| Error::Array {
            what: format!("of shape {shape:?} has gaps, or repeats elements: strides {strides:?}"),
        })?;
        View::from_slice_strided(data, &shape, &strides)
    }
}

impl Tensor {
    /// A row-major copy of an array with any strides. Waits for the copy.
    ///
    /// # Errors
    /// The errors of [`Tensor::from_slice`].
    pub fn from_array<T: Element, D: Dimension>(
        stream: &Stream,
        array: ArrayView<'_, T, D>,
    ) -> Result<Tensor> {
        let rows: CowArray<'_, T, D> = array.as_standard_layout();
        let missing = || Error::Array { what: format!("has strides {:?}", rows.strides()) };
        Tensor::from_slice(stream, rows.as_slice().ok_or_else(missing)?, array.shape())
    }

    /// The elements as an array. Waits for the work on `stream`, which must be a stream of the
    /// tensor's device; on the CPU, any stream will do.
    ///
    /// ```
    /// # use blockflash_safe::{Device, Tensor};
    /// # use ndarray::array;
    /// let stream = Device::cpu().stream()?;
    /// let array = array![[1, 2], [3, 4]];
    /// let tensor = Tensor::from_array(&stream, array.view())?;
    /// assert_eq!(tensor.to_array::<i32>(&stream)?, array.into_dyn());
    /// # Ok::<(), blockflash_safe::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`Tensor::to_vec`].
    pub fn to_array<T: Element>(&self, stream: &Stream) -> Result<ArrayD<T>> {
        check_dtype::<T>(self.dtype())?;
        let elements = self.to_vec(stream)?;
        ArrayD::from_shape_vec(IxDyn(self.shape()), elements).map_err(|_| Error::TooLarge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use half::{bf16, f16};
    use ndarray::{Array, Array1, Array3, Array4, ArrayView1, Axis, Ix5, arr0, s};

    fn numbers() -> Array4<i32> {
        Array::from_shape_vec((2, 3, 4, 5), (0..120).collect()).unwrap()
    }

    /// What a view reads is what the array holds.
    fn same<T: Element, D: Dimension>(array: ArrayView<'_, T, D>) {
        let stream = &Device::cpu().stream().unwrap();
        let expected: Vec<T> = array.iter().copied().collect();
        let view = View::try_from(array.view()).unwrap();
        assert_eq!((view.shape(), view.dtype()), (array.shape(), T::DTYPE));
        assert_eq!(view.to_vec::<T>(stream).unwrap(), expected);
        let copy = view.to_tensor(stream).unwrap().to_array::<T>(stream).unwrap();
        assert_eq!(copy, array.into_dyn());
    }

    #[test]
    fn every_type_order_and_rank() {
        let array = numbers();
        same(array.view());
        same(array.view().permuted_axes([2, 0, 3, 1]));
        same(array.t());
        same(array.index_axis(Axis(0), 1));
        same(array.slice(s![1.., .., .., ..]));
        same(array.mapv(|x| x as f32).t());
        same(array.mapv(|x| f16::from_f32(x as f32)).t());
        same(array.mapv(|x| bf16::from_f32(x as f32)).t());
        same(arr0(7i32).view());
        same(Array3::<f32>::zeros((2, 0, 3)).view());
    }

    #[test]
    fn strides_that_no_view_has() {
        let array = numbers();
        let reason = |array: ArrayView<'_, i32, _>| View::try_from(array).unwrap_err().to_string();
        assert!(reason(array.slice(s![.., .., .., ..4])).contains("gaps"));
        assert!(reason(array.slice(s![.., ..;2, .., ..])).contains("gaps"));
        assert!(reason(array.slice(s![.., .., .., ..;-1])).contains("negative"));
        let one = Array1::from_vec(vec![3]);
        let repeated: ArrayView1<'_, i32> = one.broadcast(4).unwrap();
        assert!(View::try_from(repeated).unwrap_err().to_string().contains("repeats"));
        let many = Array::<i32, Ix5>::zeros((1, 1, 1, 1, 1));
        assert!(matches!(View::try_from(many.view()), Err(Error::Rank { found: 5, .. })));
        // A single element goes nowhere.
        let single = array.slice(s![..1, ..1, ..1, ..1;-1]);
        assert_eq!(View::try_from(single).unwrap().as_slice::<i32>().unwrap(), [0]);
        // Rows of no batch are contiguous all the same.
        let empty = array.slice(s![..0, .., .., ..]);
        assert_eq!(View::try_from(empty).unwrap().strides(), [60, 20, 5, 1]);
    }

    #[test]
    fn a_tensor_copies_any_array() {
        let stream = &Device::cpu().stream().unwrap();
        let array = numbers();
        for part in [array.slice(s![.., ..;2, 1..3, ..;-1]), array.slice(s![..1, .., .., ..0])] {
            let tensor = Tensor::from_array(stream, part).unwrap();
            assert_eq!(tensor.to_array::<i32>(stream).unwrap(), part.into_dyn());
        }
        let tensor = Tensor::from_array(stream, array.view()).unwrap();
        assert!(matches!(tensor.to_array::<f32>(stream), Err(Error::DType { .. })));
    }
}
