//! Every kernel of attention to caches of codes that the GPU can run against the CPU, which
//! computes in f32 what the same codes and scales stand for.
#![forbid(unsafe_code)]

use blockflash_ops::attention_decode::{AttentionDecodeOperands, CacheAccess, CacheTile, tile};
use blockflash_ops::{
    AttentionDecode, AttentionDecodeWorkspace, DType, Device, E4M3, E5M2, KvCache, Mask, Operation,
    PackedTokens, Scores, Stream, Tensor,
};
use blockflash_sys::Kernel;
use blockflash_tests::attention_decode::{Captured, CodeCase, CodeScales, replays};
use blockflash_tests::gpu::{Gpu, Report, gpu};
use blockflash_tests::number::{encode, normal, rng};
use half::{bf16, f16};
use rand::Rng;

type Outcome<T = usize> = Result<T, String>;

fn told<E: std::fmt::Display>(error: E) -> String {
    error.to_string()
}

/// What scales a tensor of a cache has: none, of sequences and heads, of pages, or of every key.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scaled {
    No,
    Heads,
    Pages,
    Keys,
}

#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    dtype: DType,
    of_q: DType,
    lengths: Vec<i32>,
    queries: Vec<usize>,
    packed: bool,
    page: Option<usize>,
    capacity: usize,
    heads: [usize; 2],
    head_dim: usize,
    scaled: [Scaled; 2],
    /// Whether some scales are NaN, infinite, negative or 0.
    hostile: bool,
    softcap: Option<f32>,
    causal: bool,
    given: bool,
    invariant: bool,
}

impl Case {
    fn draw(seed: u64, dtype: DType, widest: usize) -> Self {
        let mut random = rng(seed);
        let mut of = |choices: &[usize]| choices[random.random_range(0..choices.len())];
        let batch = of(&[1, 2, 3, 7]);
        let page = [None, Some(16), Some(64), Some(256)][of(&[0, 1, 2, 3])];
        let capacity = of(&[256, 512, 2048, 8192]);
        let packed = of(&[0, 0, 1]) == 1;
        let most = of(&[1, 1, 1, 2, 5, 16]);
        let heads = [[1, 1], [8, 1], [4, 2], [16, 2], [6, 2], [32, 8]][of(&[0, 1, 2, 3, 4, 5])];
        let kinds = [Scaled::No, Scaled::Heads, Scaled::Pages, Scaled::Keys];
        let scaled = [kinds[of(&[0, 1, 2, 3])], kinds[of(&[0, 1, 2, 3])]];
        let given = of(&[0, 1]) == 1 || packed;
        Self {
            seed,
            dtype,
            of_q: [DType::F16, DType::BF16][of(&[0, 1])],
            lengths: (0..batch)
                .map(|_| {
                    if given {
                        of(&[0, 1, 15, 16, 100, capacity / 2 + 3, capacity])
                    } else {
                        capacity
                    }
                })
                .map(|length| length.min(capacity) as i32)
                .collect(),
            queries: (0..batch).map(|_| if packed { of(&[0, 1, most]) } else { most }).collect(),
            packed,
            page,
            capacity,
            heads,
            head_dim: widest - 16 * of(&[0, 0, 1, 3]),
            scaled,
            hostile: of(&[0, 0, 0, 1]) == 1,
            softcap: [None, Some(20.0)][of(&[0, 0, 1])],
            causal: of(&[0, 1]) == 1,
            given,
            invariant: of(&[0, 0, 1]) == 1,
        }
    }
}

/// Host copies of everything, from which either device gets its tensors.
struct Data {
    q: Vec<f32>,
    codes: [Vec<u8>; 2],
    scales: [Option<(Vec<f32>, Vec<usize>)>; 2],
    table: Option<(Vec<i32>, [usize; 2])>,
    pages: usize,
    page: usize,
}

impl Data {
    fn of(case: &Case) -> Self {
        let (batch, mut random) = (case.lengths.len(), rng(case.seed + 1));
        let page = case.page.unwrap_or(case.capacity);
        let columns = case.capacity / page;
        let pages = if case.page.is_some() { batch * columns + 1 } else { batch };
        let [heads_q, heads_kv] = case.heads;
        let rows: usize = case.queries.iter().sum();
        let q = normal(case.seed + 2, rows * heads_q * case.head_dim);
        // bf16 has numbers that f16 has not.
        let size = if case.of_q == DType::BF16 { 1e6 } else { 1.0 };
        let q = q.into_iter().map(|x| x * size).collect();
        let codes = [3, 4].map(|more| {
            let numbers = normal(case.seed + more, pages * page * heads_kv * case.head_dim);
            numbers.into_iter().map(|x| code(case.dtype, x)).collect()
        });
        let scales = [0, 1].map(|at| {
            let shape = match case.scaled[at] {
                Scaled::No if at == 0 && size > 1.0 => vec![1],
                Scaled::No => return None,
                Scaled::Heads => vec![batch, heads_kv],
                Scaled::Pages => vec![pages, 1, heads_kv],
                Scaled::Keys => vec![pages, page, heads_kv],
            };
            let range = if at == 1 { -6..=6 } else { -1..=1 };
            let unit = if case.dtype == DType::I8 { 1.0 / 40.0 } else { 1.0 };
            let unit = if at == 0 { unit / size } else { unit };
            let mut values: Vec<f32> = (0..shape.iter().product())
                .map(|_| {
                    random.random_range(1.0f32..2.0) * 2f32.powi(random.random_range(range.clone()))
                })
                .map(|x| x * unit)
                .collect();
            if case.hostile {
                let odd = [f32::NAN, 0.0, -1.0, f32::INFINITY, -0.25];
                values
                    .iter_mut()
                    .step_by(37)
                    .zip(odd.into_iter().cycle())
                    .for_each(|(x, odd)| *x = odd);
            }
            Some((values, shape))
        });
        let table = case.page.map(|_| {
            let entries = (0..batch * columns).map(|i| ((i * 7 + 3) % pages) as i32).collect();
            (entries, [batch, columns])
        });
        Self { q, codes, scales, table, pages, page }
    }
}

fn code(dtype: DType, x: f32) -> u8 {
    match dtype {
        DType::E4M3 => E4M3::saturated(x).0,
        DType::E5M2 => E5M2::saturated(x).0,
        _ => (x * 40.0).clamp(-127.0, 127.0) as i8 as u8,
    }
}

fn coded(dtype: DType, codes: &[u8], shape: &[usize], stream: &Stream) -> Outcome<Tensor> {
    match dtype {
        DType::E4M3 => {
            let codes: Vec<_> = codes.iter().map(|&x| E4M3(x)).collect();
            Tensor::from_slice(stream, &codes, shape)
        }
        DType::E5M2 => {
            let codes: Vec<_> = codes.iter().map(|&x| E5M2(x)).collect();
            Tensor::from_slice(stream, &codes, shape)
        }
        _ => {
            let codes: Vec<_> = codes.iter().map(|&x| x as i8).collect();
            Tensor::from_slice(stream, &codes, shape)
        }
    }
    .map_err(told)
}

fn rounded(dtype: DType, values: &[f32], shape: &[usize], stream: &Stream) -> Outcome<Tensor> {
    match dtype {
        DType::F16 => {
            let bits: Vec<_> = values.iter().map(|&x| f16::from_f32(x)).collect();
            Tensor::from_slice(stream, &bits, shape)
        }
        DType::BF16 => {
            let bits: Vec<_> =
                values.iter().map(|&x| bf16::from_bits(encode(DType::BF16, x) as u16)).collect();
            Tensor::from_slice(stream, &bits, shape)
        }
        _ => Tensor::from_slice(stream, values, shape),
    }
    .map_err(told)
}

fn widened(tensor: &Tensor, stream: &Stream) -> Outcome<Vec<f32>> {
    Ok(match tensor.dtype() {
        DType::F16 => {
            tensor.to_vec::<f16>(stream).map_err(told)?.iter().map(|x| x.to_f32()).collect()
        }
        DType::BF16 => {
            tensor.to_vec::<bf16>(stream).map_err(told)?.iter().map(|x| x.to_f32()).collect()
        }
        _ => tensor.to_vec(stream).map_err(told)?,
    })
}

/// The output and the log-sum-exp of a call with queries of a type, `times` times.
fn run(
    case: &Case,
    data: &Data,
    of_q: DType,
    kernel: Option<&'static Kernel>,
    stream: &Stream,
    times: usize,
) -> Outcome<Vec<[Vec<f32>; 2]>> {
    let ([heads_q, heads_kv], d) = (case.heads, case.head_dim);
    let (batch, rows) = (case.lengths.len(), case.queries.iter().sum::<usize>());
    let shape = match case.packed {
        true => vec![rows, heads_q, d],
        false => vec![batch, case.queries[0], heads_q, d],
    };
    // Both see what the type on the GPU holds.
    let exact = widened(&rounded(case.of_q, &data.q, &shape, &cpu()?)?, &cpu()?)?;
    let q = rounded(of_q, &exact, &shape, stream)?;
    let of_cache = [data.pages, data.page, heads_kv, d];
    let k = coded(case.dtype, &data.codes[0], &of_cache, stream)?;
    let v = coded(case.dtype, &data.codes[1], &of_cache, stream)?;
    let scale = |at: usize| -> Outcome<Option<Tensor>> {
        let Some((values, shape)) = &data.scales[at] else { return Ok(None) };
        Tensor::from_slice(stream, values, shape).map(Some).map_err(told)
    };
    let (k_scale, v_scale) = (scale(0)?, scale(1)?);
    let table =
        data.table.as_ref().map(|(entries, shape)| Tensor::from_slice(stream, entries, shape));
    let table = table.transpose().map_err(told)?;
    let lengths = Tensor::from_slice(stream, &case.lengths, &[batch]).map_err(told)?;
    let mut starts = vec![0i32];
    case.queries.iter().for_each(|&n| starts.push(starts[starts.len() - 1] + n as i32));
    let starts = Tensor::from_slice(stream, &starts, &[batch + 1]).map_err(told)?;
    let cache = KvCache {
        block_table: table.as_ref().map(Tensor::view),
        seqused_kv: case.given.then(|| lengths.view()),
        k_scale: k_scale.as_ref().map(Tensor::view),
        v_scale: v_scale.as_ref().map(Tensor::view),
        ..KvCache::new(k.view(), v.view())
    };
    let mask = if case.causal { Mask::causal() } else { Mask::Full };
    let longest = case.queries.iter().copied().max().unwrap_or(0);
    let decode = AttentionDecode {
        scores: Scores { softcap: case.softcap, ..mask.into() },
        packed: case
            .packed
            .then(|| PackedTokens { cu_seqlens: starts.view(), max_seqlen: longest }),
        batch_invariant: case.invariant,
        ..AttentionDecode::new(q.view())
    };
    // Any kernel, not only the selected one.
    let bytes = decode.workspace_bytes(&cache, stream.device()).map_err(told)?.max(64 << 20);
    let workspace = match kernel {
        Some(_) => Some(AttentionDecodeWorkspace::new(stream, bytes).map_err(told)?),
        None => None,
    };
    let decode = AttentionDecode { workspace: workspace.as_ref(), ..decode };
    let mut found = Vec::new();
    for _ in 0..times {
        let lse_shape = match case.packed {
            true => vec![heads_q, rows],
            false => vec![batch, heads_q, case.queries[0]],
        };
        let count = |shape: &[usize]| shape.iter().product::<usize>();
        let mut o = rounded(of_q, &vec![f32::NAN; count(&shape)], &shape, stream)?;
        let mut lse = rounded(DType::F32, &vec![f32::NAN; count(&lse_shape)], &lse_shape, stream)?;
        let operands = AttentionDecodeOperands {
            cache: CacheAccess::Read(cache),
            o: o.view_mut(),
            lse: Some(lse.view_mut()),
        };
        match kernel {
            Some(kernel) => decode.run_with(kernel, operands, stream),
            None => decode.forward_into(operands, stream),
        }
        .map_err(told)?;
        found.push([widened(&o, stream)?, widened(&lse, stream)?]);
    }
    Ok(found)
}

fn cpu() -> Outcome<Stream> {
    Device::cpu().stream().map_err(told)
}

/// The norm of the difference of two rows, against that of the second one; where one is not a
/// number, the other one is not.
fn apart(found: &[f32], exact: &[f32]) -> Outcome<f64> {
    let (mut error, mut size) = (0.0, 0.0);
    for (&x, &y) in found.iter().zip(exact) {
        if x.is_finite() != y.is_finite() {
            return Err(format!("{x} in place of {y}"));
        }
        if y.is_finite() {
            error += (f64::from(x) - f64::from(y)).powi(2);
            size += f64::from(y).powi(2);
        }
    }
    Ok((error / size.max(1e-30)).sqrt())
}

fn check(case: &Case, kernel: &'static Kernel, stream: &Stream) -> Outcome {
    let data = Data::of(case);
    let [exact, exact_lse] = run(case, &data, DType::F32, None, &cpu()?, 1)?.remove(0);
    let [plain, _] = run(case, &data, case.of_q, None, &cpu()?, 1)?.remove(0);
    let all = run(case, &data, case.of_q, Some(kernel), stream, 2)?;
    let [found, lse] = &all[0];
    let story = |what: String| format!("{what}\n{case:?}");
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    if bits(found) != bits(&all[1][0]) || bits(lse) != bits(&all[1][1]) {
        return Err(story("a repeat has other bits".into()));
    }
    let (error, of_plain) = (apart(found, &exact), apart(&plain, &exact));
    let (error, of_plain) = (error.map_err(story)?, of_plain.map_err(story)?);
    // Probabilities are rounded to f16, which shows beside an output of f16 only.
    let bound = 1.1 * of_plain + if case.of_q == DType::F16 { 4e-4 } else { 2e-4 };
    if error > bound {
        return Err(story(format!("an error of {error:.2e}, on the CPU {of_plain:.2e}")));
    }
    for (&x, &y) in lse.iter().zip(&exact_lse) {
        let same = x == y || x.is_nan() && y.is_nan();
        let near = (x - y).abs() <= 2e-3 * y.abs().max(1.0);
        if !(same || near) {
            return Err(story(format!("a log-sum-exp of {x} in place of {y}")));
        }
    }
    Ok(found.len())
}

fn kernels(gpu: &Gpu) -> Vec<(&'static Kernel, CacheTile)> {
    let of = |kernel: &'static Kernel| tile(kernel).map(|tile| (kernel, tile));
    gpu.kernels().filter_map(of).filter(|(_, tile)| tile.types().kv.is_code()).collect()
}

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("attention_decode_8bit_gpu::every_kernel") else { return };
    let mut report = Report::default();
    let kernels = kernels(&gpu);
    report.run_each(&gpu, &kernels, |kernel, tile, stream| {
        let (dtype, widest) = (tile.types().kv, tile.head_dims().max());
        let drawn =
            (0..60).map(|seed| check(&Case::draw(seed * 10, dtype, widest), kernel, stream));
        let drawn = drawn.sum::<Outcome>()?;
        let mut captured = 0;
        for of_q in [DType::F16, DType::BF16] {
            for scales in [[CodeScales::Heads; 2], [CodeScales::Rows, CodeScales::Pages]] {
                let codes = Some(CodeCase { dtype, scales });
                let call = Captured { codes, ..Captured::default() };
                captured += replays(of_q, widest, call, kernel, stream, 100)
                    .map_err(|error| format!("graph, {of_q}, {scales:?}: {error}"))?;
            }
        }
        Ok(drawn + captured)
    });
    report.finish(&gpu, "attention_decode_8bit_gpu");
}
