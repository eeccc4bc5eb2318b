//! `blockflash bsr-matmul`.

use crate::args::ensure;
use crate::bsr_args::{ActivationName, Args, Axis};
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
use std::process::ExitCode;

/// Runs the matmul once, checks and times it.
pub fn run(args: Args) -> Result<ExitCode> {
    let (alpha, beta) = (args.alpha.unwrap_or(1.0), args.beta.unwrap_or(0.0));
    ensure(beta == 0.0 || args.c.is_some(), "--beta needs the old C: --c FILE or --c random")?;
    // C may take the place of the old one, which it is the sum with.
    let inputs =
        [("--a", args.a.as_ref()), ("--b", args.b.as_ref()), ("--bias", args.bias.as_ref())];
    let outputs = Outputs::new(&[("--out", "c", args.out.as_ref())], &inputs)?;
    let device = args.common.device.open()?;
    args.tuning.load(&device)?;
    let stream = device.stream()?;

    let operands = Operands::new(&args)?;
    let [m, n, _] = operands.sizes;
    let a = if device.is_cpu() { None } else { Some(operands.a.to(&stream)?) };
    let matrix = a.as_ref().unwrap_or(&operands.a);
    let index = args.transpose_a.then(|| BsrTranspose::new(matrix, &stream)).transpose()?;
    let b = with_layouts(&operands.b, args.b_layout)?;
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
            (Some(c), layout) => with_layouts(c, layout)?.upload(&stream)?,
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
    // With beta every run changes C, so the result of the first run is kept.
    let mut other = if beta == 0.0 { None } else { Some(old_c()?) };
    let again = || into(other.as_mut().unwrap_or(&mut c));
    let timing =
        measure::repeat("bsr-matmul, again", &stream, first_us, args.common.repeat, again)?;

    let (mut written, mut checks) = (Vec::new(), Vec::new());
    if args.out.is_some() || args.common.check {
        let c = Array::download(&c, &stream)?;
        let c = with_layouts(&c, args.c_layout)?;
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
fn with_layouts(matrix: &Array, layout: Option<Axis>) -> Result<Cow<'_, Array>> {
    if layout != Some(Axis::Column) {
        return Ok(Cow::Borrowed(matrix));
    }
    let transposed = matrix.transposed();
    transposed
        .map(Cow::Owned)
        .ok_or_else(|| Failure::new(format!("{:?} is not a matrix", matrix.shape())))
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
