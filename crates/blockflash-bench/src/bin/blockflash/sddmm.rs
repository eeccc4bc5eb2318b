//! `blockflash sddmm`.

use crate::bsr_file::{BsrFile, RandomBlocks};
use crate::failure::{Result, bail, ensure};
use crate::operand::{Source, common_dtype, load_all, random};
use crate::outputs::Outputs;
use crate::run::Run;
use crate::sddmm_args::Args;
use blockflash_bench::case::{SddmmCall, SddmmData, SddmmOperands};
use blockflash_bench::memory;
use blockflash_ops::{DType, Major};
use std::path::Path;
use std::process::ExitCode;

/// Random stream of the previous values.
const LANE_OLD: u64 = 3;

/// Runs the product once, checks and times it.
pub fn run(args: Args) -> Result<ExitCode> {
    let inputs =
        [("--a", args.a.as_ref()), ("--b", args.b.as_ref()), ("--pattern", args.pattern.as_ref())];
    let outputs = Outputs::new(&[("--out", "values", args.output.out.as_ref())], &inputs)?;
    let device = args.common.device.open()?;
    let stream = device.stream()?;
    let data = data(&args)?;
    let values_dtype = args.output.out_dtype.map_or(data.a.dtype(), DType::from);
    let call = SddmmCall {
        alpha: args.operation.alpha,
        beta: args.operation.beta,
        ..SddmmCall::new(values_dtype, majors(&args))
    };
    let mut operands = SddmmOperands::new(call, data, &stream)?;
    let (operation, kernel) = ("sddmm", None);
    Run { operation, common: &args.common, kernel, outputs, device: &device, stream: &stream }
        .of(&mut operands)
}

fn majors(args: &Args) -> [Major; 2] {
    [args.a_layout, args.b_layout].map(Major::from)
}

/// What is computed from, read or drawn.
fn data(args: &Args) -> Result<SddmmData> {
    let dtype = args.dtype.map(DType::from);
    match (args.random, &args.a, &args.b, &args.pattern) {
        (Some(sizes), ..) => drawn(args, sizes, dtype.unwrap_or(DType::F16)),
        (None, Some(a), Some(b), Some(pattern)) => {
            // clap does not enforce `requires` where what is required conflicts with another option
            // that is given.
            ensure!(
                args.block.is_none() && args.density.is_none(),
                "--block and --density only apply to --random"
            );
            read(args, [a, b, pattern], dtype)
        }
        _ => bail!(
            "nothing to compute: give --a FILE, --b FILE and --pattern FILE, or --random MxKxN \
             (see --help)"
        ),
    }
}

fn drawn(args: &Args, [m, k, n]: [usize; 3], dtype: DType) -> Result<SddmmData> {
    let values_dtype = args.output.out_dtype.map_or(dtype, DType::from);
    let blocks = RandomBlocks::new("the pattern", [m, n], args.block, args.density)?;
    let shape = [blocks.stored, blocks.block, blocks.block];
    enough_memory(&shape, [&[m, k], &[k, n]], dtype, values_dtype)?;
    let seed = args.common.seed;
    let draw = |name, shape: &[usize], lane| random(name, dtype, shape, seed, lane);
    let structure = blocks.draw(seed);
    let data = SddmmData::drawn([m, n, k], blocks.block, structure, majors(args), draw)?;
    let old = match args.operation.beta {
        0.0 => None,
        _ => Some(random("values", values_dtype, &shape, seed, LANE_OLD)?),
    };
    Ok(SddmmData { old, ..data })
}

fn read(args: &Args, [a, b, file]: [&Path; 3], dtype: Option<DType>) -> Result<SddmmData> {
    let sources = [Source::open(a, "a")?, Source::open(b, "b")?];
    let dtype = common_dtype(dtype, &sources)?;
    let values_dtype = args.output.out_dtype.map_or(dtype, DType::from);
    let [&[m, k], &[rows_of_b, n]] = [sources[0].shape()?, sources[1].shape()?] else {
        let (a, b) = (sources[0].shape()?, sources[1].shape()?);
        bail!("a is {a:?} and b {b:?}, expected [m, k] and [k, n]");
    };
    ensure!(rows_of_b == k, "b has {rows_of_b} rows, but A has {k} columns");
    let BsrFile { shape, block, row_ptr, col_idx, values } = BsrFile::read(file)?;
    let [rows, cols] = shape.unwrap_or([m, n]);
    ensure!([rows, cols] == [m, n], "the pattern is {rows} x {cols}, but A·B is {m} x {n}");
    let stored = values.shape()?.first().copied().unwrap_or(0);
    let entries = col_idx.len();
    ensure!(stored == entries, "values has {stored} blocks, but col_idx {entries} entries");
    enough_memory(&[stored, block, block], [&[m, k], &[k, n]], dtype, values_dtype)?;
    let old = if args.operation.beta == 0.0 { None } else { Some(values.load(values_dtype)?) };
    let [a, b] = load_all(sources, dtype, 0)?;
    Ok(SddmmData { row_ptr, col_idx, block, a, b, old })
}

/// There are old and new values.
fn enough_memory(
    shape: &[usize],
    matrices: [&[usize]; 2],
    dtype: DType,
    values: DType,
) -> Result<()> {
    let operands = memory::size(&[matrices[0], matrices[1]], dtype.size());
    let values = memory::size(&[shape, shape], values.size());
    Ok(memory::ensure("A, B and the values", operands.saturating_add(values))?)
}
