//! Gradients of attention on a GPU: no kernel computes them yet, and every call says so.

use blockflash_ops::{Attention, DType, Error, Tensor};
use blockflash_tests::gpu::gpu;

#[test]
fn gradients_on_a_gpu_are_refused() {
    let Some(gpu) = gpu("gradients_on_a_gpu_are_refused") else { return };
    let q = Tensor::zeros(&gpu.stream, DType::BF16, &[1, 128, 2, 64]).unwrap();
    let attention = Attention::new(q.view(), q.view(), q.view());
    let output = attention.forward(&gpu.stream).unwrap();
    let result = attention.backward(&output, q.view(), &gpu.stream);
    assert!(matches!(result, Err(Error::Unsupported { op: "attention_bwd", .. })), "{result:?}");
}
