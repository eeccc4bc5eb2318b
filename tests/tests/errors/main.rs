//! Bad input is a typed error with a message of one line, never a panic and never a result.

/// The error matches, and its message is one line that contains the given words.
macro_rules! assert_error {
    ($result:expr, $pattern:pat, $($word:expr),+) => {{
        let error = $result.err().expect(concat!("an error: ", stringify!($pattern)));
        let message = error.to_string();
        assert!(matches!(error, $pattern), "{error:?} is not {}", stringify!($pattern));
        assert!(!message.contains('\n') && message.len() < 300, "{message:?}");
        $(assert!(message.contains($word), "{message:?} does not say {:?}", $word);)+
    }};
}

// After the macro, which they use.
mod attention;
mod bsr;
mod gpu;

use blockflash_ops::attention::{Attention, Mask};
use blockflash_ops::{BsrMatmul, BsrMatrix, DType, Device, Error, Layout, Operation, Tensor, View};
use blockflash_sys::manifest;
use blockflash_tests::host::cpu;
use half::f16;

fn f16s(shape: &[usize]) -> Tensor {
    Tensor::zeros(&cpu(), DType::F16, shape).unwrap()
}

fn f32s(shape: &[usize]) -> Tensor {
    Tensor::zeros(&cpu(), DType::F32, shape).unwrap()
}

fn i32s(values: &[i32]) -> Tensor {
    Tensor::from_slice(&cpu(), values, &[values.len()]).unwrap()
}

#[test]
fn kernels_do_not_run_on_the_cpu() {
    let kernel =
        manifest::kernels().iter().find(|kernel| kernel.symbol().contains("attention")).unwrap();
    let t = f16s(&[1, 5, 2, 64]);
    let mut o = f16s(&[1, 5, 2, 64]);
    let call =
        Attention { scores: Mask::causal().into(), ..Attention::new(t.view(), t.view(), t.view()) };
    assert_error!(
        call.run_with(kernel, (o.view_mut(), None), &cpu()),
        Error::Unsupported { .. },
        "cpu"
    );
    let kernel = manifest::kernels().iter().find(|kernel| kernel.symbol().contains("bsr")).unwrap();
    let a = BsrMatrix::from_coo(16, 16, 16, DType::F16, &[]).unwrap();
    let b = f16s(&[16, 4]);
    let mut c = f16s(&[16, 4]);
    let call = BsrMatmul::new(&a, b.view());
    assert_error!(call.run_with(kernel, c.view_mut(), &cpu()), Error::Unsupported { .. }, "cpu");
}

#[test]
fn layouts_that_cannot_be_addressed() {
    use blockflash_safe::Error;
    let huge = [usize::MAX, 2, 3];
    assert_error!(Layout::contiguous(&huge), Error::TooLarge, "large");
    assert_error!(Layout::strided(&[2, 2], &[usize::MAX, 1]), Error::TooLarge, "large");
    assert_error!(Layout::contiguous(&[1; 5]), Error::Rank { found: 5, .. }, "5");
    assert_error!(Layout::strided(&[1, 2], &[1]), Error::ShapeStrides { .. }, "2", "1");
    let data = [0f32; 10];
    assert_error!(
        View::from_slice(&data, &[11]),
        Error::OutOfBounds { needed: 11, available: 10 },
        "11",
        "10"
    );
    assert_error!(
        View::from_slice_strided(&data, &[2, 2], &[9, 1]),
        Error::OutOfBounds { .. },
        "11",
        "10"
    );
    let view = View::from_slice(&data, &[2, 5]).unwrap();
    assert_error!(view.slice(1, 3..6), Error::Slice { .. }, "3..6");
    assert_error!(view.slice(2, 0..1), Error::Slice { .. }, "dimension 2");
    assert_error!(view.permute(&[0, 0]), Error::Permutation { .. }, "[0, 0]");
    assert_error!(view.as_slice::<f16>(), Error::DType { .. }, "f16", "f32");
}

#[test]
fn devices_that_are_not_there() {
    for text in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "CUDA", "cuda:1:2", "cpu:0"] {
        let error = text.parse::<Device>().err().unwrap_or_else(|| panic!("{text:?} is no device"));
        assert!(
            matches!(error, blockflash_safe::Error::InvalidDevice { .. }),
            "{text:?}: {error:?}"
        );
    }
    assert_eq!("cpu".parse::<Device>().unwrap(), Device::cpu());
    let error = Device::cuda(9999).expect_err("no machine has 10,000 GPUs");
    use blockflash_safe::Error;
    assert_error!(
        Err::<(), _>(error),
        Error::NoDriver
            | Error::DriverTooOld { .. }
            | Error::NoSuchDevice { .. }
            | Error::Cuda { .. },
        " "
    );
}
