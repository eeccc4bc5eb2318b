//! Operands of `blockflash sddmm`.

use crate::args::ensure;
use crate::bsr_args::Axis;
use crate::bsr_operands::{BlockGrid, BsrFile};
use crate::failure::{Failure, Result};
use crate::operand::{Source, common_dtype, load_all, random};
use crate::sddmm_args::Args;
use blockflash_bench::io::Array;
use blockflash_bench::memory;
use blockflash_ops::{BsrMatrix, DType, Device, Major, Stream, Tensor};
use std::path::Path;

/// Random tensors of one seed.
const LANE_A: u64 = 0;
const LANE_B: u64 = 1;
const LANE_PATTERN: u64 = 2;
const LANE_OLD: u64 = 3;

impl From<Axis> for Major {
    fn from(axis: Axis) -> Self {
        match axis {
            Axis::Row => Major::Row,
            Axis::Column => Major::Column,
        }
    }
}

/// What is multiplied, on the host; A and B as they lie in memory.
pub struct Operands {
    pub row_ptr: Vec<i32>,
    pub col_idx: Vec<i32>,
    pub pattern: BsrMatrix,
    pub majors: [Major; 2],
    pub a: Array,
    pub b: Array,
    pub old: Option<Array>,
    values_dtype: DType,
}

impl Operands {
    pub fn new(args: &Args) -> Result<Self> {
        let dtype = args.dtype.map(DType::from);
        match (args.random, &args.a, &args.b, &args.pattern) {
            (Some(sizes), ..) => Self::random(args, sizes, dtype.unwrap_or(DType::F16)),
            (None, Some(a), Some(b), Some(pattern)) => {
                // clap does not enforce `requires` where what is required conflicts with another
                // option that is given.
                ensure(
                    args.block.is_none() && args.density.is_none(),
                    "--block and --density only apply to --random",
                )?;
                Self::read(args, [a, b, pattern], dtype)
            }
            _ => Err(Failure::new(
                "nothing to compute: give --a FILE, --b FILE and --pattern FILE, or --random \
                 MxKxN (see --help)",
            )),
        }
    }

    fn random(args: &Args, [m, k, n]: [usize; 3], dtype: DType) -> Result<Self> {
        let (block, seed) = (args.block.unwrap_or(64), args.common.seed);
        let values_dtype = args.out_dtype.map_or(dtype, DType::from);
        let grid = BlockGrid::new("the pattern", [m, n], block, args.density.unwrap_or(0.1))?;
        let shape = [grid.stored, block, block];
        enough_memory(&shape, [&[m, k], &[k, n]], dtype, values_dtype)?;
        let structure = grid.draw(seed, LANE_PATTERN);
        let majors = [args.a_layout, args.b_layout].map(Major::from);
        let stored = |major, [rows, cols]: [usize; 2]| {
            if major == Major::Row { [rows, cols] } else { [cols, rows] }
        };
        Ok(Self {
            pattern: pattern([m, n], &structure.row_ptr, &structure.col_idx, &shape, dtype)?,
            row_ptr: structure.row_ptr,
            col_idx: structure.col_idx,
            majors,
            a: random("a", dtype, &stored(majors[0], [m, k]), seed, LANE_A)?,
            b: random("b", dtype, &stored(majors[1], [k, n]), seed, LANE_B)?,
            old: match args.beta {
                0.0 => None,
                _ => Some(random("values", values_dtype, &shape, seed, LANE_OLD)?),
            },
            values_dtype,
        })
    }

    fn read(args: &Args, [a, b, file]: [&Path; 3], dtype: Option<DType>) -> Result<Self> {
        let sources = [Source::open(a, "a")?, Source::open(b, "b")?];
        let dtype = common_dtype(dtype, &sources)?;
        let values_dtype = args.out_dtype.map_or(dtype, DType::from);
        let [&[m, k], &[rows_of_b, n]] = [sources[0].shape()?, sources[1].shape()?] else {
            let (a, b) = (sources[0].shape()?, sources[1].shape()?);
            return Err(Failure::new(format!(
                "a is {a:?} and b {b:?}, expected [m, k] and [k, n]"
            )));
        };
        ensure(rows_of_b == k, &format!("b has {rows_of_b} rows, but A has {k} columns"))?;
        let BsrFile { shape, block, row_ptr, col_idx, values } = BsrFile::read(file)?;
        let [rows, cols] = shape.unwrap_or([m, n]);
        ensure(
            [rows, cols] == [m, n],
            &format!("the pattern is {rows} x {cols}, but A·B is {m} x {n}"),
        )?;
        let indices = |array: &Array| array.as_i32().unwrap_or_default().to_vec();
        let (row_ptr, col_idx) = (indices(&row_ptr), indices(&col_idx));
        let shape = [values.shape()?.first().copied().unwrap_or(0), block, block];
        enough_memory(&shape, [&[m, k], &[k, n]], dtype, values_dtype)?;
        let pattern = pattern([m, n], &row_ptr, &col_idx, &shape, dtype)?;
        let old = if args.beta == 0.0 { None } else { Some(values.load(values_dtype)?) };
        let [a, b] = load_all(sources, dtype, 0)?;
        let majors = [args.a_layout, args.b_layout].map(Major::from);
        let with_layout = |matrix: Array, major| match major {
            Major::Row => Ok(matrix),
            Major::Column => {
                matrix.transposed().ok_or_else(|| Failure::new("the matrix is too large"))
            }
        };
        let (a, b) = (with_layout(a, majors[0])?, with_layout(b, majors[1])?);
        Ok(Self { row_ptr, col_idx, pattern, majors, a, b, old, values_dtype })
    }

    /// Values as they are before.
    pub fn old_values(&self, stream: &Stream) -> Result<Tensor> {
        let block = self.pattern.block_size();
        Ok(match &self.old {
            Some(old) => old.upload(stream)?,
            None => Tensor::empty(
                stream,
                self.values_dtype,
                &[self.pattern.nnz_blocks(), block, block],
            )?,
        })
    }
}

/// The values of the pattern do not count; there are old and new values besides.
fn enough_memory(
    shape: &[usize],
    matrices: [&[usize]; 2],
    dtype: DType,
    values: DType,
) -> Result<()> {
    let operands = memory::size(&[shape, matrices[0], matrices[1]], dtype.size());
    Ok(memory::ensure(
        "A, B and the values",
        operands.saturating_add(memory::size(&[shape, shape], values.size())),
    )?)
}

/// The validated pattern, with values of zero.
fn pattern(
    [m, n]: [usize; 2],
    row_ptr: &[i32],
    col_idx: &[i32],
    shape: &[usize; 3],
    dtype: DType,
) -> Result<BsrMatrix> {
    let zeros = Tensor::zeros(&Device::cpu().stream()?, dtype, shape)?;
    Ok(BsrMatrix::from_parts(m, n, shape[1], row_ptr, col_idx, zeros.view())?)
}
