//! Anything that safe programs may do to index arrays, at any time: kernels never leave their
//! tensors. Under a memory checker, these programs give no report.
#![forbid(unsafe_code)]

use blockflash_ops::{
    Attention, BlockChoice, BlockGeometry, BlockMask, BlockMaskBuffer, BlockSource, BsrMatmul,
    BsrMatrix, BsrSddmm, BsrTranspose, BsrWorkspace, DType, Error, Mask, Stream, Tensor,
};
use blockflash_safe::{
    BlockListScratch, BlockLists, BlockMaskBuild, BlockMaskBuildOperands, Kernel, LaunchConfig,
    NO_MASK,
};
use blockflash_sys::BlockMaskKernel;
use blockflash_sys::manifest::Variant;
use blockflash_sys::params::{
    BLOCKFLASH_BLOCK_MASK_LIST, BLOCKFLASH_BLOCK_SOURCE_BOOL, BLOCKFLASH_WINDOW_UNBOUNDED,
    blockflash_block_mask_build_params, blockflash_window,
};
use blockflash_tests::gpu::{Gpu, gpu, say, wait};
use half::bf16;
use std::ptr::{null, null_mut};

/// Blocks along each side of a matrix, and columns of B.
const BLOCKS: usize = 20;
const COLUMNS: usize = 200;
/// Block sizes with kernels.
const BLOCK_SIZES: [usize; 4] = [16, 32, 64, 128];

/// Entries that lead far outside of every tensor.
fn garbage(length: usize) -> Vec<i32> {
    [i32::MAX, i32::MIN, -1, 1 << 30, 1 << 24].into_iter().cycle().take(length).collect()
}

fn index(entries: &[i32], stream: &Stream) -> Tensor {
    Tensor::from_slice(stream, entries, &[entries.len()]).unwrap()
}

/// The tensors of a pattern, and what a captured graph or a late copy may write to them.
struct Arrays {
    block_size: usize,
    row_ptr: Tensor,
    col_idx: Tensor,
    bad: [Tensor; 2],
}

impl Arrays {
    /// A full block row, and in the others the diagonal and the last column.
    fn new(block_size: usize, stream: &Stream) -> Self {
        let last = BLOCKS as i32 - 1;
        let (mut row_ptr, mut col_idx) = (vec![0], (0..=last).collect::<Vec<i32>>());
        for row in 1..=last {
            row_ptr.push(col_idx.len() as i32);
            col_idx.extend(if row < last { vec![row, last] } else { vec![last] });
        }
        row_ptr.push(col_idx.len() as i32);
        let bad = [row_ptr.len(), col_idx.len()].map(|length| index(&garbage(length), stream));
        Self { block_size, row_ptr: index(&row_ptr, stream), col_idx: index(&col_idx, stream), bad }
    }

    /// Overwrites both arrays with invalid entries, in the order of the stream.
    fn spoil(&mut self, stream: &Stream) -> Result<(), Error> {
        self.row_ptr.copy_from(stream, &self.bad[0])?;
        Ok(self.col_idx.copy_from(stream, &self.bad[1])?)
    }

    fn matrix(&self, stream: &Stream) -> Result<BsrMatrix, Error> {
        let (size, blocks) = (BLOCKS * self.block_size, self.col_idx.shape()[0]);
        let values = small_integers(&[blocks, self.block_size, self.block_size], stream);
        let (row_ptr, col_idx) = (&self.row_ptr, &self.col_idx);
        BsrMatrix::from_tensors(size, size, self.block_size, row_ptr, col_idx, values, stream)
    }
}

fn small_integers(shape: &[usize], stream: &Stream) -> Tensor {
    let count = shape.iter().product();
    let numbers: Vec<bf16> =
        (0..count).map(|at: usize| bf16::from_f32((at % 7) as f32 - 3.0)).collect();
    Tensor::from_slice(stream, &numbers, shape).unwrap()
}

/// All products with a matrix: A·B, the same in parts, Aᵀ·B, and the sampled product.
fn products(a: &BsrMatrix, index: &BsrTranspose, stream: &Stream) -> Vec<Vec<f32>> {
    let b = small_integers(&[a.cols(), COLUMNS], stream);
    let workspace = BsrWorkspace::new(stream).unwrap().with_parts(3).unwrap();
    let plain = BsrMatmul::new(a, b.view());
    let in_parts = BsrMatmul { workspace: Some(&workspace), ..plain };
    let transposed = BsrMatmul::transposed(a, index, b.view());
    let across = b.view().permute(&[1, 0]).unwrap();
    let results = [
        plain.matmul(DType::F32, stream),
        in_parts.matmul(DType::F32, stream),
        transposed.matmul(DType::F32, stream),
        BsrSddmm::new(a, b.view(), across).sddmm(DType::F32, stream),
    ];
    wait(stream, &|| format!("products in blocks of {}", a.block_size())).unwrap();
    results.map(|result| result.unwrap().to_vec(stream).unwrap()).into()
}

/// A graph that was captured before the arrays were validated writes to them afterwards.
#[test]
fn a_captured_copy_does_not_change_a_matrix() {
    let Some(gpu) = gpu("hostile_gpu::a_captured_copy_does_not_change_a_matrix") else { return };
    let stream = &gpu.stream;
    for block_size in BLOCK_SIZES {
        let mut arrays = Arrays::new(block_size, stream);
        let graph = stream.capture(|stream| arrays.spoil(stream)).unwrap();
        let a = arrays.matrix(stream).unwrap();
        let transpose = BsrTranspose::new(&a, stream).unwrap();
        let before = products(&a, &transpose, stream);
        graph.launch(stream).unwrap();
        wait(stream, &|| "the copies of the graph".into()).unwrap();
        assert_eq!(arrays.row_ptr.to_vec::<i32>(stream).unwrap()[..2], [i32::MAX, i32::MIN]);
        assert_eq!(products(&a, &transpose, stream), before, "blocks of {block_size}");
        // Also for an index that is made only now, and for a copy.
        let transpose = BsrTranspose::new(&a, stream).unwrap();
        assert_eq!(products(&a.to(stream).unwrap(), &transpose, stream), before);
        let error = arrays.matrix(stream).unwrap_err();
        assert!(matches!(error, Error::InvalidBsr(_)), "{error}");
    }
}

/// Keeps a stream busy for some milliseconds.
fn occupy(stream: &Stream, from: &Tensor, to: &mut Tensor) {
    for _ in 0..40 {
        to.copy_from(stream, from).unwrap();
    }
}

/// A copy that is still pending on another stream finishes before the arrays are validated, and
/// later writes change nothing.
#[test]
fn a_pending_copy_is_validated() {
    let Some(gpu) = gpu("hostile_gpu::a_pending_copy_is_validated") else { return };
    let (stream, other) = (&gpu.stream, &gpu.device.stream().unwrap());
    let large = || Tensor::zeros(other, DType::U8, &[256 << 20]).unwrap();
    let (from, mut to) = (large(), large());
    for block_size in BLOCK_SIZES {
        let mut arrays = Arrays::new(block_size, stream);
        let good =
            [arrays.row_ptr.copy_to(stream).unwrap(), arrays.col_idx.copy_to(stream).unwrap()];
        occupy(other, &from, &mut to);
        arrays.spoil(other).unwrap();
        let error = arrays.matrix(stream).unwrap_err();
        assert!(matches!(error, Error::InvalidBsr(_)), "{error}");
        occupy(other, &from, &mut to);
        arrays.row_ptr.copy_from(other, &good[0]).unwrap();
        arrays.col_idx.copy_from(other, &good[1]).unwrap();
        let a = arrays.matrix(stream).unwrap();
        let transpose = BsrTranspose::new(&a, stream).unwrap();
        let before = products(&a, &transpose, stream);
        arrays.spoil(other).unwrap();
        wait(other, &|| "copies into the source".into()).unwrap();
        assert_eq!(products(&a, &transpose, stream), before, "blocks of {block_size}");
    }
}

/// A stream that is being captured can neither be waited for nor upload data.
#[test]
fn no_matrix_is_made_in_a_capture() {
    let Some(gpu) = gpu("hostile_gpu::no_matrix_is_made_in_a_capture") else { return };
    let stream = &gpu.stream;
    let arrays = Arrays::new(64, stream);
    let size = 64 * BLOCKS;
    let values = Tensor::zeros(stream, DType::BF16, &[arrays.col_idx.shape()[0], 64, 64]).unwrap();
    let (row_ptr, col_idx) = (&arrays.row_ptr, &arrays.col_idx);
    let captured = stream.capture(|stream| {
        BsrMatrix::from_tensors(size, size, 64, row_ptr, col_idx, values, stream).map(|_| ())
    });
    assert!(
        matches!(captured, Err(Error::Safe(blockflash_safe::Error::InCapture { .. }))),
        "{captured:?}"
    );
}

/// Two graphs build one mask on two streams while a third one attends with it. Results are
/// unspecified meanwhile and correct afterwards.
#[test]
fn builds_of_one_mask_may_overlap() {
    let name = "hostile_gpu::builds_of_one_mask_may_overlap";
    let Some(gpu) = gpu(name) else { return };
    // The second one has more than two block rows for each multiprocessor, so that on Hopper a CTA
    // takes two.
    for (heads, head_dim) in [(4, 64), (12, 128)] {
        overlap_builds(heads, head_dim, &gpu, name);
    }
}

fn overlap_builds(heads: usize, head_dim: usize, gpu: &Gpu, name: &str) {
    let streams: [Stream; 3] = std::array::from_fn(|_| gpu.device.stream().unwrap());
    let [first, second, third] = &streams;
    let geometry = BlockGeometry::new(2000, 2100, 64, 64).unwrap();
    let (rows, cols) = (geometry.rows(), geometry.cols());
    let mut buffer = match BlockMaskBuffer::new(geometry, 1, heads, heads * rows * 9, first) {
        Ok(buffer) => buffer,
        Err(Error::Unsupported { what, .. }) => return say(&format!("SKIPPED ({what}): {name}")),
        Err(error) => panic!("{error}"),
    };
    let scores: Vec<f32> = (0..heads * rows * cols).map(|at| (at as f32).sin()).collect();
    let scores = Tensor::from_slice(first, &scores, &[1, heads, rows, cols]).unwrap();
    let lists: Vec<i32> = (0..heads * rows * 9).map(|at| (at * 7 % cols) as i32).collect();
    let lists = Tensor::from_slice(second, &lists, &[1, heads, rows, 9]).unwrap();
    let by_scores = BlockChoice {
        mask: Mask::causal(),
        ..BlockChoice::new(BlockSource::Scores { scores: scores.view(), k: 3 })
    };
    let by_lists = BlockChoice::new(BlockSource::TopK(lists.view()));
    let graphs = [
        first.capture(|stream| buffer.build(&by_scores, stream)).unwrap(),
        second.capture(|stream| buffer.build(&by_lists, stream)).unwrap(),
    ];
    let [q, k] = [2000, 2100].map(|length| small_integers(&[1, length, heads, head_dim], third));
    let mut o = Tensor::zeros(third, DType::BF16, &[1, 2000, heads, head_dim]).unwrap();
    for _ in 0..200 {
        graphs[0].launch(first).unwrap();
        graphs[1].launch(second).unwrap();
        let call = Attention {
            block_mask: Some(buffer.mask()),
            ..Attention::new(q.view(), k.view(), k.view())
        };
        call.forward_into(o.view_mut(), None, third).unwrap();
    }
    for stream in &streams {
        wait(stream, &|| "overlapping builds".into()).unwrap();
    }
    graphs[1].launch(second).unwrap();
    let columns = lists.to_vec::<i32>(second).unwrap();
    let expected =
        BlockMask::from_top_k(geometry, 1, heads, 9, &columns).unwrap().to_bool().unwrap();
    assert_eq!(buffer.to_host(second).unwrap().to_bool().unwrap(), expected);
}

/// The second step of building a mask without the first one, by the launch itself: it finds zeros.
#[test]
fn listing_before_choosing_lists_nothing() {
    let name = "hostile_gpu::listing_before_choosing_lists_nothing";
    let Some(gpu) = gpu(name) else { return };
    let stream = &gpu.stream;
    let kernel_of = |kernel: &'static Kernel| match kernel.variant {
        Variant::BlockMask(BlockMaskKernel::Build { slab_rows }) => {
            Some((kernel, slab_rows as usize))
        }
        _ => None,
    };
    for (kernel, slab_rows) in gpu.kernels().filter_map(kernel_of) {
        let (heads, rows, cols, capacity) = (2, 40, 70, 50);
        let source = Tensor::zeros(stream, DType::U8, &[1, heads, rows, cols]).unwrap();
        let mut scratch = BlockListScratch::new([1, heads], rows, cols, slab_rows, stream).unwrap();
        let mut lists =
            BlockLists::with_capacity([1, heads], rows, cols, capacity, stream).unwrap();
        let mut problems = Tensor::zeros(stream, DType::I32, &[4]).unwrap();
        let params = blockflash_block_mask_build_params {
            source: null(),
            always: NO_MASK,
            bits: null_mut(),
            lengths: null_mut(),
            slab_lengths: null_mut(),
            row_ptr: null_mut(),
            col_idx: null_mut(),
            row_order: null_mut(),
            problems: null_mut(),
            step: BLOCKFLASH_BLOCK_MASK_LIST,
            source_kind: BLOCKFLASH_BLOCK_SOURCE_BOOL,
            k: 0,
            batch: 1,
            heads: heads as i32,
            rows: rows as i32,
            cols: cols as i32,
            capacity: capacity as i32,
            seqlen_q: 64 * rows as i32,
            seqlen_kv: 64 * cols as i32,
            block_q: 64,
            block_kv: 64,
            window: blockflash_window {
                left: BLOCKFLASH_WINDOW_UNBOUNDED,
                right: BLOCKFLASH_WINDOW_UNBOUNDED,
                align_bottom_right: 0,
            },
        };
        let config = LaunchConfig::of(kernel, (heads * rows.div_ceil(slab_rows)) as u32, false);
        let operands = BlockMaskBuildOperands {
            source: source.view(),
            always: None,
            scratch: &mut scratch,
            lists: &mut lists,
            problems: problems.view_mut(),
        };
        stream.launch::<BlockMaskBuild>(kernel, &config, &params, operands).unwrap();
        wait(stream, &|| format!("{}, second step alone", kernel.image_name())).unwrap();
        assert_eq!(lists.row_ptr().to_vec::<i32>(stream).unwrap(), vec![0; heads * (rows + 1)]);
        let order: Vec<i32> = (0..heads).flat_map(|_| (0..rows as i32).rev()).collect();
        assert_eq!(lists.row_order().to_vec::<i32>(stream).unwrap(), order);
    }
}
