//! Copies of rows by few CTAs on the GPU: every byte of the targets, and every byte around them.

use blockflash_ops::{DType, Tensor, copy_beside_with};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::Variant;
use blockflash_tests::gpu::{Gpu, Report, gpu};
use blockflash_tests::number::rng;
use rand::Rng;

/// Rows of heads, `count` of them go to a slot whose other rows and heads stay as they are.
#[derive(Clone, Copy, Debug)]
struct Case {
    seed: u64,
    copies: usize,
    rows: usize,
    heads: usize,
    head_dim: usize,
}

fn copied(case: Case, kernel: &'static Kernel, gpu: &Gpu) -> Result<usize, String> {
    let Case { seed, copies, rows, heads, head_dim } = case;
    let stream = &gpu.stream;
    let mut random = rng(seed);
    let text = |error: &dyn std::fmt::Display| format!("{error}\n    {case:?}");
    let shape = [rows, heads + 2, head_dim];
    let slot = [rows + 3, heads + 1, head_dim];
    let (mut sources, mut targets) = (Vec::new(), Vec::new());
    let mut bytes = |shape: &[usize]| -> Vec<u8> {
        (0..shape.iter().product()).map(|_| random.random()).collect()
    };
    for _ in 0..copies {
        let (from, to) = (bytes(&shape), bytes(&slot));
        let source = Tensor::from_slice(stream, &from, &shape).map_err(|e| text(&e))?;
        let target = Tensor::from_slice(stream, &to, &slot).map_err(|e| text(&e))?;
        sources.push((from, source));
        targets.push((to, target));
    }
    let pairs = targets.iter_mut().zip(&sources).map(|((_, to), (_, from))| {
        let to = to.view_mut().slice(0, 2..2 + rows)?.slice(1, 0..heads)?;
        Ok((to, from.view().slice(1, 1..1 + heads)?))
    });
    let pairs = pairs.collect::<Result<Vec<_>, blockflash_safe::Error>>().map_err(|e| text(&e))?;
    copy_beside_with(kernel, pairs, stream).map_err(|e| text(&e))?;
    for ((before, target), (from, _)) in targets.iter().zip(&sources) {
        let mut expected = before.clone();
        let row = heads * head_dim;
        for at in 0..rows {
            let to = (at + 2) * (heads + 1) * head_dim;
            let start = (at * (heads + 2) + 1) * head_dim;
            expected[to..to + row].copy_from_slice(&from[start..start + row]);
        }
        if target.to_vec::<u8>(stream).map_err(|e| text(&e))? != expected {
            return Err(format!("other bytes\n    {case:?}"));
        }
    }
    Ok(copies)
}

#[test]
fn every_kernel_that_copies_rows() {
    let Some(gpu) = gpu("row_copy_gpu::every_kernel_that_copies_rows") else { return };
    let copies = |kernel: &&Kernel| matches!(kernel.variant, Variant::RowCopy(_));
    let mut report = Report::default();
    for kernel in gpu.kernels().filter(copies) {
        for seed in 0..60 {
            let mut random = rng(seed);
            let head_dim = 16 * random.random_range(1..=16);
            let (rows, heads) = (random.random_range(1..3000), random.random_range(1..=9));
            let case = Case { seed, copies: 1 + seed as usize % 4, rows, heads, head_dim };
            report.run(kernel, || copied(case, kernel, &gpu));
        }
        report.run(kernel, || {
            let case = Case { seed: 1, copies: 1, rows: 9, heads: 1, head_dim: 24 };
            match copied(case, kernel, &gpu) {
                Err(error) if error.contains("16 bytes") => Ok(1),
                other => Err(format!("rows of 24 bytes: {other:?}")),
            }
        });
    }
    report.finish(&gpu, "row_copy_gpu");
}

/// A tensor of any type and strides is copied, by the driver where the kernel cannot.
#[test]
fn what_the_kernel_cannot_copy() {
    let Some(gpu) = gpu("row_copy_gpu::what_the_kernel_cannot_copy") else { return };
    let stream = &gpu.stream;
    let values: Vec<i32> = (0..60).collect();
    let from = Tensor::from_slice(stream, &values, &[3, 4, 5]).unwrap();
    let mut to = Tensor::zeros(stream, DType::I32, &[4, 3, 5]).unwrap();
    let turned = to.view_mut().permute(&[1, 0, 2]).unwrap();
    let beside = blockflash_ops::copy_beside(vec![(turned, from.view())], stream).unwrap();
    assert!(!beside);
    let expected = from.view().permute(&[1, 0, 2]).unwrap().to_vec::<i32>(stream).unwrap();
    assert_eq!(to.to_vec::<i32>(stream).unwrap(), expected);
}
