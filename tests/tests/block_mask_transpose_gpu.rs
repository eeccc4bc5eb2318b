//! Every kernel that transposes block masks against the transpose that the host makes: entry by
//! entry, without a tolerance. And gradients under masks that are built again and again.

use blockflash_ops::attention::{Attention, Mask};
use blockflash_ops::block_sparse::BlockMaskBuffer;
use blockflash_ops::{
    AttentionBackward, BlockChoice, BlockGeometry, BlockMask, BlockSource, DType, Error, Stream,
    Tensor,
};
use blockflash_safe::{
    BlockLists, BlockMaskTranspose, BlockMaskTransposeOperands, BlockTransposeScratch, LaunchConfig,
};
use blockflash_sys::manifest::Variant;
use blockflash_sys::params::{
    BLOCKFLASH_BLOCK_MASK_LIST_T, blockflash_block_mask_transpose_params,
};
use blockflash_sys::{BlockMaskKernel, Kernel};
use blockflash_tests::attention::{AttentionCase, BlockCase, BlockPattern, Lengths, MaskHeads};
use blockflash_tests::attention_bwd::{
    BackwardData, BackwardInputs, BackwardOutputs, BackwardReference,
};
use blockflash_tests::block_masks::{
    MaskCase, MaskInputs, MaskSource, compare_transposed, mask_cases, prepare,
};
use blockflash_tests::gpu::{Gpu, Report, gpu, say, wait};
use blockflash_tests::host::cpu;
use std::ptr::{null, null_mut};

fn text(error: impl Into<Error>) -> String {
    error.into().to_string()
}

/// The kernels that transpose, with the rows of their CTAs.
fn kernels(gpu: &Gpu) -> Vec<(&'static Kernel, usize)> {
    let slab_rows = |kernel: &'static Kernel| match kernel.variant {
        Variant::BlockMask(BlockMaskKernel::Transpose { slab_rows, .. }) => {
            Some((kernel, slab_rows as usize))
        }
        _ => None,
    };
    gpu.kernels().filter_map(slab_rows).collect()
}

/// The cases of building masks, and sizes around those of slabs, chunks, strips and words.
fn cases() -> Vec<MaskCase> {
    let mut cases = mask_cases();
    let sizes =
        [[127, 40], [128, 33], [129, 8191], [130, 8193], [20, 17000], [1025, 31], [3000, 9]];
    for (seed, size) in (1..).zip(sizes) {
        let case = MaskCase { seed, ..MaskCase::new(MaskSource::TopK, size, 5 * seed as usize) };
        cases.push(MaskCase { source: MaskSource::Bool, groups: [2, 1], ..case.clone() });
        cases.push(MaskCase { mask: Mask::causal(), groups: [2, 3], ..case });
    }
    cases
}

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("block_mask_transpose_gpu::every_kernel") else { return };
    let (stream, kernels) = (&gpu.stream, kernels(&gpu));
    assert!(!kernels.is_empty());
    let mut report = Report::default();
    for (kernel, slab_rows) in kernels {
        let story =
            |what: &'static str| move |error| format!("{what} of {}: {error}", kernel.image_name());
        for case in cases() {
            report.run(kernel, || transpose_and_check(&case, Some(kernel), stream));
        }
        report.run(kernel, || ends_with_its_capacity(Some(kernel), stream).map_err(story("end")));
        report
            .run(kernel, || lists_nothing_first(kernel, slab_rows, stream).map_err(story("first")));
        report.run(kernel, || gradients_follow(Some(kernel), stream).map_err(story("gradients")));
        report.run(kernel, || survives_overlaps(kernel, &gpu).map_err(story("overlaps")));
    }
    report.finish(&gpu, "block_mask_transpose_gpu");
}

#[test]
fn the_cpu_builds_the_same() {
    let stream = cpu();
    let cases = cases().into_iter().step_by(4);
    let failures: Vec<String> =
        cases.filter_map(|case| transpose_and_check(&case, None, &stream).err()).collect();
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn gradients_on_the_cpu_follow_the_mask() {
    gradients_follow(None, &cpu()).unwrap();
}

/// Builds a mask twice with another one between, and compares its transpose.
fn transpose_and_check(
    case: &MaskCase,
    kernel: Option<&Kernel>,
    stream: &Stream,
) -> Result<usize, String> {
    let run = || -> Result<usize, String> {
        let (data, other) = (case.data(), MaskCase { seed: case.seed + 1, ..case.clone() }.data());
        let expected = case.expected(&data).map_err(text)?;
        let rows = case.groups[0] * case.groups[1] * expected.rows();
        let capacity = (rows * expected.cols()).max(expected.nnz());
        let (buffer, mut inputs) = prepare(case, &data, capacity, stream)?;
        let mut buffer = buffer.with_transpose(stream).map_err(text)?;
        for data in [&data, &other, &data] {
            inputs.refill(data, stream).map_err(text)?;
            inputs.build(&mut buffer, kernel, stream).map_err(text)?;
        }
        wait(stream, &|| format!("transposing {case:?}"))?;
        compare_transposed(buffer.mask(), expected, stream)
    };
    run().map_err(|error| format!("{error}\n    {case:?}"))
}

/// The transpose is that of the lists, also where the capacity has cut them off.
fn ends_with_its_capacity(kernel: Option<&Kernel>, stream: &Stream) -> Result<usize, String> {
    let case = MaskCase { groups: [2, 3], ..MaskCase::new(MaskSource::Bool, [37, 50], 0) };
    let data = case.data();
    let nnz = case.expected(&data).map_err(text)?.nnz();
    let mut compared = 0;
    for capacity in [0, 1, nnz / 3, nnz / 2, nnz - 1, nnz, nnz + 5] {
        let (buffer, inputs) = prepare(&case, &data, capacity, stream)?;
        let mut buffer = buffer.with_transpose(stream).map_err(text)?;
        inputs.build(&mut buffer, kernel, stream).map_err(text)?;
        wait(stream, &|| format!("transposing up to {capacity}"))?;
        let cut = buffer.to_host(stream).map_err(text)?;
        assert_eq!(cut.nnz(), capacity.min(nnz));
        compared += compare_transposed(buffer.mask(), cut, stream)?;
    }
    Ok(compared)
}

/// The second step without the first one, by the launch itself: it finds zeros.
fn lists_nothing_first(
    kernel: &Kernel,
    slab_rows: usize,
    stream: &Stream,
) -> Result<usize, String> {
    let text = |error: blockflash_safe::Error| error.to_string();
    let (groups, rows, cols, capacity) = ([1, 2], 200, 70, 50);
    let of = |rows, cols| BlockLists::with_capacity(groups, rows, cols, capacity, stream);
    let (lists, mut transpose) = (of(rows, cols).map_err(text)?, of(cols, rows).map_err(text)?);
    let mut scratch =
        BlockTransposeScratch::new(groups, rows, cols, slab_rows, stream).map_err(text)?;
    let params = blockflash_block_mask_transpose_params {
        row_ptr: null(),
        col_idx: null(),
        bits: null_mut(),
        counts: null_mut(),
        row_ptr_t: null_mut(),
        col_idx_t: null_mut(),
        step: BLOCKFLASH_BLOCK_MASK_LIST_T,
        batch: 1,
        heads: 2,
        rows: rows as i32,
        cols: cols as i32,
        capacity: capacity as i32,
    };
    let config = LaunchConfig::of(kernel, 2 * cols.div_ceil(32) as u32, false);
    let (scratch, transpose) = (&mut scratch, &mut transpose);
    let operands =
        BlockMaskTransposeOperands { lists: &lists, scratch, transpose: &mut *transpose };
    stream.launch::<BlockMaskTranspose>(kernel, &config, &params, operands).map_err(text)?;
    wait(stream, &|| format!("{}, second step alone", kernel.image_name()))?;
    let row_ptr = transpose.row_ptr().to_vec::<i32>(stream).map_err(text)?;
    if row_ptr.iter().any(|&end| end != 0) {
        return Err(format!("row_ptr is {row_ptr:?}"));
    }
    Ok(row_ptr.len())
}

/// A call that builds a mask and computes gradients under it, on a GPU as a graph that is replayed
/// with other blocks. The oracle knows the blocks.
fn gradients_follow(kernel: Option<&Kernel>, stream: &Stream) -> Result<usize, String> {
    let dense = AttentionCase {
        lengths: Lengths::Dense { batch: 2, seqlen_q: 600, seqlen_kv: 900 },
        scores: Mask::causal().into(),
        ..AttentionCase::simple(DType::BF16, (4, 2), 64, (0, 0))
    };
    let case = |pattern| {
        let heads = MaskHeads::KeyValue;
        let blocks = BlockCase { block_q: 128, block_kv: 128, per_entry: true, heads, pattern };
        AttentionCase { block_mask: Some(blocks), ..dense.clone() }
    };
    let mut inputs = BackwardInputs::upload(&dense, &BackwardData::generate(&dense), stream)?;

    let mask = MaskCase {
        seqlens: [600, 900],
        blocks: [128, 128],
        groups: [2, 2],
        mask: dense.scores.mask,
        ..MaskCase::new(MaskSource::Bool, [1, 1], 0)
    };
    let mut blocks = mask.data();
    let (buffer, mut source) = prepare(&mask, &blocks, 2 * 2 * 5 * 8, stream)?;
    let mut buffer = buffer.with_transpose(stream).map_err(text)?;
    let bytes = {
        let call = under(&inputs, buffer.mask());
        call.workspace_bytes(stream.device()).map_err(text)?
    };
    let mut outputs = BackwardOutputs::with_workspace(&inputs, bytes, stream)?;
    let mut compute = |inputs: &BackwardInputs,
                       source: &MaskInputs,
                       outputs: &mut BackwardOutputs,
                       stream: &Stream| {
        source.build(&mut buffer, kernel, stream)?;
        let (gradients, workspace) = outputs.views();
        under(inputs, buffer.mask()).backward_into(gradients, workspace, stream)
    };
    let graph = match stream.device().is_cpu() {
        true => None,
        false => {
            let captured = |stream: &Stream| compute(&inputs, &source, &mut outputs, stream);
            Some(stream.capture(captured).map_err(|error: Error| format!("capture: {error}"))?)
        }
    };
    let mut compared = 0;
    let patterns = [0.5, 0.0, 0.2, 0.9, 1.0].map(BlockPattern::Random);
    for pattern in patterns.into_iter().chain([BlockPattern::EmptyRowsAndColumns]) {
        let case = case(pattern);
        let data = BackwardData::generate(&case);
        let reference = BackwardReference::compute(&case, &data);
        let host = case.block_mask(&cpu())?.ok_or("the case has a block mask")?;
        blocks.blocks = host.to_bool().map_err(text)?;
        source.refill(&blocks, stream).map_err(text)?;
        inputs.refill(&dense, &data, stream)?;
        outputs.poison(stream)?;
        match &graph {
            Some(graph) => graph.launch(stream).map_err(text)?,
            None => compute(&inputs, &source, &mut outputs, stream).map_err(text)?,
        }
        wait(stream, &|| format!("gradients under {case:?}"))?;
        compared +=
            outputs.check(&reference, stream).map_err(|error| format!("{error}\n    {case:?}"))?;
    }
    buffer.check(stream).map_err(text)?;
    Ok(compared)
}

/// The call under a block mask.
fn under<'a>(inputs: &'a BackwardInputs, mask: &'a BlockMask) -> AttentionBackward<'a> {
    let call = inputs.backward();
    AttentionBackward { attention: Attention { block_mask: Some(mask), ..call.attention }, ..call }
}

/// Two graphs build one buffer on two streams while a third stream computes gradients under it: all
/// ends, and the next build is right.
fn survives_overlaps(kernel: &Kernel, gpu: &Gpu) -> Result<usize, String> {
    let streams: [Stream; 3] = std::array::from_fn(|_| gpu.device.stream().unwrap());
    let [first, second, third] = &streams;
    let geometry = BlockGeometry::new(2000, 2100, 64, 64).map_err(text)?;
    let (heads, rows, cols) = (4, geometry.rows(), geometry.cols());
    let buffer = BlockMaskBuffer::new(geometry, 1, heads, heads * rows * 9, first);
    let mut buffer = buffer.and_then(|buffer| buffer.with_transpose(first)).map_err(text)?;
    let lists = |factor: usize, stream: &Stream| {
        let lists: Vec<i32> = (0..heads * rows * 9).map(|at| (at * factor % cols) as i32).collect();
        Tensor::from_slice(stream, &lists, &[1, heads, rows, 9]).map_err(text)
    };
    let (one, other) = (lists(5, first)?, lists(7, second)?);
    let mut capture = |lists: &Tensor, mask, stream: &Stream| {
        let choice = BlockChoice { mask, ..BlockChoice::new(BlockSource::TopK(lists.view())) };
        stream.capture(|stream| buffer.build_with(kernel, &choice, stream))
    };
    let graphs: [_; 2] = [
        capture(&one, Mask::causal(), first).map_err(|error: Error| error.to_string())?,
        capture(&other, Mask::Full, second).map_err(|error: Error| error.to_string())?,
    ];
    let tensor = |length| Tensor::zeros(third, DType::BF16, &[1, length, heads, 64]).map_err(text);
    let (q, k) = (tensor(2000)?, tensor(2100)?);
    let lse = Tensor::zeros(third, DType::F32, &[1, heads, 2000]).map_err(text)?;
    for _ in 0..100 {
        graphs[0].launch(first).map_err(text)?;
        graphs[1].launch(second).map_err(text)?;
        let (q, k, block_mask) = (q.view(), k.view(), Some(buffer.mask()));
        let attention = Attention { block_mask, ..Attention::new(q, k, k) };
        let call = AttentionBackward { attention, o: q, lse: lse.view(), d_o: q };
        call.backward(third).map_err(text)?;
    }
    for stream in &streams {
        wait(stream, &|| "overlapping builds".into())?;
    }
    graphs[1].launch(second).map_err(text)?;
    let columns = other.to_vec::<i32>(second).map_err(text)?;
    let expected = BlockMask::from_top_k(geometry, 1, heads, 9, &columns).map_err(text)?;
    compare_transposed(buffer.mask(), expected, second)
}

/// Masks that were moved to a GPU, broadcast and packed ones among them.
#[test]
fn masks_on_a_gpu() {
    let name = "block_mask_transpose_gpu::masks_on_a_gpu";
    let Some(gpu) = gpu(name) else { return };
    let stream = &gpu.stream;
    let cases = cases().into_iter().step_by(7);
    let masks = cases.map(|case| case.expected(&case.data()).unwrap());
    let of = |rows, cols| {
        let case = MaskCase { groups: [1, 3], ..MaskCase::new(MaskSource::Bool, [rows, cols], 0) };
        case.expected(&case.data()).unwrap()
    };
    let sequences = [of(20, 30), of(0, 9), of(40, 3)];
    let packed = BlockMask::packed(&sequences.each_ref()).unwrap();
    for mask in masks.chain([packed]) {
        let moved = match mask.to(stream).unwrap().with_transpose() {
            Ok(moved) => moved,
            Err(Error::Unsupported { what, .. }) => {
                return say(&format!("SKIPPED ({what}): {name}"));
            }
            Err(error) => panic!("{error}"),
        };
        let (geometry, host) = (mask.geometry(), mask.to(&cpu()).unwrap());
        compare_transposed(&moved, mask, stream)
            .unwrap_or_else(|why| panic!("{why}: {geometry:?}"));
        let copy = moved.to(&cpu()).unwrap();
        compare_transposed(&copy, host, &cpu()).unwrap();
    }
}
