use crate::index_choice::TopKProblem;
use crate::quantize::QuantizeProblem;
use crate::selection::{Problem, select};
use crate::{
    Error, Result, attention, attention_bwd, attention_decode, attention_index, bsr_matmul,
    bsr_sddmm, index_choice, page_choice, quantize,
};
use blockflash_safe::{CudaProperties, Device};
use blockflash_sys::{DType, Kernel, Target};

/// One line of the support table: an operation, an element type and a range of sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SupportRow {
    /// `attention`, `attention_bwd`, `attention_decode`, `attention_index`, `page_summaries`,
    /// `page_choice`, `index_scores`, `top_k`, `quantize`, `bsr_matmul` or `bsr_sddmm`.
    pub op: &'static str,
    /// Element type of the inputs.
    pub dtype: DType,
    /// The sizes: `head_dim 72..=96 by 8`, optionally followed by `blocks of 64 × 64` of a block
    /// mask after a comma; `head_dim 576 with values in the first 512 columns of the keys` of a
    /// cache; `block 32`, optionally with a `transposed A` or a `column-major B and
    /// C`; or `other head_dim` and `other block`, for which no kernel is made.
    pub size: String,
    /// Whether there are kernels for it; otherwise only the CPU runs it.
    pub on_gpus: bool,
    /// The backend, or why there is none.
    pub status: Status,
}

/// The backend of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// A precompiled kernel.
    Kernel {
        /// Its name, as Nsight shows it.
        symbol: String,
        /// The target it is compiled for; the driver compiles PTX at first use.
        target: Target,
        /// The image that holds it.
        image: String,
    },
    /// The CPU backend.
    Cpu,
    /// Nothing.
    Unsupported {
        /// What is missing.
        reason: String,
    },
}

/// The support of a device: every operation, element type and size for which some kernel is made,
/// with the kernel that would be used here, and a line for all other sizes, which only the CPU
/// runs. For attention under a block mask the line shows the kernel for the smallest blocks and for
/// twice as large ones; other blocks may take another kernel. For a BSR matmul it shows the kernel
/// for many columns; few columns may take a narrower one. For a sampled product it shows the kernel
/// for the gradient of weights, a column-major A and a row-major B; on Hopper other layouts may
/// have their own. For attention by an index it shows the kernel for one query; many neighbouring
/// ones may have another.
pub fn support(device: &Device) -> Vec<SupportRow> {
    support_with(device.cuda_properties())
}

/// Like [`support()`], for a GPU that need not be present; `None` is the CPU.
pub fn support_with(gpu: Option<&CudaProperties>) -> Vec<SupportRow> {
    let of_codes = rows(DType::E4M3, attention::support(DType::E4M3), gpu);
    [DType::F16, DType::BF16, DType::F32]
        .into_iter()
        .flat_map(|dtype| {
            [
                rows(dtype, attention::support(dtype), gpu),
                rows(dtype, attention_bwd::support(dtype), gpu),
                rows(dtype, attention_decode::support(dtype), gpu),
                rows(dtype, attention_index::support(dtype), gpu),
                rows(dtype, page_choice::support_of_summaries(dtype), gpu),
                rows(dtype, page_choice::support_of_choice(dtype), gpu),
                rows(dtype, index_choice::support_of_scores(dtype), gpu),
                rows(dtype, quantize::support(dtype), gpu),
                rows(dtype, bsr_matmul::support(dtype), gpu),
                rows(dtype, bsr_sddmm::support(dtype), gpu),
            ]
        })
        .flatten()
        .chain(rows(DType::F32, index_choice::support_of_top_k(), gpu))
        .chain(of_codes)
        .collect()
}

/// The lines of an operation. Where there is no kernel, the CPU computes, and a GPU line says why.
fn rows<P: Problem>(
    dtype: DType,
    lines: Vec<(String, P)>,
    gpu: Option<&CudaProperties>,
) -> Vec<SupportRow> {
    let row = |(size, problem): (String, P)| {
        let status = gpu.map_or(Status::Cpu, |gpu| status(select(&problem, gpu)));
        let has_kernels =
            dtype != DType::F32 || [QuantizeProblem::OP, TopKProblem::OP].contains(&P::OP);
        let on_gpus = has_kernels && !size.starts_with("other");
        SupportRow { op: P::OP, dtype, size, on_gpus, status }
    };
    lines.into_iter().map(row).collect()
}

fn status(selected: Result<&'static Kernel>) -> Status {
    match selected {
        Ok(kernel) => Status::Kernel {
            symbol: kernel.symbol(),
            target: kernel.target,
            image: kernel.image_name(),
        },
        Err(Error::Unsupported { what, .. }) => Status::Unsupported { reason: what },
        Err(error) => Status::Unsupported { reason: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{gpu, gpus};

    #[test]
    fn the_cpu_runs_everything() {
        let table = support(&Device::cpu());
        assert!(table.iter().all(|row| row.status == Status::Cpu));
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            for (op, size) in [
                ("attention", "head_dim 8..=64 by 8"),
                ("attention", "head_dim 200..=256 by 8"),
                ("attention", "head_dim 264..=512 by 8"),
                ("attention", "head_dim 72..=96 by 8, blocks of 64 × 64"),
                ("bsr_matmul", "block 64"),
                ("bsr_matmul", "block 16, transposed A, column-major B and C"),
                ("bsr_sddmm", "block 128"),
                ("attention", "other head_dim (59)"),
                ("attention_bwd", "head_dim 72..=96 by 8, blocks of 64 × 64"),
                ("attention_bwd", "other head_dim (59)"),
                ("attention_decode", "head_dim 136..=256 by 8"),
                ("attention_decode", "head_dim 264..=512 by 8"),
                ("attention_decode", "other head_dim (59)"),
                ("attention_index", "head_dim 136..=256 by 8"),
                ("attention_index", "other head_dim (59)"),
                ("page_summaries", "head_dim 8..=256 by 8"),
                ("page_choice", "other head_dim (59)"),
                ("index_scores", "head_dim 8..=256 by 8"),
                ("index_scores", "other head_dim (59)"),
                ("quantize", "head_dim 8..=256 by 8"),
                ("bsr_matmul", "other block (24)"),
                ("bsr_sddmm", "other block (24)"),
            ] {
                let found = table
                    .iter()
                    .filter(|row| (row.op, row.dtype, row.size.as_str()) == (op, dtype, size));
                assert_eq!(found.count(), 1, "{op} {dtype} {size}");
            }
        }
    }

    #[test]
    fn gpus_run_kernels_or_say_why_not() {
        for gpu in gpus() {
            for row in support_with(Some(&gpu)) {
                let runs = matches!(row.status, Status::Kernel { .. });
                assert!(row.on_gpus || !runs, "{row:?}");
                match row.status {
                    Status::Kernel { symbol, target, image } => {
                        assert!(target.runs_on(gpu.compute_capability));
                        let of_latent = ["columns of the keys", "latent rows of codes"];
                        let is_latent = of_latent.iter().any(|of| row.size.ends_with(of));
                        let op = match is_latent {
                            true => "attention_latent",
                            false if symbol.ends_with("_cache") => "attention_fwd",
                            false if symbol.ends_with("_index") => "attention_decode",
                            false => row.op,
                        };
                        assert!(symbol.contains(op.trim_end_matches("_fwd")), "{symbol}");
                        assert!(image.starts_with(&symbol));
                        assert!(row.dtype != DType::F32 || ["quantize", "top_k"].contains(&row.op));
                    }
                    Status::Cpu => panic!("a GPU is no CPU"),
                    Status::Unsupported { reason } => assert!(!reason.is_empty()),
                }
            }
        }
        assert!(
            support_with(Some(&gpu(7, 5)))
                .iter()
                .all(|row| matches!(row.status, Status::Unsupported { .. }))
        );
    }

    /// Every size that is listed as having kernels has one on some GPU.
    #[test]
    fn sizes_that_have_kernels_run_on_some_gpu() {
        let tables: Vec<_> = gpus().iter().map(|gpu| support_with(Some(gpu))).collect();
        for (at, row) in support_with(None).iter().enumerate() {
            let some = tables.iter().any(|table| matches!(table[at].status, Status::Kernel { .. }));
            assert_eq!(row.on_gpus, some, "{row:?}");
        }
    }

    #[test]
    fn a_size_between_says_what_would_run() {
        let table = support_with(Some(&gpu(9, 0)));
        let row = table.iter().find(|row| row.size.starts_with("other head_dim")).unwrap();
        let Status::Unsupported { reason } = &row.status else { panic!("{row:?}") };
        assert!(reason.contains("zero-padded to 64"), "{reason}");
    }

    #[test]
    fn ranges_cover_every_head_dim_once() {
        let mut next = 8;
        let ranges = attention::support(DType::F16);
        for (size, _) in ranges.iter().filter(|(size, _)| size.ends_with("by 8")) {
            let tile: usize = size
                .strip_prefix(&format!("head_dim {next}..="))
                .and_then(|rest| rest.strip_suffix(" by 8")?.parse().ok())
                .unwrap_or_else(|| panic!("{size} does not start at {next}"));
            next = tile + 8;
        }
        assert_eq!(next, 520);
    }
}
