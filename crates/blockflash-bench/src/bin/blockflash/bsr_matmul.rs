//! `blockflash bsr-matmul`.

use crate::args::{Common, Float, Half, ensure, out_path, sizes};
use crate::bsr_operands::Operands;
use crate::failure::{Failure, Result};
use crate::measure;
use crate::operand::Placed;
use crate::output::{RunReport, print};
use crate::outputs::Outputs;
use crate::progress::Progress;
use crate::table;
use blockflash_bench::io::Array;
use blockflash_ops::bsr_matmul::{BsrMatrix, BsrProblem, BsrTranspose};
use blockflash_ops::{Activation, Bias, BsrMatmul, BsrWorkspace, Tensor};
use blockflash_oracle::{self as oracle, BsrCase, Comparison};
use std::borrow::Cow;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Computes C = activation(alpha·A·B + beta·C + bias), or with Aᵀ in place of A.

Examples:
  blockflash bsr-matmul --random 4096x4096x4096 --block 64 --density 0.1 --check
  blockflash bsr-matmul --a weights.safetensors --b x.npy --bias bias.npy --activation gelu --out y.npy

A is a .safetensors file with row_ptr (i32 or i64 [block rows + 1]), col_idx (i32 or i64 [blocks]), values (f16, bf16, f32 or
f64 [blocks, b, b]) and, if A is no multiple of b or is transposed, shape ([2]). Without it A has b times the block rows, and B's
rows as columns.";

const USAGE: &str = "blockflash bsr-matmul [OPTIONS] --random MxNxK | --a FILE --b FILE";

/// Options of `blockflash bsr-matmul`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, override_usage = USAGE)]
pub struct Args {
    /// Read A from a .safetensors file with row_ptr, col_idx and values
    #[arg(
        long,
        value_name = "FILE",
        requires = "b",
        conflicts_with = "random",
        help_heading = "Input"
    )]
    pub a: Option<PathBuf>,
    /// Read B, [k, n], from a .npy or .safetensors file (tensor `b`)
    #[arg(
        long,
        value_name = "FILE",
        requires = "a",
        conflicts_with = "random",
        help_heading = "Input"
    )]
    pub b: Option<PathBuf>,
    /// Draw the blocks of A (m x k, transposed k x m) and B (k x n) from N(0, 1): m, n, k
    #[arg(long, value_name = "MxNxK", value_parser = sizes::<3>, help_heading = "Input")]
    pub random: Option<[usize; 3]>,
    /// Rows and columns of a block of a random A [default: 64]
    #[arg(long, value_name = "B", help_heading = "Input")]
    pub block: Option<usize>,
    /// Fraction of the blocks of a random A that are stored, 0 to 1 [default: 0.1]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Input")]
    pub density: Option<f64>,
    /// Element type of A, B and bias [default: that of the files, f16 for f32, f64 and random]
    #[arg(long, value_name = "f16|bf16", hide_possible_values = true, help_heading = "Input")]
    pub dtype: Option<Half>,

    /// Multiply Aᵀ, by an index of A's block columns
    #[arg(long, help_heading = "Operation")]
    pub transpose_a: bool,
    /// Whether rows or columns of B are contiguous where it is multiplied [default: row]
    #[arg(
        long,
        value_name = "row|column",
        hide_possible_values = true,
        help_heading = "Operation"
    )]
    pub b_layout: Option<Axis>,
    /// Whether rows or columns of C are contiguous where it is computed [default: row]
    #[arg(
        long,
        value_name = "row|column",
        hide_possible_values = true,
        help_heading = "Operation"
    )]
    pub c_layout: Option<Axis>,
    /// Factor of A·B [default: 1]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Operation")]
    pub alpha: Option<f32>,
    /// Factor of the old C, which --c names [default: 0]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Operation")]
    pub beta: Option<f32>,
    /// The old C, [m, n], from a .npy or .safetensors file (tensor `c`), or `random`
    #[arg(long, value_name = "FILE|random", requires = "beta", help_heading = "Operation")]
    pub c: Option<PathBuf>,
    /// Add a bias from a .npy or .safetensors file (tensor `bias`), or `random`
    #[arg(long, value_name = "FILE|random", help_heading = "Operation")]
    pub bias: Option<PathBuf>,
    /// Whether the bias has one value per row of C or one per column [default: row]
    #[arg(
        long,
        value_name = "row|column",
        requires = "bias",
        hide_possible_values = true,
        help_heading = "Operation"
    )]
    pub bias_axis: Option<Axis>,
    /// Function applied last: none, relu, gelu or silu
    #[arg(long, default_value = "none", hide_possible_values = true, help_heading = "Operation")]
    pub activation: ActivationName,

    /// Write C to a .npy or .safetensors file (tensor `c`)
    #[arg(long, value_name = "FILE", value_parser = out_path, help_heading = "Output")]
    pub out: Option<PathBuf>,
    /// Element type of C [default: that of A and B]
    #[arg(long, value_name = "f16|bf16|f32", hide_possible_values = true, help_heading = "Output")]
    pub out_dtype: Option<Float>,

    #[command(flatten)]
    pub common: Common,
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

/// Runs the matmul once, checks and times it.
pub fn run(args: Args) -> Result<ExitCode> {
    let (alpha, beta) = (args.alpha.unwrap_or(1.0), args.beta.unwrap_or(0.0));
    ensure(beta == 0.0 || args.c.is_some(), "--beta needs the old C: --c FILE or --c random")?;
    // C may take the place of the old one, which it is the sum with.
    let inputs =
        [("--a", args.a.as_ref()), ("--b", args.b.as_ref()), ("--bias", args.bias.as_ref())];
    let outputs = Outputs::new(&[("--out", "c", args.out.as_ref())], &inputs)?;
    let device = args.common.device.open()?;
    let stream = device.stream()?;

    let operands = Operands::new(&args)?;
    let [m, n, _] = operands.sizes;
    let a = if device.is_cpu() { None } else { Some(operands.a.to(&stream)?) };
    let matrix = a.as_ref().unwrap_or(&operands.a);
    let index = args.transpose_a.then(|| BsrTranspose::new(matrix, &stream)).transpose()?;
    let b = lying(&operands.b, args.b_layout)?;
    let b = Placed::new(&b, &stream)?;
    let bias = operands.bias.as_ref().map(|bias| Placed::new(bias, &stream)).transpose()?;
    let workspace = BsrWorkspace::new(&stream)?;
    let matmul = BsrMatmul {
        alpha,
        beta,
        bias: match (&bias, args.bias_axis) {
            (None, _) => Bias::None,
            (Some(bias), None | Some(Axis::Row)) => Bias::PerRow(bias.view()?),
            (Some(bias), Some(Axis::Column)) => Bias::PerColumn(bias.view()?),
        },
        activation: match args.activation {
            ActivationName::None => Activation::None,
            ActivationName::Relu => Activation::Relu,
            ActivationName::Gelu => Activation::Gelu,
            ActivationName::Silu => Activation::Silu,
        },
        transpose: index.as_ref(),
        workspace: Some(&workspace),
        ..BsrMatmul::new(matrix, b.view()?.permute(order(args.b_layout))?)
    };

    let old_c = || -> Result<Tensor> {
        Ok(match (&operands.c, args.c_layout) {
            (Some(c), layout) => lying(c, layout)?.upload(&stream)?,
            (None, Some(Axis::Column)) => Tensor::empty(&stream, operands.c_dtype, &[n, m])?,
            (None, _) => Tensor::empty(&stream, operands.c_dtype, &[m, n])?,
        })
    };
    let into = |c: &mut Tensor| -> Result<()> {
        Ok(matmul.matmul_into(c.view_mut().permute(order(args.c_layout))?, &stream)?)
    };
    let mut c = old_c()?;
    let problem = matmul.problem(&c.view_mut().permute(order(args.c_layout))?)?;
    let kernel = match device.cuda_properties() {
        Some(gpu) if !problem.is_empty() => {
            Some(blockflash_ops::bsr_matmul::select(&problem, gpu)?)
        }
        _ => None,
    };
    let first_us = measure::first("bsr-matmul", &stream, || into(&mut c))?;
    // With beta every run changes C: the result is that of the first one.
    let mut other = if beta == 0.0 { None } else { Some(old_c()?) };
    let again = || into(other.as_mut().unwrap_or(&mut c));
    let timing =
        measure::repeat("bsr-matmul, again", &stream, first_us, args.common.repeat, again)?;

    let (mut written, mut checks) = (Vec::new(), Vec::new());
    if args.out.is_some() || args.common.check {
        let c = Array::download(&c, &stream)?;
        let c = lying(&c, args.c_layout)?;
        written = outputs.save(&[("c", &c)])?;
        if args.common.check {
            checks.push(("c", check(&args, &operands, &problem, &c)?));
        }
    }

    let report = RunReport {
        operation: "bsr-matmul",
        device: &device,
        note: args.common.device.note(&device),
        kernel,
        tensors: vec![
            ("a", vec![operands.a.rows(), operands.a.cols()], problem.dtype),
            ("b", vec![problem.k, n], problem.dtype),
            ("c", vec![m, n], problem.c_dtype),
        ],
        details: details(&args, &operands.a, &problem),
        flops: blockflash_ops::bsr_flops(&problem) as f64,
        timing,
        checks,
        written,
    };
    print(&report.render(args.common.json)?)?;
    Ok(report.exit_code())
}

fn details(args: &Args, a: &BsrMatrix, problem: &BsrProblem) -> Vec<(&'static str, String)> {
    let blocks = format!(
        "{} of {} x {}, density {:.4}",
        table::count(problem.nnz_blocks as u64),
        problem.block_size,
        problem.block_size,
        a.density()
    );
    let a = if problem.a_transposed { "Aᵀ" } else { "A" };
    let mut formula = format!("{}{a}·B", factor(problem.alpha));
    if problem.beta != 0.0 {
        formula += &format!(" + {}C", factor(problem.beta));
    }
    if args.bias.is_some() {
        let axis = if args.bias_axis == Some(Axis::Column) { "column" } else { "row" };
        formula += &format!(" + bias per {axis}");
    }
    formula = match args.activation {
        ActivationName::None => formula,
        ActivationName::Relu => format!("relu({formula})"),
        ActivationName::Gelu => format!("gelu({formula})"),
        ActivationName::Silu => format!("silu({formula})"),
    };
    vec![("blocks", blocks), ("formula", formula)]
}

/// A matrix as it lies in memory, its transpose where columns are contiguous there; and back.
fn lying(matrix: &Array, layout: Option<Axis>) -> Result<Cow<'_, Array>> {
    if layout != Some(Axis::Column) {
        return Ok(Cow::Borrowed(matrix));
    }
    let transposed = matrix.transposed();
    transposed
        .map(Cow::Owned)
        .ok_or_else(|| Failure::new(format!("{:?} is no matrix", matrix.shape())))
}

/// The dimensions of the matrix in what lies in memory.
fn order(layout: Option<Axis>) -> &'static [usize] {
    if layout == Some(Axis::Column) { &[1, 0] } else { &[0, 1] }
}

fn factor(value: f32) -> String {
    if value == 1.0 { String::new() } else { format!("{value}·") }
}

fn check(args: &Args, operands: &Operands, problem: &BsrProblem, c: &Array) -> Result<Comparison> {
    let per_column = args.bias_axis == Some(Axis::Column);
    let transposed = if args.transpose_a { operands.transposed() } else { None };
    let [row_ptr, col_idx, values] = match &transposed {
        Some([row_ptr, col_idx, values]) => [row_ptr, col_idx, values],
        None => [&operands.row_ptr, &operands.col_idx, &operands.values],
    };
    let bias = operands.bias.as_ref().map(|bias| bias as _);
    let case = BsrCase {
        row_ptr: row_ptr.as_i32().unwrap_or_default(),
        col_idx: col_idx.as_i32().unwrap_or_default(),
        values,
        b: &operands.b,
        c: operands.c.as_ref().map(|c| c as _),
        alpha: problem.alpha,
        beta: problem.beta,
        bias_per_row: bias.filter(|_| !per_column),
        bias_per_column: bias.filter(|_| per_column),
        activation: match args.activation {
            ActivationName::None => oracle::Activation::None,
            ActivationName::Relu => oracle::Activation::Relu,
            ActivationName::Gelu => oracle::Activation::Gelu,
            ActivationName::Silu => oracle::Activation::Silu,
        },
    };
    let progress = Progress::fractions("checking");
    Ok(oracle::bsr_matmul(&case, c, args.common.seed, |done| progress.fraction(done))?)
}
