//! Attention and block-sparse matrix multiplication on NVIDIA GPUs, with kernels that are compiled ahead of time and travel
//! inside the crate. Building needs no CUDA toolkit; running needs a driver, and without one the same calls run on the CPU.
//!
//! ```
//! use blockflash_ops::{Attention, DType, Device, Mask, Tensor, Result};
//! use half::f16;
//!
//! fn main() -> Result<()> {
//!     let device = Device::best(); // the first usable GPU, else the CPU
//!     let stream = device.stream()?;
//!     let (batch, seqlen, heads, head_dim) = (1, 128, 2, 64);
//!     let data: Vec<f16> = (0..batch * seqlen * heads * head_dim).map(|i| f16::from_f32((i as f32).sin())).collect();
//!     let q = Tensor::from_slice(&stream, &data, &[batch, seqlen, heads, head_dim])?;
//!     let attention = Attention { mask: Mask::causal(), ..Attention::new(q.view(), q.view(), q.view()) };
//!     let output = attention.forward(&stream)?;
//!     let o = output.o.to_vec::<f16>(&stream)?; // waits for the result
//!     assert_eq!((o.len(), output.lse.dtype()), (data.len(), DType::F32));
//!     Ok(())
//! }
//! ```
//!
//! - [`Attention`]: softmax attention with causal and window [`Mask`]s, grouped heads, softcap, sinks, variable length.
//! - [`BsrMatmul`]: a block-sparse [`BsrMatrix`] times a dense matrix, with bias and activation.
//! - [`support`]: what runs on a device, and why not otherwise.
//!
//! Every call goes one way: the operands are validated into a plain problem ([`Attention::problem`]), a kernel is selected
//! ([`attention::select`]), the launch is planned ([`attention::plan`]) and queued. The first three touch no GPU. Whatever is
//! not supported is an [`Error`]; no option is ignored.
#![forbid(unsafe_code)]

mod arch;
pub mod attention;
pub mod bsr_matmul;
mod check;
mod error;
mod float;
mod flops;
mod math;
mod support;

pub use attention::{Align, Attention, AttentionOutput, AttentionProblem, CuSeqlens, Mask, PackedRows};
pub use bsr_matmul::{Activation, Bias, BsrMatmul, BsrMatrix, BsrProblem};
pub use error::{Error, Result};
pub use flops::{attention_flops, attention_varlen_flops, bsr_flops};
pub use support::{Status, SupportRow, support, support_with};

pub use blockflash_safe::{
    ComputeCapability, CudaProperties, DType, Device, Element, Event, Graph, Layout, Row, Stream, Target,
    Tensor, View, ViewMut,
};

#[cfg(test)]
mod fixtures;
