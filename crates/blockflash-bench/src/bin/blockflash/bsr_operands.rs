//! Operands of `blockflash bsr-matmul`.

use crate::args::{Common, ensure};
use crate::bsr_args::{Args, Axis};
use crate::failure::{Failure, Result};
use crate::operand::{Source, common_dtype, load_all, random};
use blockflash_bench::io::Array;
use blockflash_bench::memory;
use blockflash_bench::random::choose;
use blockflash_ops::DType;
use blockflash_ops::bsr_matmul::{BsrMatrix, BsrPattern};
use std::path::Path;

/// Random tensors of one seed.
const LANE_B: u64 = 0;
const LANE_VALUES: u64 = 1;
const LANE_PATTERN: u64 = 2;
const LANE_BIAS: u64 = 3;
const LANE_C: u64 = 4;

/// What is multiplied, on the host.
pub struct Operands {
    /// m, n, k.
    pub sizes: [usize; 3],
    /// `[m, k]`, or `[k, m]` if it is multiplied transposed.
    pub a: BsrMatrix,
    pub row_ptr: Array,
    pub col_idx: Array,
    pub values: Array,
    pub b: Array,
    pub bias: Option<Array>,
    pub c: Option<Array>,
    pub c_dtype: DType,
}

/// The arrays of A, and its size.
struct Bsr {
    shape: [usize; 2],
    row_ptr: Array,
    col_idx: Array,
    values: Array,
}

impl Operands {
    pub fn new(args: &Args) -> Result<Self> {
        let wish = args.dtype.map(DType::from);
        let (bsr, b) = match (args.random, &args.a, &args.b) {
            (Some(sizes), ..) => random_operands(args, sizes, wish.unwrap_or(DType::F16))?,
            (None, Some(a), Some(b)) => {
                // clap does not enforce `requires` where what is required conflicts with another
                // option that is given.
                ensure(
                    args.block.is_none() && args.density.is_none(),
                    "--block and --density only apply to --random",
                )?;
                read_operands(a, b, wish, args.transpose_a)?
            }
            _ => {
                return Err(Failure::new(
                    "nothing to compute: give --a FILE and --b FILE, or --random MxNxK (see \
                     --help)",
                ));
            }
        };
        let Bsr { shape, row_ptr, col_idx, values } = bsr;
        let [m, k] = if args.transpose_a { [shape[1], shape[0]] } else { shape };
        let &[rows, n] = b.shape() else {
            return Err(Failure::new(format!("b is {:?}, expected [k, n]", b.shape())));
        };
        let what = if args.transpose_a { "rows" } else { "columns" };
        ensure(rows == k, &format!("b has {rows} rows, but A has {k} {what}"))?;
        let &[_, block, _] = values.shape() else {
            return Err(Failure::new(format!(
                "values is {:?}, expected [blocks, b, b]",
                values.shape()
            )));
        };
        let indices = |array: &Array| array.as_i32().unwrap_or_default().to_vec();
        let ([rows, cols], a) = (shape, values.view()?);
        let a =
            BsrMatrix::from_parts(rows, cols, block, &indices(&row_ptr), &indices(&col_idx), a)?;

        let dtype = values.dtype();
        let bias_len = if args.bias_axis == Some(Axis::Column) { n } else { m };
        let bias =
            optional(args.bias.as_deref(), "bias", dtype, &[bias_len], &args.common, LANE_BIAS)?;
        let c_dtype = args.out_dtype.map_or(dtype, DType::from);
        let c = optional(args.c.as_deref(), "c", c_dtype, &[m, n], &args.common, LANE_C)?;
        Ok(Self { sizes: [m, n, k], a, row_ptr, col_idx, values, b, bias, c, c_dtype })
    }

    /// `row_ptr`, `col_idx` and values of Aᵀ, every block of it written out: what a result is
    /// checked against, without an index.
    pub fn transposed(&self) -> Option<[Array; 3]> {
        let (row_ptr, col_idx) = (self.row_ptr.as_i32()?, self.col_idx.as_i32()?);
        let mut order: Vec<(i32, usize, usize)> = Vec::with_capacity(col_idx.len());
        for (row, pair) in row_ptr.windows(2).enumerate() {
            order.extend((pair[0] as usize..pair[1] as usize).map(|at| (col_idx[at], row, at)));
        }
        order.sort_unstable();
        let before = |col: usize| order.partition_point(|block| (block.0 as usize) < col) as i32;
        let row_ptr: Vec<i32> = (0..=self.a.block_cols()).map(before).collect();
        let col_idx: Vec<i32> = order.iter().map(|block| block.1 as i32).collect();
        let places: Vec<usize> = order.iter().map(|block| block.2).collect();
        let values = self.values.matrices_transposed(&places)?;
        Some([row_ptr.into(), col_idx.into(), values])
    }
}

/// A file, or `random`, or nothing.
fn optional(
    path: Option<&Path>,
    name: &'static str,
    dtype: DType,
    shape: &[usize],
    common: &Common,
    lane: u64,
) -> Result<Option<Array>> {
    let Some(path) = path else { return Ok(None) };
    if path == Path::new("random") {
        return random(name, dtype, shape, common.seed, lane).map(Some);
    }
    let array = Source::open(path, name)?.load(dtype)?;
    ensure(array.shape() == shape, &format!("{name} is {:?}, expected {shape:?}", array.shape()))?;
    Ok(Some(array))
}

/// A block-sparse matrix in a file: everything but its values.
pub struct BsrFile {
    /// Rows and columns, if the file says them.
    pub shape: Option<[usize; 2]>,
    pub block: usize,
    pub row_ptr: Array,
    pub col_idx: Array,
    /// `[blocks, b, b]`, not read yet.
    pub values: Source,
}

impl BsrFile {
    pub fn read(path: &Path) -> Result<Self> {
        let [row_ptr, col_idx, values] =
            Source::open_named(path, ["row_ptr", "col_idx", "values"], "")?;
        let block = match *values.shape()? {
            [_, height, width] if height == width => height,
            [blocks, height, width] => {
                let message =
                    format!("values is [{blocks}, {height}, {width}], expected square blocks");
                return Err(Failure::new(message));
            }
            ref other => {
                return Err(Failure::new(format!("values is {other:?}, expected [blocks, b, b]")));
            }
        };
        let [row_ptr, col_idx] = load_all([row_ptr, col_idx], DType::I32, 0)?;
        for (name, array) in [("row_ptr", &row_ptr), ("col_idx", &col_idx)] {
            ensure(
                array.shape().len() == 1,
                &format!("{name} is {:?}, expected one dimension", array.shape()),
            )?;
        }
        ensure(
            !row_ptr.is_empty(),
            "row_ptr is empty, expected the number of block rows + 1 entries",
        )?;
        let shape = match Source::open_optional(path, "shape")? {
            None => None,
            Some(source) => match *source.load(DType::I32)?.as_i32().unwrap_or_default() {
                [rows, cols] if rows >= 0 && cols >= 0 => Some([rows as usize, cols as usize]),
                ref other => {
                    let message =
                        format!("shape is {other:?}, expected the rows and columns of the matrix");
                    return Err(Failure::new(message));
                }
            },
        };
        Ok(Self { shape, block, row_ptr, col_idx, values })
    }
}

fn read_operands(
    a: &Path,
    b: &Path,
    wish: Option<DType>,
    transposed: bool,
) -> Result<(Bsr, Array)> {
    let BsrFile { shape, block, row_ptr, col_idx, values } = BsrFile::read(a)?;
    let sources = [values, Source::open(b, "b")?];
    let dtype = common_dtype(wish, &sources)?;
    let &[rows_of_b, n] = sources[1].shape()? else {
        return Err(Failure::new(format!("b is {:?}, expected [k, n]", sources[1].shape()?)));
    };
    let shape = match shape {
        Some(shape) => shape,
        None if transposed => {
            let message = "the file of a transposed A needs a tensor `shape`: B does not say how \
                           many columns A has";
            return Err(Failure::new(message));
        }
        None => [(row_ptr.len() - 1) * block, rows_of_b],
    };
    let m = shape[usize::from(transposed)];
    let [values, b] = load_all(sources, dtype, memory::size(&[&[m, n]], dtype.size()))?;
    Ok((Bsr { shape, row_ptr, col_idx, values }, b))
}

/// How many blocks a random matrix has and stores.
pub struct BlockGrid {
    block_rows: usize,
    block_cols: usize,
    pub stored: usize,
}

/// The stored blocks of a random matrix.
pub struct RandomStructure {
    pub row_ptr: Vec<i32>,
    pub col_idx: Vec<i32>,
    /// Their places in the matrix, row by row, ascending.
    chosen: Vec<usize>,
}

impl BlockGrid {
    /// That of a matrix which messages call `what`.
    pub fn new(what: &str, [rows, cols]: [usize; 2], block: usize, density: f64) -> Result<Self> {
        let limit = BsrPattern::MAX_BLOCK_SIZE;
        ensure(
            (1..=limit).contains(&block),
            &format!("--block is {block}, expected 1 to {limit}"),
        )?;
        ensure(
            (0.0..=1.0).contains(&density),
            &format!("--density is {density}, expected 0 to 1"),
        )?;
        let (block_rows, block_cols) = (rows.div_ceil(block), cols.div_ceil(block));
        // The indices of the format are 32-bit.
        let all = block_rows
            .checked_mul(block_cols)
            .filter(|&all| block_rows.max(all) < i32::MAX as usize);
        let too_many =
            || Failure::new(format!("{what} of {rows} x {cols} has too many blocks of {block}"));
        let stored = (all.ok_or_else(too_many)? as f64 * density).round() as usize;
        Ok(Self { block_rows, block_cols, stored })
    }

    /// Draws the stored blocks.
    pub fn draw(&self, seed: u64, lane: u64) -> RandomStructure {
        let chosen = choose(self.stored, self.block_rows * self.block_cols, seed, lane);
        let col_idx = chosen.iter().map(|at| (at % self.block_cols) as i32).collect();
        let mut row_ptr = vec![0i32; self.block_rows + 1];
        chosen.iter().for_each(|at| row_ptr[at / self.block_cols + 1] += 1);
        (0..self.block_rows).for_each(|row| row_ptr[row + 1] += row_ptr[row]);
        RandomStructure { row_ptr, col_idx, chosen }
    }
}

fn random_operands(args: &Args, [m, n, k]: [usize; 3], dtype: DType) -> Result<(Bsr, Array)> {
    let (block, density, seed) =
        (args.block.unwrap_or(64), args.density.unwrap_or(0.1), args.common.seed);
    let shape = if args.transpose_a { [k, m] } else { [m, k] };
    let grid = BlockGrid::new("A", shape, block, density)?;

    // The blocks twice: as drawn, and as the matrix.
    let block_shape = [grid.stored, block, block];
    memory::ensure(
        "A, B and C",
        memory::size(&[&block_shape, &block_shape, &[k, n], &[m, n]], dtype.size()),
    )?;
    let b = random("b", dtype, &[k, n], seed, LANE_B)?;
    let values = random("values", dtype, &block_shape, seed, LANE_VALUES)?;
    let RandomStructure { row_ptr, col_idx, chosen } = grid.draw(seed, LANE_PATTERN);
    // Blocks at the edges hold nothing beyond the matrix.
    let inside = chosen.iter().map(|at| {
        let corner = [at / grid.block_cols * block, at % grid.block_cols * block];
        [shape[0] - corner[0], shape[1] - corner[1]]
    });
    let values = values.cropped(inside).ok_or_else(|| Failure::new("A is too large"))?;
    Ok((Bsr { shape, row_ptr: row_ptr.into(), col_idx: col_idx.into(), values }, b))
}
