//! Block-sparse matrices made of garbage index arrays, and products with the valid ones.

use super::guarded::{Guarded, Use};
use super::operands::Choice;
use super::values::{damaged, numbers, one_of};
use super::{Checked, Ended, Place, Turn, text};
use crate::bsr::order;
use crate::number::POISON;
use crate::placement::Placement;
use blockflash_ops::{
    BsrMatmul, BsrMatrix, BsrSddmm, BsrTranspose, BsrWorkspace, DType, Error, Major, Operation,
};
use blockflash_ops::{Tensor, bsr_matmul, bsr_sddmm};
use blockflash_sys::Kernel;
use rand::Rng;

/// Arrays that may or may not be a matrix.
#[derive(Debug)]
struct Arrays {
    dtype: DType,
    block_size: usize,
    /// Block rows and block columns.
    blocks: [usize; 2],
    /// Rows and columns by which the last blocks exceed the matrix.
    beyond: [usize; 2],
    row_ptr: Vec<i32>,
    col_idx: Vec<i32>,
    /// Number of blocks that there are values for.
    stored: usize,
}

impl Arrays {
    fn new(dtype: DType, block_size: usize, turn: &mut Turn<'_>) -> Self {
        let random = &mut turn.random;
        let blocks: [usize; 2] = std::array::from_fn(|_| random.random_range(1..=6));
        let density = one_of(&[0.0, 0.3, 0.7, 1.0], random);
        let (mut row_ptr, mut col_idx) = (vec![0], Vec::new());
        for _ in 0..blocks[0] {
            col_idx.extend((0..blocks[1] as i32).filter(|_| random.random_bool(density)));
            row_ptr.push(col_idx.len() as i32);
        }
        let right = col_idx.len();
        // Nearly all damaged arrays are invalid.
        let [in_rows, in_cols, cut] = [0.3, 0.3, 0.05].map(|share| random.random_bool(share));
        if in_rows {
            row_ptr = damaged(&row_ptr, right, random);
        }
        if in_cols {
            col_idx = damaged(&col_idx, blocks[1] - 1, random);
        }
        if cut {
            let array = if random.random() { &mut row_ptr } else { &mut col_idx };
            array.pop();
        }
        let stored = if random.random_bool(0.05) { right + 1 } else { col_idx.len() };
        let hangs_over = random.random_bool(0.05);
        let beyond =
            blocks.map(|_| if hangs_over { random.random_range(1..block_size) } else { 0 });
        Self { dtype, block_size, blocks, beyond, row_ptr, col_idx, stored }
    }

    fn size(&self) -> [usize; 2] {
        [0, 1].map(|dim| self.blocks[dim] * self.block_size - self.beyond[dim])
    }

    /// The rules that make arrays a matrix, independently of the library.
    fn is_matrix(&self) -> bool {
        let Self { blocks, row_ptr, col_idx, .. } = self;
        let row_is_right = |pair: &[i32]| {
            let row = &col_idx[pair[0] as usize..pair[1] as usize];
            row.windows(2).all(|pair| pair[0] < pair[1])
                && row.iter().all(|&col| (0..blocks[1] as i32).contains(&col))
        };
        let ends = (row_ptr.first(), row_ptr.last()) == (Some(&0), Some(&(col_idx.len() as i32)));
        let counts = row_ptr.len() == blocks[0] + 1 && self.stored == col_idx.len();
        ends && counts && row_ptr.is_sorted() && row_ptr.windows(2).all(row_is_right)
    }

    /// Whether values beyond the matrix are nonzero numbers, or on a GPU might be.
    fn hangs_over(&self, on_gpu: bool) -> bool {
        let last_col = self.blocks[1] as i32 - 1;
        let in_last_row = self.row_ptr[self.blocks[0] - 1] < self.row_ptr[self.blocks[0]];
        self.beyond != [0, 0] && (on_gpu || in_last_row || self.col_idx.contains(&last_col))
    }

    /// The matrix, or `None` where an error is due. Later writes to the arrays change nothing.
    fn matrix(&self, turn: &mut Turn<'_>) -> Checked<Option<BsrMatrix>> {
        let Self { block_size, dtype, stored, .. } = *self;
        let stream = &turn.place.stream;
        let index =
            |entries: &[i32]| Tensor::from_slice(stream, entries, &[entries.len()]).map_err(text);
        let [mut row_ptr, mut col_idx] = [index(&self.row_ptr)?, index(&self.col_idx)?];
        let shape = [stored, block_size, block_size];
        let numbers = numbers(dtype, shape.iter().product(), &mut turn.random);
        let around = Placement::default();
        let values = Guarded::new("values", dtype, (&shape, &around, POISON), &numbers, stream)?;
        let [rows, cols] = self.size();
        let values = values.into_memory();
        let made =
            BsrMatrix::from_tensors(rows, cols, block_size, &row_ptr, &col_idx, values, stream);
        for array in [&mut row_ptr, &mut col_idx] {
            array.fill_bytes(stream, 0x7F).map_err(text)?;
        }
        let due = self.is_matrix() && !self.hangs_over(turn.place.other.is_some());
        match made {
            Ok(matrix) if due => Ok(Some(matrix)),
            Err(
                Error::InvalidBsr(_)
                | Error::NonzeroPadding { .. }
                | Error::UncheckedPadding { .. }
                | Error::Shape { .. },
            ) if !due => Ok(None),
            made => {
                Err(format!("{} of garbage: {made:?}", if due { "no matrix" } else { "a matrix" }))
            }
        }
    }
}

/// A dense matrix in lines that start at multiples of 16 bytes.
fn lines(shape: [usize; 2], column_major: bool) -> Placement {
    let along = usize::from(!column_major);
    let mut padding = vec![(1, 2); 2];
    padding[along] = (8, shape[along].next_multiple_of(8) - shape[along] + 8);
    Placement { order: order(column_major), padding }
}

#[derive(Debug)]
struct Product {
    kernel: Choice,
    arrays: Arrays,
    columns: usize,
    transposed: bool,
    b_column_major: bool,
    c_dtype: DType,
    parts: Option<usize>,
}

/// Runs a case of the product.
pub(super) fn product(turn: &mut Turn<'_>) -> Checked<Ended> {
    let (kernel, tile) = turn.pick(&turn.place.products);
    let case = Product {
        kernel: Choice(turn.random.random_bool(0.75).then_some(kernel)),
        arrays: Arrays::new(tile.dtype, tile.block_size as usize, turn),
        columns: turn.random.random_range(2..=200),
        transposed: tile.a_transposed,
        b_column_major: tile.b_column_major,
        c_dtype: one_of(&[tile.dtype, DType::F32], &mut turn.random),
        parts: one_of(&[None, Some(2), Some(5)], &mut turn.random),
    };
    multiply(&case, turn).map_err(|error| turn.story(&error, &case))
}

fn multiply(case: &Product, turn: &mut Turn<'_>) -> Checked<Ended> {
    let (place, arrays) = (turn.place, &case.arrays);
    let stream = &place.stream;
    let Some(matrix) = arrays.matrix(turn)? else { return Ok(Ended::Refused) };
    let index =
        case.transposed.then(|| BsrTranspose::new(&matrix, stream)).transpose().map_err(text)?;
    let [rows, cols] = arrays.size();
    let [m, k] = if case.transposed { [cols, rows] } else { [rows, cols] };
    let (b_shape, c_shape) = ([k, case.columns], [m, case.columns]);
    let content = numbers(arrays.dtype, k * case.columns, &mut turn.random);
    let b_place = lines(b_shape, case.b_column_major);
    let b = Guarded::new("b", arrays.dtype, (&b_shape, &b_place, POISON), &content, stream)?;
    let mut c = Guarded::output("c", case.c_dtype, (&c_shape, &lines(c_shape, false)), stream)?;
    let workspace = case.parts.map(|parts| BsrWorkspace::new(stream)?.with_parts(parts));
    let workspace = workspace.transpose().map_err(text)?;
    let call = BsrMatmul {
        transpose: index.as_ref(),
        workspace: workspace.as_ref(),
        ..BsrMatmul::new(&matrix, b.view())
    };
    queue_product(&call, case.kernel.0, &mut c, place)
        .map_err(|error| format!("refused: {error}"))?;
    turn.wait(case)?;
    b.judge(Use::Read, stream)?;
    c.judge(Use::WrittenWhole, stream)?;
    Ok(Ended::Computed)
}

fn queue_product(
    call: &BsrMatmul<'_>,
    kernel: Option<&'static Kernel>,
    c: &mut Guarded,
    place: &Place,
) -> Result<(), Error> {
    if let Some(gpu) = &place.imagined {
        let problem = call.problem(&c.view_mut())?;
        match kernel {
            Some(kernel) => bsr_matmul::accepts(kernel, &problem, gpu)?,
            None => drop(bsr_matmul::select(&problem, gpu)?),
        }
    }
    match kernel {
        Some(kernel) if place.imagined.is_none() => {
            call.run_with(kernel, c.view_mut(), &place.stream)
        }
        _ => call.matmul_into(c.view_mut(), &place.stream),
    }
}

#[derive(Debug)]
struct Sampled {
    kernel: Choice,
    pattern: Arrays,
    depth: usize,
    majors: [Major; 2],
    values_dtype: DType,
}

/// Runs a case of the sampled product.
pub(super) fn sampled(turn: &mut Turn<'_>) -> Checked<Ended> {
    let (kernel, tile) = turn.pick(&turn.place.sampled);
    let majors = [one_of(&Major::ALL, &mut turn.random), one_of(&Major::ALL, &mut turn.random)];
    let case = Sampled {
        kernel: Choice(turn.random.random_bool(0.75).then_some(kernel)),
        pattern: Arrays::new(tile.dtype, tile.block_size as usize, turn),
        depth: turn.random.random_range(2..=200),
        majors: tile.majors.unwrap_or(majors),
        values_dtype: one_of(&[tile.dtype, DType::F32], &mut turn.random),
    };
    sample(&case, turn).map_err(|error| turn.story(&error, &case))
}

fn sample(case: &Sampled, turn: &mut Turn<'_>) -> Checked<Ended> {
    let (place, arrays) = (turn.place, &case.pattern);
    let stream = &place.stream;
    let Some(pattern) = arrays.matrix(turn)? else { return Ok(Ended::Refused) };
    let [m, n] = arrays.size();
    let mut dense = |name, shape: [usize; 2], major| {
        let content = numbers(arrays.dtype, shape[0] * shape[1], &mut turn.random);
        let place = lines(shape, major == Major::Column);
        Guarded::new(name, arrays.dtype, (&shape, &place, POISON), &content, stream)
    };
    let a = dense("a", [m, case.depth], case.majors[0])?;
    let b = dense("b", [case.depth, n], case.majors[1])?;
    let shape = [arrays.stored, arrays.block_size, arrays.block_size];
    let around = Placement { order: Vec::new(), padding: vec![(1, 1)] };
    let mut values = Guarded::output("values", case.values_dtype, (&shape, &around), stream)?;
    let call = BsrSddmm::new(&pattern, a.view(), b.view());
    queue_sampled(&call, case.kernel.0, &mut values, place)
        .map_err(|error| format!("refused: {error}"))?;
    turn.wait(case)?;
    [a, b].iter().try_for_each(|input| input.judge(Use::Read, stream))?;
    values.judge(Use::WrittenWhole, stream)?;
    Ok(Ended::Computed)
}

fn queue_sampled(
    call: &BsrSddmm<'_>,
    kernel: Option<&'static Kernel>,
    values: &mut Guarded,
    place: &Place,
) -> Result<(), Error> {
    if let Some(gpu) = &place.imagined {
        let problem = call.problem(&values.view_mut())?;
        match kernel {
            Some(kernel) => bsr_sddmm::accepts(kernel, &problem, gpu)?,
            None => drop(bsr_sddmm::select(&problem, gpu)?),
        }
    }
    match kernel {
        Some(kernel) if place.imagined.is_none() => {
            call.run_with(kernel, values.view_mut(), &place.stream)
        }
        _ => call.sddmm_into(values.view_mut(), &place.stream),
    }
}
