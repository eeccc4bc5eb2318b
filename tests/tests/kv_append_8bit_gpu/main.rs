//! Appends to caches of codes on the GPU against those on the CPU, bit by bit.
#![forbid(unsafe_code)]

mod case;

use self::case::{Case, MARGIN, Outcome, Scaled, Tensors, told};
use blockflash_ops::{AttentionDecode, DType, Mask, Operation, Stream};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::Variant;
use blockflash_tests::gpu::{Report, gpu, wait};
use blockflash_tests::host::{cpu, download, upload};

fn check(seed: u64, hostile: bool, kernel: &'static Kernel, stream: &Stream) -> Outcome {
    let case = Case::draw(seed, hostile, false);
    let story = |error: blockflash_ops::Error| format!("{error}\n    {case:?}");
    let mut exact = Tensors::new(&case, &cpu())?;
    let (append, cache) = exact.operands(&case)?;
    append.append_into(cache, &cpu()).map_err(story)?;
    let exact = exact.written(&cpu())?;
    let mut compared = 0;
    for own in [true, false] {
        let mut found = Tensors::new(&case, stream)?;
        let (append, cache) = found.operands(&case)?;
        match own {
            true => append.run_with(kernel, cache, stream),
            false => append.append_into(cache, stream),
        }
        .map_err(story)?;
        wait(stream, &|| format!("{case:?}"))?;
        for (which, (found, exact)) in found.written(stream)?.iter().zip(&exact).enumerate() {
            let differs = found.iter().zip(exact).position(|(x, y)| x != y);
            if let Some(at) = differs {
                let what = ["k", "v", "the first scales", "the second scales"][which];
                let (x, y) = (found[at], exact[at]);
                return Err(format!("{what}[{at}] is {x:#x} in place of {y:#x}\n    {case:?}"));
            }
            compared += found.len();
        }
    }
    Ok(compared)
}

/// Rows may race for slots here, so only the margins are known.
fn survives(seed: u64, kernel: &'static Kernel, stream: &Stream) -> Outcome {
    let case = Case::draw(seed, true, true);
    let mut tensors = Tensors::new(&case, stream)?;
    let (append, cache) = tensors.operands(&case)?;
    append.run_with(kernel, cache, stream).map_err(|error| format!("{error}\n    {case:?}"))?;
    wait(stream, &|| format!("{case:?}"))?;
    let chosen = tensors.scales.iter().zip(case.scaled).filter(|(_, kind)| *kind == Scaled::Chosen);
    for tensor in [&tensors.k, &tensors.v].into_iter().chain(chosen.filter_map(|(x, _)| x.as_ref()))
    {
        let all = download(stream, tensor)?;
        let margin = all.len() / (case.pages() + 2 * MARGIN) * MARGIN;
        let untouched = [&all[..margin], &all[all.len() - margin..]];
        let poison = u32::MAX >> (32 - 8 * tensor.dtype().size());
        if untouched.into_iter().flatten().any(|&x| x != poison) {
            return Err(format!("a margin is written\n    {case:?}"));
        }
    }
    Ok(2)
}

/// An append within attention leaves the bits that an append before attention leaves, and so do the
/// queries that are turned with it.
fn check_with_attention(seed: u64, stream: &Stream) -> Outcome {
    let mut case = Case::draw(seed, false, false);
    let width = [64, 128, 256][seed as usize % 3];
    case.head_dims = [width; 2];
    case.rotary = case.rotary.map(|(pairs, _, _)| (pairs, width, DType::F32));
    let story = |error: blockflash_ops::Error| format!("{error}\n    {case:?}");
    let of_q = [DType::F16, DType::BF16][seed as usize / 3 % 2];
    let (bits, shape) = case.rows(of_q, 30, 2 * case.heads, width);
    let q = upload(stream, of_q, &bits, &shape)?;
    let mut results = Vec::new();
    for together in [true, false] {
        let mut tensors = Tensors::new(&case, stream)?;
        // Slots that no append reaches hold numbers.
        for tensor in [&mut tensors.k, &mut tensors.v] {
            tensor.fill_bytes(stream, 0x21).map_err(told)?;
        }
        for (tensor, kind) in tensors.scales.iter_mut().zip(case.scaled) {
            if let (Some(tensor), Scaled::Chosen) = (tensor, kind) {
                tensor.fill_bytes(stream, 0x3c).map_err(told)?;
            }
        }
        let (append, mut cache) = tensors.operands(&case)?;
        let decode = AttentionDecode {
            packed: append.packed,
            rotary: append.rotary,
            scores: Mask::causal().into(),
            ..AttentionDecode::new(q.view())
        };
        let output = if together {
            decode.append(&append, cache, stream)
        } else {
            append.append_into(cache.reborrow(), stream).map_err(story)?;
            decode.forward(cache.as_cache().map_err(story)?, stream)
        };
        let output = output.map_err(story)?;
        let mut bits = tensors.written(stream)?;
        bits.push(download(stream, &output.o)?);
        bits.push(download(stream, &output.lse)?);
        results.push(bits);
    }
    match results[0] == results[1] {
        true => Ok(results[0].iter().map(Vec::len).sum()),
        false => Err(format!("attention with an append has other bits\n    {case:?}")),
    }
}

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("kv_append_8bit_gpu::every_kernel") else { return };
    let appends = |kernel: &&Kernel| matches!(kernel.variant, Variant::KvAppendCodes(_));
    let kernels: Vec<_> = gpu.kernels().filter(appends).map(|kernel| (kernel, ())).collect();
    let mut report = Report::default();
    report.run_each(&gpu, &kernels, |kernel, (), stream| {
        let exact = (0..400).map(|seed| check(seed * 100, seed % 4 == 3, kernel, stream));
        let garbage = (0..200).map(|seed| survives(seed * 100 + 7, kernel, stream));
        exact.chain(garbage).sum()
    });
    report.finish(&gpu, "kv_append_8bit_gpu");
}

#[test]
fn appends_within_attention() {
    let Some(gpu) = gpu("kv_append_8bit_gpu::appends_within_attention") else { return };
    for seed in 0..60 {
        check_with_attention(seed * 101, &gpu.stream).unwrap();
    }
}
