//! `blockflash bsr-matmul`.

use crate::bsr_args::{ActivationName, Args, Axis};
use crate::bsr_file::{BsrFile, RandomBlocks};
use crate::failure::{Result, bail, ensure};
use crate::operand::{Source, common_dtype, load_all, random};
use crate::outputs::Outputs;
use crate::run::Run;
use blockflash_bench::case::{BsrCall, BsrData, BsrOperands};
use blockflash_bench::io::Array;
use blockflash_bench::memory;
use blockflash_bench::placement::Placement;
use blockflash_ops::bsr_matmul::BiasKind;
use blockflash_ops::{Activation, DType, Major};
use std::path::Path;
use std::process::ExitCode;

/// Random streams of one seed, besides those of A and B.
const LANE_BIAS: u64 = 3;
const LANE_C: u64 = 4;

/// Runs the matmul once, checks and times it.
pub fn run(args: Args) -> Result<ExitCode> {
    let (alpha, beta) = (args.operation.alpha.unwrap_or(1.0), args.operation.beta.unwrap_or(0.0));
    ensure!(
        beta == 0.0 || args.operation.c.is_some(),
        "--beta needs the old C: --c FILE or --c random"
    );
    // C may take the place of the old one, which it is the sum with.
    let inputs = [
        ("--a", args.a.as_ref()),
        ("--b", args.b.as_ref()),
        ("--bias", args.operation.bias.as_ref()),
    ];
    let outputs = Outputs::new(&[("--out", "c", args.output.out.as_ref())], &inputs)?;
    let device = args.common.device.open()?;
    let stream = device.stream()?;

    let data = data(&args)?;
    let layout = |axis: Option<Axis>| Placement::of_major(axis.unwrap_or(Axis::Row).into());
    let call = BsrCall {
        transposed: args.operation.transpose_a,
        alpha,
        beta,
        bias: match (&args.operation.bias, args.operation.bias_axis) {
            (None, _) => BiasKind::None,
            (Some(_), None | Some(Axis::Row)) => BiasKind::PerRow,
            (Some(_), Some(Axis::Column)) => BiasKind::PerColumn,
        },
        activation: match args.operation.activation {
            ActivationName::None => Activation::None,
            ActivationName::Relu => Activation::Relu,
            ActivationName::Gelu => Activation::Gelu,
            ActivationName::Silu => Activation::Silu,
        },
        placements: [layout(args.operation.b_layout), layout(args.operation.c_layout)],
        c_dtype: args.output.out_dtype.map_or(data.values.dtype(), DType::from),
    };
    let mut operands = BsrOperands::new(call, data, &stream)?;
    let (operation, kernel) = ("bsr-matmul", None);
    Run { operation, common: &args.common, kernel, outputs, device: &device, stream: &stream }
        .of(&mut operands)
}

impl From<Axis> for Major {
    fn from(axis: Axis) -> Self {
        match axis {
            Axis::Row => Major::Row,
            Axis::Column => Major::Column,
        }
    }
}

/// What is computed from, read or drawn.
fn data(args: &Args) -> Result<BsrData> {
    let wish = args.dtype.map(DType::from);
    let data = match (args.random, &args.a, &args.b) {
        (Some(sizes), ..) => drawn(args, sizes, wish.unwrap_or(DType::F16))?,
        (None, Some(a), Some(b)) => {
            // clap does not enforce `requires` where what is required conflicts with another
            // option that is given.
            ensure!(
                args.block.is_none() && args.density.is_none(),
                "--block and --density only apply to --random"
            );
            read(a, b, wish, args.operation.transpose_a)?
        }
        _ => {
            bail!("nothing to compute: give --a FILE and --b FILE, or --random MxNxK (see --help)");
        }
    };
    let at = usize::from(args.operation.transpose_a);
    let ([m, k], &[rows, n]) = ([data.shape[at], data.shape[1 - at]], data.b.shape()) else {
        bail!("b is {:?}, expected [k, n]", data.b.shape());
    };
    let what = if args.operation.transpose_a { "rows" } else { "columns" };
    ensure!(rows == k, "b has {rows} rows, but A has {k} {what}");
    let bias_len = if args.operation.bias_axis == Some(Axis::Column) { n } else { m };
    let optional = |path: &Option<_>, name, dtype, shape: &[usize], lane| {
        path.as_deref().map(|path| optional(path, name, dtype, shape, (args.common.seed, lane)))
    };
    let dtype = data.values.dtype();
    let bias = optional(&args.operation.bias, "bias", dtype, &[bias_len], LANE_BIAS).transpose()?;
    let c_dtype = args.output.out_dtype.map_or(dtype, DType::from);
    let c = optional(&args.operation.c, "c", c_dtype, &[m, n], LANE_C).transpose()?;
    Ok(BsrData { bias, c, ..data })
}

/// A file, or `random`.
fn optional(
    path: &Path,
    name: &'static str,
    dtype: DType,
    shape: &[usize],
    (seed, lane): (u64, u64),
) -> Result<Array> {
    if path == Path::new("random") {
        return random(name, dtype, shape, seed, lane);
    }
    let array = Source::open(path, name)?.load(dtype)?;
    ensure!(array.shape() == shape, "{name} is {:?}, expected {shape:?}", array.shape());
    Ok(array)
}

fn read(a: &Path, b: &Path, wish: Option<DType>, transposed: bool) -> Result<BsrData> {
    let BsrFile { shape, block, row_ptr, col_idx, values } = BsrFile::read(a)?;
    let sources = [values, Source::open(b, "b")?];
    let dtype = common_dtype(wish, &sources)?;
    let &[rows_of_b, n] = sources[1].shape()? else {
        bail!("b is {:?}, expected [k, n]", sources[1].shape()?);
    };
    let shape = match shape {
        Some(shape) => shape,
        None if transposed => {
            bail!(
                "the file of a transposed A needs a tensor `shape`: B does not say how \
                           many columns A has"
            );
        }
        None => [(row_ptr.len() - 1) * block, rows_of_b],
    };
    let m = shape[usize::from(transposed)];
    let [values, b] = load_all(sources, dtype, memory::size(&[&[m, n]], dtype.size()))?;
    Ok(BsrData { shape, row_ptr, col_idx, values, b, c: None, bias: None })
}

fn drawn(args: &Args, [m, n, k]: [usize; 3], dtype: DType) -> Result<BsrData> {
    let shape = if args.operation.transpose_a { [k, m] } else { [m, k] };
    let blocks = RandomBlocks::new("A", shape, args.block, args.density)?;
    // The blocks twice: as drawn, and as the matrix.
    let of_blocks = [blocks.stored, blocks.block, blocks.block];
    let bytes = memory::size(&[&of_blocks, &of_blocks, &[k, n], &[m, n]], dtype.size());
    memory::ensure("A, B and C", bytes)?;
    let seed = args.common.seed;
    let draw = |name, shape: &[usize], lane| random(name, dtype, shape, seed, lane);
    BsrData::drawn(shape, blocks.block, blocks.draw(seed), [k, n], draw)
}
