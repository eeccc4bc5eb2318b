//! Masks of tokens that a GPU builds, against those that the host makes of the same pairs.

use blockflash_ops::{BlockMask, BlockMaskBuffer, Device, Mask, Stream};
use blockflash_sys::manifest::Variant;
use blockflash_sys::{BlockMaskKernel, Kernel};
use blockflash_tests::gpu::{Report, gpu, wait};
use blockflash_tests::token_case::{Kind, TokenCase, TokenData, token_cases};

/// Lists are those of the host, entry by entry, and so are pairs; which tiles a block has may
/// differ.
fn compare(
    case: &TokenCase,
    buffer: &BlockMaskBuffer,
    data: &TokenData,
    stream: &Stream,
) -> Result<usize, String> {
    let host = Device::cpu().stream().unwrap();
    let (found, expected) = (buffer.to_host(stream).unwrap(), case.on_host(data, true));
    let indices = |mask: &BlockMask| {
        [mask.row_ptr(), mask.col_idx()].map(|array| array.to_vec::<i32>(&host).unwrap())
    };
    if indices(&found) != indices(&expected) {
        return Err(format!("{case:?}: lists differ"));
    }
    let pairs = expected.to_token_mask().unwrap();
    if found.to_token_mask().unwrap() != pairs {
        return Err(format!("{case:?}: pairs differ"));
    }
    if found.partial_blocks().unwrap() != expected.partial_blocks().unwrap() {
        return Err(format!("{case:?}: {} partial blocks", found.partial_blocks().unwrap()));
    }
    let Some([first, words]) = buffer.mask().transposed_bits() else { return Ok(pairs.len()) };
    // The transposed lists with their bits, as kernels read them.
    let [row_ptr, col_idx] = buffer
        .mask()
        .transposed_indices()
        .unwrap()
        .map(|array| array.to_vec::<i32>(stream).unwrap());
    let end = row_ptr.last().map_or(0, |&end| end as usize);
    let first = first.to_vec::<i32>(stream).unwrap();
    let words = words.to_vec::<i32>(stream).unwrap();
    let words: Vec<u32> = words.into_iter().map(|word| word as u32).collect();
    let turned = expected.transpose().unwrap();
    let [batch, heads] = case.groups;
    let found = BlockMask::from_parts(turned.geometry(), batch, heads, &row_ptr, &col_idx[..end])
        .and_then(|mask| mask.with_bits(&first[..end], &words))
        .map_err(|error| format!("{case:?}: transpose: {error}"))?;
    match found.to_token_mask().unwrap() == turned.to_token_mask().unwrap() {
        true => Ok(2 * pairs.len()),
        false => Err(format!("{case:?}: pairs of the transpose differ")),
    }
}

fn run(case: &TokenCase, transposed: bool, stream: &Stream) -> Result<usize, String> {
    let mut buffer = case.buffer(transposed, stream);
    let mut compared = 0;
    // The same memory again: what the first build left must not matter.
    for seed in [1, 2] {
        let data = case.data(seed);
        let tensors = case.tensors(&data, stream);
        buffer.build_tokens(&case.choice(&tensors), stream).map_err(|error| error.to_string())?;
        buffer.check(stream).map_err(|error| error.to_string())?;
        compared += compare(case, &buffer, &data, stream)?;
    }
    Ok(compared)
}

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("block_bits_gpu::every_kernel") else { return };
    let stream = &gpu.stream;
    let is_bits = |kernel: &&Kernel| {
        matches!(kernel.variant, Variant::BlockMask(BlockMaskKernel::Bits { .. }))
    };
    let mut report = Report::default();
    for kernel in gpu.kernels().filter(is_bits) {
        for case in token_cases() {
            report.run(kernel, || run(&case, case.groups[1] != 1, stream));
        }
        report.run(kernel, || no_room(stream));
        for kind in [Kind::Bool, Kind::Ranges(2), Kind::Documents, Kind::Tree(0), Kind::Tree(3)] {
            report.run(kernel, || replays(&TokenCase { kind, ..SMALL }, stream));
        }
    }
    report.finish(&gpu, "block_bits_gpu");
}

#[test]
fn the_cpu_builds_the_same() {
    let stream = Device::cpu().stream().unwrap();
    for case in token_cases().iter().step_by(19) {
        run(case, true, &stream).unwrap();
    }
}

const SMALL: TokenCase = TokenCase {
    lengths: [512, 512],
    blocks: [64, 64],
    groups: [1, 2],
    scale: 1,
    kind: Kind::Bool,
    within: Mask::Full,
    mask: Mask::Full,
};

/// Of 128 partial blocks 5 have room. What is visible then is visible in the source, too.
fn no_room(stream: &Stream) -> Result<usize, String> {
    let mut buffer = BlockMaskBuffer::new(SMALL.geometry(), 1, 2, 128, stream)
        .and_then(|buffer| buffer.with_bits(5, stream))
        .unwrap();
    let data = SMALL.data(1);
    buffer.build_tokens(&SMALL.choice(&SMALL.tensors(&data, stream)), stream).unwrap();
    let error = buffer.check(stream).unwrap_err().to_string();
    if !error.contains("128 tiles of 64 × 64 bits are needed, but there is room for 5") {
        return Err(error);
    }
    buffer.check(stream).map_err(|error| format!("reported again: {error}"))?;
    let found = buffer.to_host(stream).unwrap();
    if found.nnz() != 5 {
        return Err(format!("{} blocks are visited", found.nnz()));
    }
    let hidden = found.difference(&SMALL.on_host(&data, false)).unwrap().nnz();
    if hidden == 0 { Ok(5) } else { Err("pairs that the source hides are visible".into()) }
}

/// A captured build follows what its source holds at each replay.
fn replays(case: &TokenCase, stream: &Stream) -> Result<usize, String> {
    let mut buffer = case.buffer(true, stream);
    let mut tensors = case.tensors(&case.data(1), stream);
    let graph = stream
        .capture(|stream| {
            buffer.build_tokens(&case.choice(&tensors), stream)?;
            Ok::<(), blockflash_ops::Error>(())
        })
        .map_err(|error| error.to_string())?;
    let mut compared = 0;
    for seed in [3, 4] {
        let data = case.data(seed);
        match case.kind {
            Kind::Bool => tensors[0].copy_from_slice(stream, &data.bytes).unwrap(),
            _ => {
                for (tensor, numbers) in tensors.iter_mut().zip(&data.numbers) {
                    tensor.copy_from_slice(stream, numbers).unwrap();
                }
            }
        }
        graph.launch(stream).map_err(|error| error.to_string())?;
        buffer.check(stream).map_err(|error| error.to_string())?;
        compared += compare(case, &buffer, &data, stream)?;
    }
    Ok(compared)
}

/// Builds of one buffer from several graphs at the same time: entries stay in their range, all of
/// them end, and a build alone is right again.
#[test]
fn overlapping_builds() {
    let Some(gpu) = gpu("block_bits_gpu::overlapping_builds") else { return };
    let [first, second] = [0, 1].map(|_| gpu.device.stream().unwrap());
    for kind in [Kind::Bool, Kind::Tree(3)] {
        let case = TokenCase { blocks: [128, 64], kind, ..SMALL };
        let mut buffer = case.buffer(true, &first);
        let data = [1, 2].map(|seed| case.data(seed));
        let tensors = [&data[0], &data[1]].map(|data| case.tensors(data, &first));
        let graphs = [(&first, &tensors[0]), (&second, &tensors[1])].map(|(stream, tensors)| {
            stream.capture(|stream| buffer.build_tokens(&case.choice(tensors), stream)).unwrap()
        });
        for _ in 0..200 {
            graphs[0].launch(&first).unwrap();
            graphs[1].launch(&second).unwrap();
        }
        for stream in [&first, &second] {
            wait(stream, &|| "overlapping builds".into()).unwrap();
        }
        let mask = buffer.mask();
        for [block_bits, words] in [mask.bits(), mask.transposed_bits()].map(Option::unwrap) {
            let tiles = words.shape()[0] as i32;
            for first_tile in block_bits.to_vec::<i32>(&first).unwrap() {
                let inside = (0..=tiles - 2).contains(&first_tile) && first_tile % 2 == 0;
                assert!(first_tile == -1 || inside, "{first_tile}");
            }
        }
        graphs[1].launch(&second).unwrap();
        compare(&case, &buffer, &data[1], &second).unwrap();
    }
}
