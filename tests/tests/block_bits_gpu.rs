//! Masks of tokens that a GPU builds, against those that the host makes of the same pairs.

use blockflash_ops::{
    BlockGeometry, BlockMask, BlockMaskBuffer, Device, Mask, Stream, Tensor, TokenSource,
};
use blockflash_sys::manifest::Variant;
use blockflash_sys::{BlockMaskKernel, Kernel};
use blockflash_tests::gpu::{Report, gpu, wait};

#[derive(Clone, Copy, Debug)]
struct Case {
    lengths: [usize; 2],
    blocks: [usize; 2],
    groups: [usize; 2],
    /// Queries and keys of squares in which all pairs are alike.
    scale: usize,
    mask: Mask,
    /// Ranges of a query; 0: booleans.
    ranges: usize,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (at, lengths) in
        [[64, 64], [1, 500], [500, 1], [300, 333], [640, 512], [1000, 1001]].into_iter().enumerate()
    {
        for (i, blocks) in
            [[64, 64], [128, 128], [64, 128], [128, 64], [256, 256]].into_iter().enumerate()
        {
            for ranges in [0, 1, 2, 5] {
                cases.push(Case {
                    lengths,
                    blocks,
                    groups: [[1, 1], [2, 3], [1, 4]][(at + i + ranges) % 3],
                    scale: [1, 70, 200][(at + i) % 3],
                    mask: if i % 2 == 0 { Mask::Full } else { Mask::causal() },
                    ranges,
                });
            }
        }
    }
    cases
}

fn noise(numbers: [usize; 4]) -> usize {
    let mix = |hash: u64, &number: &usize| {
        (hash ^ number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31)
    };
    numbers.iter().fold(7, mix) as usize
}

impl Case {
    fn geometry(&self) -> BlockGeometry {
        let ([q, kv], [block_q, block_kv]) = (self.lengths, self.blocks);
        BlockGeometry::new(q, kv, block_q, block_kv).unwrap()
    }

    fn source(&self, seed: usize, stream: &Stream) -> Tensor {
        let ([batch, heads], [queries, keys]) = (self.groups, self.lengths);
        let rows = (0..batch * heads * queries).map(|row| (row / queries, row % queries));
        if self.ranges > 0 {
            let ends = |(group, query): (usize, usize)| {
                (0..self.ranges).flat_map(move |range| {
                    let random = noise([group + seed, query / self.scale, range, 0]);
                    let start = (random % (keys + 40)) as i32 - 20;
                    let end = start + (random >> 32) as i32 % 200 - 10;
                    match random >> 20 & 7 {
                        0 => [i32::MIN, end],
                        1 => [i32::MAX, end],
                        2 => [start, i32::MIN],
                        3 => [start, i32::MAX],
                        _ => [start, end],
                    }
                })
            };
            let ends: Vec<i32> = rows.flat_map(ends).collect();
            return Tensor::from_slice(stream, &ends, &[batch, heads, queries, 2 * self.ranges])
                .unwrap();
        }
        let pairs = |(group, query): (usize, usize)| {
            (0..keys).map(move |key| {
                let random = noise([group + seed, query / self.scale, key / self.scale, 1]);
                if random.is_multiple_of(3) { 1 + (random >> 8) as u8 % 255 } else { 0 }
            })
        };
        let pairs: Vec<u8> = rows.flat_map(pairs).collect();
        Tensor::from_slice(stream, &pairs, &[batch, heads, queries, keys]).unwrap()
    }

    fn of<'a>(&self, source: &'a Tensor) -> TokenSource<'a> {
        match self.ranges {
            0 => TokenSource::Bool(source.view()),
            _ => TokenSource::Ranges(source.view()),
        }
    }

    fn buffer(&self, transposed: bool, stream: &Stream) -> BlockMaskBuffer {
        let geometry = self.geometry();
        let blocks = self.groups[0] * self.groups[1] * geometry.rows() * geometry.cols();
        let buffer =
            BlockMaskBuffer::new(geometry, self.groups[0], self.groups[1], blocks, stream).unwrap();
        let buffer = if transposed { buffer.with_transpose(stream).unwrap() } else { buffer };
        buffer.with_bits(blocks, stream).unwrap()
    }

    /// What the host makes of the same data.
    fn expected(&self, seed: usize) -> BlockMask {
        let host = Device::cpu().stream().unwrap();
        let source = self.source(seed, &host);
        let mut buffer = self.buffer(true, &host);
        buffer.build_tokens(&self.of(&source), self.mask, &host).unwrap();
        buffer.to_host(&host).unwrap()
    }

    /// Lists are those of the host, entry by entry, and so are pairs; which tiles a block has may
    /// differ.
    fn compare(
        &self,
        buffer: &BlockMaskBuffer,
        seed: usize,
        stream: &Stream,
    ) -> Result<usize, String> {
        let host = Device::cpu().stream().unwrap();
        let (found, expected) = (buffer.to_host(stream).unwrap(), self.expected(seed));
        let indices = |mask: &BlockMask| {
            [mask.row_ptr(), mask.col_idx()].map(|array| array.to_vec::<i32>(&host).unwrap())
        };
        if indices(&found) != indices(&expected) {
            return Err(format!("{self:?}: lists differ"));
        }
        let pairs = expected.to_token_mask().unwrap();
        if found.to_token_mask().unwrap() != pairs {
            return Err(format!("{self:?}: pairs differ"));
        }
        if found.partial_blocks().unwrap() != expected.partial_blocks().unwrap() {
            return Err(format!("{self:?}: {} partial blocks", found.partial_blocks().unwrap()));
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
        let [batch, heads] = self.groups;
        let found =
            BlockMask::from_parts(turned.geometry(), batch, heads, &row_ptr, &col_idx[..end])
                .and_then(|mask| mask.with_bits(&first[..end], &words))
                .map_err(|error| format!("{self:?}: transpose: {error}"))?;
        match found.to_token_mask().unwrap() == turned.to_token_mask().unwrap() {
            true => Ok(2 * pairs.len()),
            false => Err(format!("{self:?}: pairs of the transpose differ")),
        }
    }
}

fn run(case: &Case, transposed: bool, stream: &Stream) -> Result<usize, String> {
    let mut buffer = case.buffer(transposed, stream);
    let mut compared = 0;
    // The same memory again: what the first build left must not matter.
    for seed in [1, 2] {
        let source = case.source(seed, stream);
        buffer.build_tokens(&case.of(&source), case.mask, stream).map_err(|e| e.to_string())?;
        buffer.check(stream).map_err(|error| error.to_string())?;
        compared += case.compare(&buffer, seed, stream)?;
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
        for case in cases() {
            report.run(kernel, || run(&case, case.groups[1] != 1, stream));
        }
        report.run(kernel, || no_room(stream));
        report.run(kernel, || replays(stream));
    }
    report.finish(&gpu, "block_bits_gpu");
}

#[test]
fn the_cpu_builds_the_same() {
    let stream = Device::cpu().stream().unwrap();
    for case in cases().iter().step_by(7) {
        run(case, true, &stream).unwrap();
    }
}

const SMALL: Case = Case {
    lengths: [512, 512],
    blocks: [64, 64],
    groups: [1, 2],
    scale: 1,
    mask: Mask::Full,
    ranges: 0,
};

/// Of 128 partial blocks 5 have room. What is visible then is visible in the source, too.
fn no_room(stream: &Stream) -> Result<usize, String> {
    let mut buffer = BlockMaskBuffer::new(SMALL.geometry(), 1, 2, 128, stream)
        .and_then(|buffer| buffer.with_bits(5, stream))
        .unwrap();
    let source = SMALL.source(1, stream);
    buffer.build_tokens(&SMALL.of(&source), Mask::Full, stream).unwrap();
    let error = buffer.check(stream).unwrap_err().to_string();
    if !error.contains("128 tiles of 64 × 64 bits are needed, but there is room for 5") {
        return Err(error);
    }
    buffer.check(stream).map_err(|error| format!("reported again: {error}"))?;
    let found = buffer.to_host(stream).unwrap();
    if found.nnz() != 5 {
        return Err(format!("{} blocks are visited", found.nnz()));
    }
    let hidden = found.difference(&SMALL.expected(1)).unwrap().nnz();
    if hidden == 0 { Ok(5) } else { Err("pairs that the source hides are visible".into()) }
}

/// A captured build follows what its source holds at each replay.
fn replays(stream: &Stream) -> Result<usize, String> {
    let mut buffer = SMALL.buffer(true, stream);
    let mut source = SMALL.source(1, stream);
    let view = source.view();
    let graph = stream
        .capture(|stream| {
            buffer.build_tokens(&TokenSource::Bool(view), Mask::Full, stream)?;
            Ok::<(), blockflash_ops::Error>(())
        })
        .map_err(|error| error.to_string())?;
    let mut compared = 0;
    for seed in [3, 4] {
        let host = Device::cpu().stream().unwrap();
        let data = SMALL.source(seed, &host).to_vec::<u8>(&host).unwrap();
        source.copy_from_slice(stream, &data).unwrap();
        graph.launch(stream).map_err(|error| error.to_string())?;
        buffer.check(stream).map_err(|error| error.to_string())?;
        compared += SMALL.compare(&buffer, seed, stream)?;
    }
    Ok(compared)
}

/// Builds of one buffer from several graphs at the same time: entries stay in their range, and a
/// build alone is right again.
#[test]
fn overlapping_builds() {
    let Some(gpu) = gpu("block_bits_gpu::overlapping_builds") else { return };
    let [first, second] = [0, 1].map(|_| gpu.device.stream().unwrap());
    let case = Case { blocks: [128, 64], ..SMALL };
    let mut buffer = case.buffer(true, &first);
    let sources = [1, 2].map(|seed| case.source(seed, &first));
    let graphs = [(&first, &sources[0]), (&second, &sources[1])].map(|(stream, source)| {
        let build = |stream: &Stream| buffer.build_tokens(&case.of(source), Mask::Full, stream);
        stream.capture(build).unwrap()
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
    case.compare(&buffer, 2, &second).unwrap();
}
