//! Nanoseconds that a call keeps the host, on fabricated GPUs and without a launch: selection,
//! planning, and whole calls that have nothing to compute. Least time of many batches, since other
//! programs only ever add to it.
//!
//! `cargo run --release -p blockflash-ops --example host_cost`

use blockflash_ops::attention::{self, AttentionProblem};
use blockflash_ops::attention_decode::{self, AttentionDecodeProblem};
use blockflash_ops::bsr_matmul::{self, BsrProblem};
use blockflash_ops::bsr_sddmm::{self, BsrSddmmProblem};
use blockflash_ops::kv_cache::CacheSizes;
use blockflash_ops::{
    Attention, BsrMatmul, BsrMatrix, BsrSddmm, ComputeCapability, CudaProperties, DType, Device,
    HeadDims, Major, Mask, Result, Tensor,
};
use std::hint::black_box;
use std::time::Instant;

fn time<T>(what: &str, mut call: impl FnMut() -> T) {
    let mut best = f64::INFINITY;
    for _ in 0..400 {
        let start = Instant::now();
        for _ in 0..200 {
            black_box(call());
        }
        best = best.min(start.elapsed().as_secs_f64() / 200.0 * 1e9);
    }
    println!("{what:48} {best:6.0} ns");
}

fn gpu(major: u32, minor: u32, multiprocessors: u32, smem_kib: u32) -> CudaProperties {
    CudaProperties {
        ordinal: 0,
        name: "fabricated".into(),
        compute_capability: ComputeCapability::new(major, minor),
        multiprocessors,
        smem_per_block: smem_kib * 1024,
        smem_per_multiprocessor: (smem_kib + 1) * 1024,
        l2_bytes: 50 << 20,
        memory_bytes: 80 << 30,
        driver_version: 13000,
        clock_khz: 1_980_000,
        memory_clock_khz: 1_000_000,
        memory_bus_bits: 4096,
    }
}

fn main() -> Result<()> {
    let dtype = DType::BF16;
    for (name, gpu) in [("H200", gpu(9, 0, 132, 227)), ("sm_89", gpu(8, 9, 128, 99))] {
        let dense = AttentionProblem::dense(dtype, [4, 4096, 4096], [32, 8], 128);
        let causal = dense.with_lse().with_mask(Mask::causal());
        let small =
            AttentionProblem { head_dims: HeadDims::all(64), ..dense.with_mask(Mask::causal()) };
        for (case, p) in [("d128", dense), ("d128 causal lse", causal), ("d64 causal", small)] {
            time(&format!("{name} attention::select {case}"), || attention::select(&p, &gpu));
            let row = attention::select(&p, &gpu)?;
            time(&format!("{name} attention::plan {case}"), || attention::plan(row, &p, &gpu));
        }
        for (case, seqused_kv) in [("lengths on the host", false), ("on the device", true)] {
            let cache = CacheSizes::contiguous(dtype, [8, 5000], 8, 128);
            let p = AttentionDecodeProblem::of(CacheSizes { seqused_kv, ..cache }, 1, 32);
            let select = || attention_decode::select(&p, &gpu);
            time(&format!("{name} attention_decode::select {case}"), select);
            let row = select()?;
            let plan = || attention_decode::plan(row, &p, &gpu);
            time(&format!("{name} attention_decode::plan {case}"), plan);
        }
        for block in [16, 32, 64, 128] {
            let blocks = 4096 * 4096 / 10 / block / block;
            let p = BsrProblem::new(dtype, [4096; 3], block, blocks);
            time(&format!("{name} bsr_matmul::select b{block}"), || bsr_matmul::select(&p, &gpu));
            let p = BsrProblem { workspace: true, longest_row: Some(200), ..p };
            time(&format!("{name} bsr_matmul::select b{block} workspace"), || {
                bsr_matmul::select(&p, &gpu)
            });
            let row = bsr_matmul::select(&p, &gpu)?;
            time(&format!("{name} bsr_matmul::plan b{block}"), || bsr_matmul::plan(row, &p, &gpu));
            let majors = [Major::Column, Major::Row];
            let p = BsrSddmmProblem::new(dtype, [4096; 3], block, blocks, majors);
            time(&format!("{name} bsr_sddmm::select b{block}"), || bsr_sddmm::select(&p, &gpu));
            let row = bsr_sddmm::select(&p, &gpu)?;
            time(&format!("{name} bsr_sddmm::plan b{block}"), || bsr_sddmm::plan(row, &p, &gpu));
        }
    }

    // Nothing to compute: what is left is validation and the frame around it.
    let stream = Device::cpu().stream()?;
    let none = Tensor::zeros(&stream, DType::F32, &[0, 16, 2, 64])?;
    let mut o = Tensor::zeros(&stream, DType::F32, &[0, 16, 2, 64])?;
    let attention = Attention::new(none.view(), none.view(), none.view());
    time("Attention::forward_into", || attention.forward_into(o.view_mut(), None, &stream));
    let a = BsrMatrix::from_coo(64, 64, 16, DType::F32, &[])?;
    let b = Tensor::zeros(&stream, DType::F32, &[64, 0])?;
    let mut c = Tensor::zeros(&stream, DType::F32, &[64, 0])?;
    let product = BsrMatmul::new(&a, b.view());
    time("BsrMatmul::matmul_into", || product.matmul_into(c.view_mut(), &stream));
    let x = Tensor::zeros(&stream, DType::F32, &[64, 64])?;
    let mut values = Tensor::zeros(&stream, DType::F32, &[0, 16, 16])?;
    let sampled = BsrSddmm::new(&a, x.view(), x.view());
    time("BsrSddmm::sddmm_into", || sampled.sddmm_into(values.view_mut(), &stream));
    Ok(())
}
