//! How long a GPU takes to build masks of tokens, beside attention under each of them.

use blockflash_ops::{
    Align, Attention, AttentionOutput, BlockGeometry, BlockMaskBuffer, DType, Mask, Stream, Tensor,
    TokenChoice, TokenSource,
};
use blockflash_safe::Event;
use blockflash_tests::gpu::{Gpu, gpu, say};

/// Queries and keys, and heads.
const SIZES: [usize; 2] = [1 << 14, 16];

/// The median time in µs of what a graph does.
fn time(gpu: &Gpu, mut body: impl FnMut(&Stream) -> blockflash_ops::Result<()>) -> f64 {
    let stream = &gpu.stream;
    body(stream).unwrap();
    let graph = stream.capture(|stream| body(stream)).unwrap();
    let [begin, end] = [0, 1].map(|_| Event::new(&gpu.device, true).unwrap());
    let mut times: Vec<f64> = (0..20)
        .map(|_| {
            begin.record(stream).unwrap();
            graph.launch(stream).unwrap();
            end.record(stream).unwrap();
            end.synchronize().unwrap();
            begin.elapsed_us(&end).unwrap()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

#[test]
#[ignore = "measures times: `cargo test --test block_bits_times_gpu -- --ignored`"]
fn builders() {
    let Some(gpu) = gpu("block_bits_times_gpu::builders") else { return };
    let stream = &gpu.stream;
    let [tokens, heads] = SIZES;
    let upload = |data: &[i32], shape: &[usize]| Tensor::from_slice(stream, data, shape).unwrap();
    let ranges = |of: fn(usize, usize) -> Vec<i32>| {
        let queries = (0..heads).flat_map(|head| (0..tokens).map(move |query| (head, query)));
        let data: Vec<i32> = queries.flat_map(|(head, query)| of(head, query)).collect();
        upload(&data, &[1, heads, tokens, data.len() / heads / tokens])
    };
    let causal = ranges(|_, query| vec![0, query as i32 + 1]);
    // Windows of another length for each head, and 64 keys for everybody.
    let windows = ranges(|head, query| {
        let first = query.saturating_sub(256 * (head + 1));
        vec![first as i32, query as i32 + 1, 0, 64.min(query as i32 + 1)]
    });
    // Documents of 100 to about 4000 tokens.
    let document = |token: usize| {
        (0..)
            .scan(0, |end, at: usize| {
                *end += 100 + at * 1933 % 3900;
                Some(*end)
            })
            .position(|end| token < end)
            .unwrap_or(0)
    };
    let ids: Vec<i32> = (0..tokens).map(|token| document(token) as i32).collect();
    let ids = upload(&ids, &[1, tokens]);
    let parents = |far: usize| {
        let parents = (0..tokens).map(|node| node as i32 - 1 - (node * 7919 % far) as i32);
        upload(&parents.collect::<Vec<_>>(), &[1, tokens])
    };
    let [chain, bushy] = [1, 4].map(parents);
    let pairs = |of: fn(usize, usize) -> bool| {
        let bytes = (0..tokens * tokens).map(|at| u8::from(of(at / tokens, at % tokens)));
        Tensor::from_slice(stream, &bytes.collect::<Vec<u8>>(), &[1, 1, tokens, tokens]).unwrap()
    };
    let triangle = pairs(|query, key| key <= query);
    let random = pairs(|query, key| (query * 31 + key * 17) % 7 < 3);
    let documents = TokenSource::Documents { ids_q: ids.view(), ids_kv: ids.view() };
    let strided = TokenSource::Strided { stride: 4, align: Align::BottomRight };
    let plane =
        TokenSource::Neighborhood { grid: &[128, 128], window: &[13, 13], dilation: &[1, 1] };
    let space =
        TokenSource::Neighborhood { grid: &[16, 32, 32], window: &[5, 9, 9], dilation: &[1, 1, 1] };
    let window = Mask::Window { left: Some(1024), right: Some(0), align: Align::BottomRight };
    let full = Mask::Full;
    let of_heads = TokenSource::Ranges(causal.view());
    for (name, source, within, heads) in [
        ("ranges: causal, for each head", of_heads, full, heads),
        ("ranges: windows, for each head", TokenSource::Ranges(windows.view()), full, heads),
        ("documents", documents, full, 1),
        ("documents, causal", documents, Mask::causal(), 1),
        ("tree: a chain", TokenSource::Tree(chain.view()), full, 1),
        ("tree: parents near", TokenSource::Tree(bushy.view()), full, 1),
        ("every 4th key of a window", strided, window, 1),
        ("neighbourhood 13 × 13 of 128 × 128", plane, full, 1),
        ("neighbourhood 5 × 9 × 9 of 16 × 32 × 32", space, full, 1),
        ("booleans: causal", TokenSource::Bool(triangle.view()), full, 1),
        ("booleans: random", TokenSource::Bool(random.view()), full, 1),
    ] {
        for block in [64, 128] {
            report(&gpu, &format!("{name}, blocks of {block}"), source, within, [heads, block]);
        }
    }
    // Booleans of each head, which are as large as the rate of reading is to be measured with.
    let mut pairs = Tensor::zeros(stream, DType::U8, &[1, heads, tokens, tokens]).unwrap();
    let copied = time(&gpu, |stream| Ok(pairs.view_mut().fill_bytes(stream, 0)?));
    say(&format!("writing the booleans of {heads} heads takes {copied:.0} µs"));
    for byte in [0, 1] {
        pairs.view_mut().fill_bytes(stream, byte).unwrap();
        let name = format!("booleans of each head, all {byte}");
        for block in [64, 128] {
            let source = TokenSource::Bool(pairs.view());
            let us = build(&gpu, source, full, [heads, block]).1;
            let rate = (heads * tokens * tokens) as f64 / us / 1e6;
            say(&format!("{name}, blocks of {block}: {us:.1} µs, {rate:.2} TB/s"));
        }
    }
}

/// A buffer with the mask of a source, and the time of its build in µs.
fn build(
    gpu: &Gpu,
    source: TokenSource<'_>,
    within: Mask,
    [heads, block]: [usize; 2],
) -> (BlockMaskBuffer, f64) {
    let stream = &gpu.stream;
    let geometry = BlockGeometry::new(SIZES[0], SIZES[0], block, block).unwrap();
    let blocks = geometry.rows() * geometry.cols() * heads;
    let buffer = BlockMaskBuffer::new(geometry, 1, heads, blocks, stream).unwrap();
    let mut buffer = buffer.with_bits(blocks, stream).unwrap();
    let choice = TokenChoice { within, ..TokenChoice::new(source) };
    let us = time(gpu, |stream| buffer.build_tokens(&choice, stream));
    buffer.check(stream).unwrap();
    (buffer, us)
}

fn report(gpu: &Gpu, name: &str, source: TokenSource<'_>, within: Mask, sizes: [usize; 2]) {
    let (buffer, built) = build(gpu, source, within, sizes);
    let stream = &gpu.stream;
    let q = Tensor::zeros(stream, DType::BF16, &[1, SIZES[0], SIZES[1], 64]).unwrap();
    let block_mask = Some(buffer.mask());
    let call = Attention { block_mask, ..Attention::new(q.view(), q.view(), q.view()) };
    let mut output: AttentionOutput = call.forward(stream).unwrap();
    let attention = time(gpu, |stream| {
        call.forward_into(output.o.view_mut(), Some(output.lse.view_mut()), stream)
    });
    say(&format!(
        "{name}: built in {built:.1} µs, {:.1} % of attention, {attention:.0} µs",
        100.0 * built / attention
    ));
}
