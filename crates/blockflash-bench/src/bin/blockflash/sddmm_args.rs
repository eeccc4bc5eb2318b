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
#[command(after_help = EXAMPLES, override_usage = USAGE)]
pub struct Args {
    /// Read A, [m, k], from a .npy or .safetensors file (tensor `a`)
    #[arg(
        long,
        value_name = "FILE",
        requires_all = ["b", "pattern"],
        conflicts_with = "random",
        help_heading = "Input"
    )]
    pub a: Option<PathBuf>,
    /// Read B, [k, n], from a .npy or .safetensors file (tensor `b`)
    #[arg(
        long,
        value_name = "FILE",
        requires_all = ["a", "pattern"],
        conflicts_with = "random",
        help_heading = "Input"
    )]
    pub b: Option<PathBuf>,
    /// Read the stored blocks from a .safetensors file with row_ptr, col_idx and values
    #[arg(
        long,
        value_name = "FILE",
        requires_all = ["a", "b"],
        conflicts_with = "random",
        help_heading = "Input"
    )]
    pub pattern: Option<PathBuf>,
    /// Draw A (m x k), B (k x n) and the positions of the stored blocks. The sizes are m, k and n
    #[arg(long, value_name = "MxKxN", value_parser = sizes::<3>, help_heading = "Input")]
    pub random: Option<[usize; 3]>,
    /// Rows and columns of a block of a random pattern [default: 64]
    #[arg(long, value_name = "B", help_heading = "Input")]
    pub block: Option<usize>,
    /// Fraction of the blocks of a random pattern that are stored, from 0 to 1
    /// [default: 0.1]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Input")]
    pub density: Option<f64>,
    /// Element type of A and B [default: the type of the files; f16 for f32, f64 and random input]
    #[arg(long, value_name = "f16|bf16|f32", hide_possible_values = true, help_heading = "Input")]
    pub dtype: Option<Float>,
    /// Memory layout of A for the product: contiguous rows or columns
    #[arg(
        long,
        value_name = "row|column",
        default_value = "row",
        hide_possible_values = true,
        help_heading = "Input"
    )]
    pub a_layout: Axis,
    /// Memory layout of B for the product: contiguous rows or columns
    #[arg(
        long,
        value_name = "row|column",
        default_value = "row",
        hide_possible_values = true,
        help_heading = "Input"
    )]
    pub b_layout: Axis,

    /// Factor alpha of A·B
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        allow_hyphen_values = true,
        help_heading = "Operation"
    )]
    pub alpha: f32,
    /// Factor beta of the old values, which are the values of the pattern or random numbers
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_hyphen_values = true,
        help_heading = "Operation"
    )]
    pub beta: f32,

    /// Write the values to a .npy or .safetensors file (tensor `values`)
    #[arg(long, value_name = "FILE", value_parser = out_path, help_heading = "Output")]
    pub out: Option<PathBuf>,
    /// Element type of the values [default: the type of A and B]
    #[arg(long, value_name = "f16|bf16|f32", hide_possible_values = true, help_heading = "Output")]
    pub out_dtype: Option<Float>,

    #[command(flatten)]
    pub common: Common,
}
