//! Options of `blockflash sddmm`.

use crate::args::{Common, Float, out_path, sizes};
use crate::bsr_args::Axis;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Computes alpha·A·B + beta·values at the stored blocks of a block-sparse matrix.

Examples:
  blockflash sddmm --random 4096x1024x4096 --block 64 --density 0.1 --a-layout column --check
  blockflash sddmm --random 2048x64x2048 --block 128 --density 0.25 --b-layout column \\
      --out scores.safetensors
  blockflash sddmm --a dy_t.npy --b x.npy --pattern weights.safetensors --out-dtype f32 \\
      --out gradient.npy

The pattern is a .safetensors file as `blockflash bsr-matmul --a` reads it: row_ptr (i32 or i64
[block rows + 1]), col_idx (i32 or i64 [blocks]), values ([blocks, b, b]) and optionally shape
([2]), which must be the shape of A·B. The values are the old ones that --beta scales. Without
--beta, only their sizes are read.";

const USAGE: &str = "blockflash sddmm [OPTIONS] --random MxKxN | --a FILE --b FILE --pattern FILE";

/// Options of `blockflash sddmm`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, override_usage = USAGE, next_help_heading = "Input")]
pub struct Args {
    /// Read A, [m, k], from a .npy or .safetensors file (tensor `a`)
    #[arg(long, value_name = "FILE", requires_all = ["b", "pattern"], conflicts_with = "random")]
    pub a: Option<PathBuf>,
    /// Read B, [k, n], from a .npy or .safetensors file (tensor `b`)
    #[arg(long, value_name = "FILE", requires_all = ["a", "pattern"], conflicts_with = "random")]
    pub b: Option<PathBuf>,
    /// Read the stored blocks from a .safetensors file with row_ptr, col_idx and values
    #[arg(long, value_name = "FILE", requires_all = ["a", "b"], conflicts_with = "random")]
    pub pattern: Option<PathBuf>,
    /// Draw A (m x k), B (k x n) and the positions of the stored blocks. The sizes are m, k and n
    #[arg(long, value_name = "MxKxN", value_parser = sizes::<3>)]
    pub random: Option<[usize; 3]>,
    /// Rows and columns of a block of a random pattern [default: 64]
    #[arg(long, value_name = "B")]
    pub block: Option<usize>,
    /// Fraction of the blocks of a random pattern that are stored, from 0 to 1
    /// [default: 0.1]
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub density: Option<f64>,
    /// Element type of A and B [default: the type of the files; f16 for f32, f64 and random input]
    #[arg(long, value_name = "f16|bf16|f32")]
    pub dtype: Option<Float>,
    /// Memory layout of A for the product: contiguous rows or columns
    #[arg(long, value_name = "row|column", default_value = "row")]
    pub a_layout: Axis,
    /// Memory layout of B for the product: contiguous rows or columns
    #[arg(long, value_name = "row|column", default_value = "row")]
    pub b_layout: Axis,

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
    /// Factor alpha of A·B
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_hyphen_values = true)]
    pub alpha: f32,
    /// Factor beta of the old values, which are the values of the pattern or random numbers
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_hyphen_values = true)]
    pub beta: f32,
}

/// What is written.
#[derive(clap::Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Write the values to a .npy or .safetensors file (tensor `values`)
    #[arg(long, value_name = "FILE", value_parser = out_path)]
    pub out: Option<PathBuf>,
    /// Element type of the values [default: the type of A and B]
    #[arg(long, value_name = "f16|bf16|f32")]
    pub out_dtype: Option<Float>,
}
