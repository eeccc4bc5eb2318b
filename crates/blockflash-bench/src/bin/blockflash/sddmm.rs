//! `blockflash sddmm`.

use crate::args::{Common, Float, Half, out_path, sizes};
use crate::bsr_matmul::Axis;
use crate::bsr_operands::{BlockGrid, RandomStructure};
use crate::failure::Result;
use crate::operand::{Placed, random, save};
use crate::output::{RunReport, print};
use crate::progress::Progress;
use crate::{measure, memory, table};
use blockflash_bench::check::{self, Comparison, SddmmCase};
use blockflash_bench::io::Array;
use blockflash_ops::bsr_sddmm::{self, BsrSddmmProblem};
use blockflash_ops::{BsrMatrix, BsrSddmm, DType, Device, Major, Stream, Tensor, View, bsr_sddmm_flops};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Computes alpha·A·B + beta·values at the stored blocks of a block-sparse matrix, all random.

Examples:
  blockflash sddmm --random 4096x1024x4096 --block 64 --density 0.1 --a-layout column --check
  blockflash sddmm --random 2048x64x2048 --block 128 --density 0.25 --b-layout column --out scores.safetensors";

/// Random tensors of one seed.
const LANE_A: u64 = 0;
const LANE_B: u64 = 1;
const LANE_PATTERN: u64 = 2;
const LANE_OLD: u64 = 3;

/// Options of `blockflash sddmm`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Draw A (m x k), B (k x n) and the stored blocks: m, k, n
    #[arg(long, value_name = "MxKxN", value_parser = sizes::<3>, help_heading = "Input")]
    pub random: [usize; 3],
    /// Rows and columns of a block
    #[arg(long, value_name = "B", default_value_t = 64, help_heading = "Input")]
    pub block: usize,
    /// Fraction of the blocks that are stored, 0 to 1
    #[arg(long, value_name = "X", default_value_t = 0.1, allow_hyphen_values = true, help_heading = "Input")]
    pub density: f64,
    /// Element type of A and B
    #[arg(
        long,
        value_name = "f16|bf16",
        default_value = "f16",
        hide_possible_values = true,
        help_heading = "Input"
    )]
    pub dtype: Half,
    /// Whether rows or columns of A are contiguous
    #[arg(
        long,
        value_name = "row|column",
        default_value = "row",
        hide_possible_values = true,
        help_heading = "Input"
    )]
    pub a_layout: Axis,
    /// Whether rows or columns of B are contiguous
    #[arg(
        long,
        value_name = "row|column",
        default_value = "row",
        hide_possible_values = true,
        help_heading = "Input"
    )]
    pub b_layout: Axis,

    /// Factor of A·B
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        allow_hyphen_values = true,
        help_heading = "Operation"
    )]
    pub alpha: f32,
    /// Factor of the old values, which are random
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
    /// Element type of the values [default: that of A and B]
    #[arg(long, value_name = "f16|bf16|f32", hide_possible_values = true, help_heading = "Output")]
    pub out_dtype: Option<Float>,

    #[command(flatten)]
    pub common: Common,
}

impl From<Axis> for Major {
    fn from(axis: Axis) -> Self {
        match axis {
            Axis::Row => Major::Row,
            Axis::Column => Major::Column,
        }
    }
}

/// What is multiplied, on the host; A and B as they lie in memory.
struct Operands {
    structure: RandomStructure,
    pattern: BsrMatrix,
    majors: [Major; 2],
    a: Array,
    b: Array,
    old: Option<Array>,
}

impl Operands {
    fn new(args: &Args) -> Result<Self> {
        let ([m, k, n], block, seed) = (args.random, args.block, args.common.seed);
        let (dtype, values_dtype) = (DType::from(args.dtype), values_dtype(args));
        let grid = BlockGrid::new("the pattern", [m, n], block, args.density)?;
        let shape = [grid.stored, block, block];
        // The values of the pattern do not count; they are old and new values besides.
        memory::ensure(
            "A, B and the values",
            memory::size(&[&shape, &[m, k], &[k, n]], dtype.size())
                .saturating_add(memory::size(&[&shape, &shape], values_dtype.size())),
        )?;
        let structure = grid.draw(seed, LANE_PATTERN);
        let majors = [args.a_layout, args.b_layout].map(Major::from);
        let stored =
            |major, [rows, cols]: [usize; 2]| if major == Major::Row { [rows, cols] } else { [cols, rows] };
        let zeros = Tensor::zeros(&Device::cpu().stream()?, dtype, &shape)?;
        let (row_ptr, col_idx) = (&structure.row_ptr, &structure.col_idx);
        Ok(Self {
            pattern: BsrMatrix::from_parts(m, n, block, row_ptr, col_idx, zeros.view())?,
            structure,
            majors,
            a: random("a", dtype, &stored(majors[0], [m, k]), seed, LANE_A)?,
            b: random("b", dtype, &stored(majors[1], [k, n]), seed, LANE_B)?,
            old: match args.beta {
                0.0 => None,
                _ => Some(random("values", values_dtype, &shape, seed, LANE_OLD)?),
            },
        })
    }

    /// Values as they are before.
    fn old_values(&self, dtype: DType, stream: &Stream) -> Result<Tensor> {
        let block = self.pattern.block_size();
        Ok(match &self.old {
            Some(old) => old.upload(stream)?,
            None => Tensor::empty(stream, dtype, &[self.pattern.nnz_blocks(), block, block])?,
        })
    }
}

fn values_dtype(args: &Args) -> DType {
    args.out_dtype.map_or(DType::from(args.dtype), DType::from)
}

/// The matrix of an array that holds it, or its transpose if it is column-major.
fn matrix(view: View<'_>, major: Major) -> Result<View<'_>> {
    Ok(if major == Major::Row { view } else { view.permute(&[1, 0])? })
}

/// Runs the product once, checks and times it.
pub fn run(args: Args) -> Result<ExitCode> {
    let device = args.common.device.open()?;
    let stream = device.stream()?;
    let operands = Operands::new(&args)?;
    let pattern = if device.is_cpu() { None } else { Some(operands.pattern.to(&stream)?) };
    let [a, b] = [Placed::new(&operands.a, &stream)?, Placed::new(&operands.b, &stream)?];
    let [a, b] = [matrix(a.view()?, operands.majors[0])?, matrix(b.view()?, operands.majors[1])?];
    let product = BsrSddmm {
        alpha: args.alpha,
        beta: args.beta,
        ..BsrSddmm::new(pattern.as_ref().unwrap_or(&operands.pattern), a, b)
    };

    let old_values = || operands.old_values(values_dtype(&args), &stream);
    let mut values = old_values()?;
    let problem = product.problem(&values.view_mut())?;
    let kernel = match device.cuda_properties() {
        Some(gpu) if !problem.is_empty() => Some(bsr_sddmm::select(&problem, gpu)?),
        _ => None,
    };
    let first_us = measure::first("sddmm", &stream, || Ok(product.sddmm_into(values.view_mut(), &stream)?))?;
    // With beta every run changes the values: the result is that of the first one.
    let mut other = if args.beta == 0.0 { None } else { Some(old_values()?) };
    let again = || Ok(product.sddmm_into(other.as_mut().unwrap_or(&mut values).view_mut(), &stream)?);
    let timing = measure::repeat("sddmm, again", &stream, first_us, args.common.repeat, again)?;

    let (mut written, mut checks) = (Vec::new(), Vec::new());
    if args.out.is_some() || args.common.check {
        let values = Array::download(&values, &stream)?;
        written = save(&[("values", &values, args.out.as_ref())])?;
        if args.common.check {
            checks.push(("values", check(&args, &operands, &problem, &values)?));
        }
    }

    let BsrSddmmProblem { m, n, k, dtype, .. } = problem;
    let report = RunReport {
        operation: "sddmm",
        device: &device,
        note: args.common.device.note(&device),
        kernel,
        tensors: vec![
            ("a", vec![m, k], dtype),
            ("b", vec![k, n], dtype),
            ("values", values.shape().to_vec(), problem.values_dtype),
        ],
        details: details(&operands.pattern, &problem),
        flops: bsr_sddmm_flops(&problem) as f64,
        timing,
        checks,
        written,
    };
    print(&report.render(args.common.json)?)?;
    Ok(report.exit_code())
}

fn details(pattern: &BsrMatrix, problem: &BsrSddmmProblem) -> Vec<(&'static str, String)> {
    let BsrSddmmProblem { m, n, block_size, nnz_blocks, a, b, alpha, beta, .. } = *problem;
    let count = table::count(nnz_blocks as u64);
    let blocks =
        format!("{count} of {block_size} x {block_size} in {m} x {n}, density {:.4}", pattern.density());
    let layout = format!("a {}-major, b {}-major", a.major.name(), b.major.name());
    let factor = |value: f32| if value == 1.0 { String::new() } else { format!("{value}·") };
    let mut formula = format!("{}A·B", factor(alpha));
    if beta != 0.0 {
        formula += &format!(" + {}values", factor(beta));
    }
    vec![("blocks", blocks), ("layout", layout), ("formula", formula)]
}

fn check(args: &Args, operands: &Operands, problem: &BsrSddmmProblem, values: &Array) -> Result<Comparison> {
    let case = SddmmCase {
        row_ptr: &operands.structure.row_ptr,
        col_idx: &operands.structure.col_idx,
        sizes: [problem.m, problem.n, problem.k],
        a: &operands.a,
        b: &operands.b,
        majors: operands.majors,
        old: operands.old.as_ref(),
        alpha: problem.alpha,
        beta: problem.beta,
    };
    let progress = Progress::fractions("checking");
    Ok(check::bsr_sddmm(&case, values, args.common.seed, |done| progress.fraction(done))?)
}
