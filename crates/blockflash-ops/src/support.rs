use crate::attention::{self, AttentionProblem, BlockMaskSizes};
use crate::bsr_matmul::{self, BsrProblem};
use crate::bsr_sddmm::{self, BsrSddmmProblem};
use crate::{Error, Result};
use blockflash_safe::{CudaProperties, Device, Major};
use blockflash_sys::manifest;
use blockflash_sys::{DType, Row, Target};

/// One line of the support table: an operation, an element type and a range of sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SupportRow {
    /// `attention`, `bsr_matmul` or `bsr_sddmm`.
    pub op: &'static str,
    /// Element type of the inputs.
    pub dtype: DType,
    /// What the line is about: `head_dim 72..=96 by 8`, the same with `blocks of 64 × 64` of a
    /// block mask after a comma, `block 32`, the same with a `transposed A` or a
    /// `column-major B and C`; or `other head_dim`, `other block`, for which no kernel is made.
    pub size: String,
    /// Whether there are kernels for it; without, only the CPU runs it.
    pub on_gpus: bool,
    /// What runs, or why nothing does.
    pub status: Status,
}

/// What runs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// A precompiled kernel.
    Kernel {
        /// Its name, as Nsight shows it.
        symbol: String,
        /// What it is compiled for; PTX is compiled by the driver at first use.
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

/// What runs on a device: every operation, element type and size that some kernel is made for, and
/// what each would use here; and a line for all other sizes, which only the CPU runs. For attention
/// under a block mask it is the kernel for the smallest blocks and for twice as large ones; other
/// blocks may take another. For a BSR matmul it is the kernel for many columns; few columns may
/// take a narrower one. For a sampled product it is the kernel for the gradient of weights, a
/// column-major A and a row-major B; on Hopper other layouts may have their own.
pub fn support(device: &Device) -> Vec<SupportRow> {
    support_with(device.cuda_properties())
}

/// The same for a GPU that need not be there; `None` is the CPU.
pub fn support_with(gpu: Option<&CudaProperties>) -> Vec<SupportRow> {
    let mut table = Vec::new();
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let mut push =
            |op, size: String, selected: &dyn Fn(&CudaProperties) -> Result<&'static Row>| {
                let status = gpu.map_or(Status::Cpu, |gpu| status(selected(gpu)));
                let on_gpus = dtype != DType::F32 && !size.starts_with(OTHER);
                table.push(SupportRow { op, dtype, size, on_gpus, status });
            };
        for (size, head_dim) in head_dims() {
            let problem = AttentionProblem::dense(dtype, [1, 1, 1], [1, 1], head_dim as usize);
            push(attention::OP, size.clone(), &|gpu| attention::select(&problem, gpu));
            for block in [64, 128] {
                let sizes = BlockMaskSizes {
                    block_q: block,
                    block_kv: block,
                    batch: 1,
                    heads: 1,
                    packed_rows: None,
                };
                let problem = AttentionProblem { block_mask: Some(sizes), ..problem };
                let size = format!("{size}, blocks of {block} × {block}");
                push(attention::OP, size, &|gpu| attention::select(&problem, gpu));
            }
        }
        let problem = AttentionProblem::dense(dtype, [1, 1, 1], [1, 1], OTHER_HEAD_DIM);
        let size = format!("{OTHER} head_dim ({OTHER_HEAD_DIM})");
        push(attention::OP, size, &|gpu| attention::select(&problem, gpu));
        for block_size in block_sizes() {
            let block = block_size as usize;
            // As many columns as the widest tile of all: no waste speaks against it.
            let problem = BsrProblem::new(dtype, [block, 1 << 20, block], block, 1);
            push(bsr_matmul::OP, format!("block {block_size}"), &|gpu| {
                bsr_matmul::select(&problem, gpu)
            });
            for (layout, a_transposed, lines) in BSR_LAYOUTS {
                let problem = problem.lying(a_transposed, lines, lines);
                let size = format!("block {block_size}, {layout}");
                push(bsr_matmul::OP, size, &|gpu| bsr_matmul::select(&problem, gpu));
            }
        }
        let problem = BsrProblem::new(dtype, [OTHER_BLOCK, 1 << 20, OTHER_BLOCK], OTHER_BLOCK, 1);
        let size = format!("{OTHER} block ({OTHER_BLOCK})");
        push(bsr_matmul::OP, size.clone(), &|gpu| bsr_matmul::select(&problem, gpu));
        // Where no kernel is, the CPU computes, and a GPU says what is missing.
        for block_size in bsr_sddmm::block_sizes(manifest::rows()) {
            let block = block_size as usize;
            let layouts = [Major::Column, Major::Row];
            let problem = BsrSddmmProblem::new(dtype, [block; 3], block, 1, layouts);
            push(bsr_sddmm::OP, format!("block {block_size}"), &|gpu| {
                bsr_sddmm::select(&problem, gpu)
            });
        }
        let problem = BsrSddmmProblem::new(
            dtype,
            [OTHER_BLOCK; 3],
            OTHER_BLOCK,
            1,
            [Major::Column, Major::Row],
        );
        push(bsr_sddmm::OP, size, &|gpu| bsr_sddmm::select(&problem, gpu));
    }
    table
}

/// Sizes that stand for all those that no kernel is made for, and how their lines begin.
const OTHER: &str = "other";
const OTHER_HEAD_DIM: usize = 59;
const OTHER_BLOCK: usize = 24;

/// What not every kernel of the BSR matmul takes: Aᵀ, and columns of B and C, as dense times sparse
/// has them.
const BSR_LAYOUTS: [(&str, bool, Major); 3] = [
    ("transposed A", true, Major::Row),
    ("column-major B and C", false, Major::Column),
    ("transposed A, column-major B and C", true, Major::Column),
];

fn status(selected: Result<&'static Row>) -> Status {
    match selected {
        Ok(row) => {
            Status::Kernel { symbol: row.symbol(), target: row.target, image: row.image_name() }
        }
        Err(Error::Unsupported { what, .. }) => Status::Unsupported { reason: what },
        Err(error) => Status::Unsupported { reason: error.to_string() },
    }
}

/// The head_dim tiles of all attention rows, each as the range of head dimensions it is the
/// smallest for.
fn head_dims() -> Vec<(String, u32)> {
    let mut tiles: Vec<u32> =
        manifest::rows().iter().filter_map(Row::attention_tile).map(|tile| tile.head_dim).collect();
    tiles.sort_unstable();
    tiles.dedup();
    // Head dimensions are multiples of 8.
    let starts = std::iter::once(8).chain(tiles.iter().map(|tile| tile + 8)).collect::<Vec<_>>();
    starts
        .iter()
        .zip(&tiles)
        .map(|(start, &tile)| (format!("head_dim {start}..={tile} by 8"), tile))
        .collect()
}

/// The block sizes of all BSR rows.
fn block_sizes() -> Vec<u32> {
    let mut sizes: Vec<u32> =
        manifest::rows().iter().filter_map(Row::bsr_tile).map(|tile| tile.block_size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
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
                ("attention", "head_dim 72..=96 by 8, blocks of 64 × 64"),
                ("bsr_matmul", "block 64"),
                ("bsr_matmul", "block 16, transposed A, column-major B and C"),
                ("bsr_sddmm", "block 128"),
                ("attention", "other head_dim (59)"),
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
                        assert!(
                            symbol.contains(row.op.trim_end_matches("_fwd"))
                                && image.starts_with(&symbol)
                        );
                        assert!(row.dtype != DType::F32);
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

    /// What is said to have kernels has one somewhere.
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
        for (size, tile) in head_dims() {
            assert_eq!(size, format!("head_dim {next}..={tile} by 8"));
            next = tile + 8;
        }
        assert_eq!(next, 264);
    }
}
