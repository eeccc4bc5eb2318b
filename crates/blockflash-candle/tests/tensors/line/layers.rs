use super::blockflash_candle::{Activation, BsrLinear, BsrPattern};
use super::candle_core::{DType, Device, Module, Result, Tensor, Var};
use super::harness::{Array, devices, normal_on, passed, types};
use blockflash_oracle::{BsrCase, bsr_matmul};

const ROW_PTR: [i32; 4] = [0, 2, 2, 3];
const COL_IDX: [i32; 3] = [0, 1, 1];

/// 48 outputs, 32 inputs, three blocks of 16.
fn pattern() -> BsrPattern {
    BsrPattern::from_parts(48, 32, 16, &ROW_PTR, &COL_IDX).unwrap()
}

#[test]
fn block_sparse_layers_are_exact() -> Result<()> {
    devices()?.iter().try_for_each(layers)
}

fn layers(device: &Device) -> Result<()> {
    for &dtype in types(device) {
        for (activation, as_oracle) in [
            (Activation::None, blockflash_oracle::Activation::None),
            (Activation::Silu, blockflash_oracle::Activation::Silu),
        ] {
            let new = |shape: &[usize]| normal_on(device, shape, dtype);
            let (values, bias, x) = (new(&[3, 16, 16])?, new(&[48])?, new(&[5, 7, 32])?);
            let layer = BsrLinear::new(pattern(), values.clone())?;
            let layer = layer.with_bias(bias.clone()).with_activation(activation);
            let y = layer.forward(&x)?;
            assert_eq!(y.dims(), [5, 7, 48]);
            let transposed = |of: &Tensor, width| Array::of(&of.reshape((35, width))?.t()?);
            let (b, c) = (transposed(&x, 32)?, transposed(&y, 48)?);
            let (values, bias) = (Array::of(&values)?, Array::of(&bias)?);
            let case = BsrCase {
                row_ptr: &ROW_PTR,
                col_idx: &COL_IDX,
                values: &values,
                b: &b,
                c: None,
                alpha: 1.0,
                beta: 0.0,
                bias_per_row: Some(&bias),
                bias_per_column: None,
                activation: as_oracle,
            };
            let compared = bsr_matmul(&case, &c, 1, |_| ()).unwrap();
            passed(&format!("{dtype:?} {activation:?}"), &compared);
        }
    }
    Ok(())
}

/// The same layer with dense weights is what candle differentiates itself.
#[test]
fn gradients_are_those_of_dense_weights() -> Result<()> {
    devices()?.iter().try_for_each(gradients)
}

fn gradients(device: &Device) -> Result<()> {
    for &dtype in types(device) {
        let new = |shape: &[usize]| normal_on(device, shape, dtype);
        let (values, bias, x) = (new(&[3, 16, 16])?, new(&[48])?, new(&[9, 32])?);
        let factors = new(&[9, 48])?;
        if x.matmul(&x.t()?).is_err() {
            // candle before 0.11 multiplies no matrices in bf16 on the CPU.
            continue;
        }
        let layer = |values: &Tensor, x: &Tensor| {
            let layer = BsrLinear::new(pattern(), values.clone())?.with_bias(bias.clone());
            layer.with_activation(Activation::Silu).forward(x)
        };
        let dense = |values: &Tensor, x: &Tensor| {
            let zeros = Tensor::zeros((16, 16), values.dtype(), values.device())?;
            let blocks = [values.get(0)?, values.get(1)?, values.get(2)?];
            let rows = [[&blocks[0], &blocks[1]], [&zeros, &zeros], [&zeros, &blocks[2]]];
            let rows: Vec<Tensor> =
                rows.iter().map(|row| Tensor::cat(row, 1)).collect::<Result<_>>()?;
            let bias = bias.to_device(values.device())?.to_dtype(values.dtype())?;
            x.matmul(&Tensor::cat(&rows, 0)?.t()?)?.broadcast_add(&bias)?.silu()
        };
        // The gradients of values and x, in f64 on the CPU.
        let of = |exact: bool, forward: &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>| {
            let var = |tensor: &Tensor| match exact {
                true => Var::from_tensor(&tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?),
                false => Var::from_tensor(tensor),
            };
            let (values, x) = (var(&values)?, var(&x)?);
            let y = forward(&values, &x)?;
            let factors = factors.to_device(y.device())?.to_dtype(y.dtype())?;
            let gradients = (y * factors)?.sum_all()?.backward()?;
            [values, x]
                .iter()
                .map(|var| {
                    let gradient = gradients.get(var).expect("a gradient");
                    gradient.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()
                })
                .collect::<Result<Vec<_>>>()
        };
        let (exact, plain, found) = (of(true, &dense)?, of(false, &dense)?, of(false, &layer)?);
        for ((exact, plain), found) in exact.iter().zip(&plain).zip(&found) {
            let error = |of: &Tensor| (of - exact)?.abs()?.max(0)?.to_scalar::<f64>();
            let (size, floor) = (exact.abs()?.max(0)?.to_scalar::<f64>()?, 1e-6);
            let (error, plain) = (error(found)?, error(plain)?);
            assert!(error <= 2.0 * plain + floor * size, "{dtype:?}: {error}, plain {plain}");
        }
    }
    Ok(())
}
