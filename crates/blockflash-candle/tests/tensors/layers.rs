use crate::harness::{Array, devices, normal, normal_on, passed, types};
use blockflash_candle::{Activation, BsrLinear, BsrPattern};
use blockflash_oracle::{BsrCase, bsr_matmul};
use candle_core::{DType, Device, Module, Result, Tensor, Var};

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
    let values = Var::from_tensor(&normal(&[3, 16, 16], DType::F32)?)?;
    let (bias, x) = (normal(&[48], DType::F32)?, Var::from_tensor(&normal(&[9, 32], DType::F32)?)?);
    let layer = BsrLinear::new(pattern(), values.as_tensor().clone())?;
    let activation = Activation::Silu;
    let layer = layer.with_bias(bias.clone()).with_activation(activation);
    let factors = normal(&[9, 48], DType::F32)?;
    let gradients = (layer.forward(&x)? * &factors)?.sum_all()?.backward()?;

    let zeros = Tensor::zeros((16, 16), DType::F32, &Device::Cpu)?;
    let blocks = [values.get(0)?, values.get(1)?, values.get(2)?];
    let rows = [[&blocks[0], &blocks[1]], [&zeros, &zeros], [&zeros, &blocks[2]]];
    let rows: Vec<Tensor> = rows.iter().map(|row| Tensor::cat(row, 1)).collect::<Result<_>>()?;
    let y = x.matmul(&Tensor::cat(&rows, 0)?.t()?)?.broadcast_add(&bias)?.silu()?;
    let expected = (y * &factors)?.sum_all()?.backward()?;
    for var in [&values, &x] {
        let [found, expected] = [&gradients, &expected]
            .map(|of| of.get(var).expect("a gradient").flatten_all().unwrap());
        let error = (found - &expected)?.abs()?.max(0)?.to_scalar::<f32>()?;
        let size = expected.abs()?.max(0)?.to_scalar::<f32>()?;
        assert!(error <= 1e-6 * size, "{error} of {size}");
    }
    Ok(())
}
