//! Options of `blockflash bsr-matmul`.

use crate::args::{Common, Float, out_path, sizes};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Computes C = activation(alpha·A·B + beta·C + bias), or with Aᵀ in place of A.

Examples:
  blockflash bsr-matmul --random 4096x4096x4096 --block 64 --density 0.1 --check
  blockflash bsr-matmul --a weights.safetensors --b x.npy --bias bias.npy --activation gelu \\
      --out y.npy

A is a .safetensors file with row_ptr (i32 or i64 [block rows + 1]), col_idx (i32 or i64 [blocks]),
values (f16, bf16, f32 or f64 [blocks, b, b]) and optionally shape ([2]). The shape is needed if a
dimension of A is not a multiple of b or if A is transposed. Without it, A has b rows for each block
row, and as many columns as B has rows.";

const USAGE: &str = "blockflash bsr-matmul [OPTIONS] --random MxNxK | --a FILE --b FILE";

/// Options of `blockflash bsr-matmul`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, override_usage = USAGE, next_help_heading = "Input")]
pub struct Args {
    /// Read A from a .safetensors file with row_ptr, col_idx and values
    #[arg(long, value_name = "FILE", requires = "b", conflicts_with = "random")]
    pub a: Option<PathBuf>,
    /// Read B, [k, n], from a .npy or .safetensors file (tensor `b`)
    #[arg(long, value_name = "FILE", requires = "a", conflicts_with = "random")]
    pub b: Option<PathBuf>,
    /// Draw A (m x k, or k x m with --transpose-a) and B (k x n) from N(0, 1). The sizes are m, n
    /// and k
    #[arg(long, value_name = "MxNxK", value_parser = sizes::<3>)]
    pub random: Option<[usize; 3]>,
    /// Rows and columns of a block of a random A [default: 64]
    #[arg(long, value_name = "B")]
    pub block: Option<usize>,
    /// Fraction of the blocks of a random A that are stored, from 0 to 1 [default: 0.1]
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub density: Option<f64>,
    /// Element type of A, B and bias [default: the type of the files; f16 for f32, f64 and random
    /// input]
    #[arg(long, value_name = "f16|bf16|f32")]
    pub dtype: Option<Float>,

    #[command(flatten)]
    pub operation: OperationArgs,
    #[command(flatten)]
    pub output: OutputArgs,
    #[command(flatten)]
    pub common: Common,
}

/// What is computed.
#[derive(clap::Args)]
#[command(next_help_heading = "Operation")]
pub struct OperationArgs {
    /// Multiply Aᵀ instead of A. The stored blocks stay where they are; an index of A's block
    /// columns is built
    #[arg(long)]
    pub transpose_a: bool,
    /// Memory layout of B for the product: contiguous rows or columns [default: row]
    #[arg(long, value_name = "row|column")]
    pub b_layout: Option<Axis>,
    /// Memory layout of C: contiguous rows or columns [default: row]
    #[arg(long, value_name = "row|column")]
    pub c_layout: Option<Axis>,
    /// Factor alpha of A·B [default: 1]
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub alpha: Option<f32>,
    /// Factor beta of the old C, which --c gives [default: 0]
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub beta: Option<f32>,
    /// Read the old C, [m, n], from a .npy or .safetensors file (tensor `c`), or `random`
    #[arg(long, value_name = "FILE|random", requires = "beta")]
    pub c: Option<PathBuf>,
    /// Add a bias from a .npy or .safetensors file (tensor `bias`), or `random`
    #[arg(long, value_name = "FILE|random")]
    pub bias: Option<PathBuf>,
    /// Whether the bias has one value per row of C or one per column [default: row]
    #[arg(long, value_name = "row|column", requires = "bias")]
    pub bias_axis: Option<Axis>,
    /// Activation function, applied last: none, relu, gelu or silu
    #[arg(long, default_value = "none")]
    pub activation: ActivationName,
}

/// What is written.
#[derive(clap::Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Write C to a .npy or .safetensors file (tensor `c`)
    #[arg(long, value_name = "FILE", value_parser = out_path)]
    pub out: Option<PathBuf>,
    /// Element type of C [default: the type of A and B]
    #[arg(long, value_name = "f16|bf16|f32")]
    pub out_dtype: Option<Float>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Axis {
    Row,
    Column,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ActivationName {
    None,
    Relu,
    Gelu,
    Silu,
}
