//! `blockflash sddmm`.

use crate::failure::Result;
use crate::operand::Placed;
use crate::output::{RunReport, print};
use crate::outputs::Outputs;
use crate::progress::Progress;
use crate::sddmm_args::Args;
use crate::sddmm_operands::Operands;
use crate::{measure, table};
use blockflash_bench::io::Array;
use blockflash_ops::bsr_sddmm::{self, BsrSddmmProblem};
use blockflash_ops::{BsrMatrix, BsrSddmm, Major, View, bsr_sddmm_flops};
use blockflash_oracle::{self as oracle, Comparison, SddmmCase};
use std::process::ExitCode;

/// The matrix of an array that holds it, or its transpose if it is column-major.
fn matrix(view: View<'_>, major: Major) -> Result<View<'_>> {
    Ok(if major == Major::Row { view } else { view.permute(&[1, 0])? })
}

/// Runs the product once, checks and times it.
pub fn run(args: Args) -> Result<ExitCode> {
    let inputs =
        [("--a", args.a.as_ref()), ("--b", args.b.as_ref()), ("--pattern", args.pattern.as_ref())];
    let outputs = Outputs::new(&[("--out", "values", args.out.as_ref())], &inputs)?;
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

    let old_values = || operands.old_values(&stream);
    let mut values = old_values()?;
    let problem = product.problem(&values.view_mut())?;
    let kernel = match device.cuda_properties() {
        Some(gpu) if !problem.is_empty() => Some(bsr_sddmm::select(&problem, gpu)?),
        _ => None,
    };
    let first_us =
        measure::first("sddmm", &stream, || Ok(product.sddmm_into(values.view_mut(), &stream)?))?;
    // With beta every run changes the values, so the result of the first run is kept.
    let mut other = if args.beta == 0.0 { None } else { Some(old_values()?) };
    let again =
        || Ok(product.sddmm_into(other.as_mut().unwrap_or(&mut values).view_mut(), &stream)?);
    let timing = measure::repeat("sddmm, again", &stream, first_us, args.common.repeat, again)?;

    let (mut written, mut checks) = (Vec::new(), Vec::new());
    if args.out.is_some() || args.common.check {
        let values = Array::download(&values, &stream)?;
        written = outputs.save(&[("values", &values)])?;
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
    let blocks = format!(
        "{count} of {block_size} x {block_size} in {m} x {n}, density {:.4}",
        pattern.density()
    );
    let layout = format!("a {}-major, b {}-major", a.major.name(), b.major.name());
    let factor = |value: f32| if value == 1.0 { String::new() } else { format!("{value}·") };
    let mut formula = format!("{}A·B", factor(alpha));
    if beta != 0.0 {
        formula += &format!(" + {}values", factor(beta));
    }
    vec![("blocks", blocks), ("layout", layout), ("formula", formula)]
}

fn check(
    args: &Args,
    operands: &Operands,
    problem: &BsrSddmmProblem,
    values: &Array,
) -> Result<Comparison> {
    let case = SddmmCase {
        row_ptr: &operands.row_ptr,
        col_idx: &operands.col_idx,
        sizes: [problem.m, problem.n, problem.k],
        a: &operands.a,
        b: &operands.b,
        majors: operands.majors,
        old: operands.old.as_ref().map(|old| old as _),
        alpha: problem.alpha,
        beta: problem.beta,
    };
    let progress = Progress::fractions("checking");
    Ok(oracle::bsr_sddmm(&case, values, args.common.seed, |done| progress.fraction(done))?)
}
