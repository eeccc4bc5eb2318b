//! The table of kernels: every image that exists, with its tile sizes. Nothing else in the workspace writes a tile size.
//! [`rows`] are those to choose from.
//!
//! Where tiles differ between targets it is because of shared memory: sm_80 and sm_90 have 163 KB and more, every other GPU 99 KB.
//! Rows with equal [`Row::symbol`] are the same source with the same tiles for different targets.

pub use crate::bsr_matmul_hopper::BsrMatmulHopper;
pub use crate::release::{released_rows, rows, trial_rows};
pub use crate::tile::{AttentionFwd, AttentionFwdHopper, AttentionTile, BsrMatmul, BsrTile};

use crate::{BlockMaskKernel, DType, Expect, Probe, Target};
use std::sync::LazyLock;

/// One kernel image: a variant compiled for a target.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    /// What is computed, and the tiles it is computed with.
    pub variant: Variant,
    /// What it is compiled for.
    pub target: Target,
}

/// The operation of a row with its compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// Attention forward, dense or under a block mask, with the instructions that every GPU from Ampere on has.
    AttentionFwd(AttentionFwd),
    /// Dense attention forward with those that only Hopper has.
    AttentionFwdHopper(AttentionFwdHopper),
    /// Block-sparse (BSR) matrix times dense matrix, with the instructions that every GPU from Ampere on has.
    BsrMatmul(BsrMatmul),
    /// Block-sparse (BSR) matrix times dense matrix with those that only Hopper has.
    BsrMatmulHopper(BsrMatmulHopper),
    /// Block masks made on the GPU.
    BlockMask(BlockMaskKernel),
    /// No operation: one unit of the GPU at its highest rate, which kernels are held against.
    Probe(Probe),
}

impl Row {
    /// Name of the source file in `kernels/`, without `.cu`.
    pub const fn source(&self) -> &'static str {
        match self.variant {
            Variant::AttentionFwd(_) => "attention_fwd_sm80",
            Variant::AttentionFwdHopper(_) => "attention_fwd_sm90a",
            Variant::BsrMatmul(_) => "bsr_matmul_sm80",
            Variant::BsrMatmulHopper(_) => "bsr_matmul_sm90a",
            Variant::BlockMask(kernel) => kernel.source(),
            Variant::Probe(probe) if probe.is_hopper() => "probe_sm90a",
            Variant::Probe(_) => "probe_sm80",
        }
    }

    /// Name of the `extern "C"` kernel: at once Nsight filter, test case and bench id. Equal for all targets of a variant.
    pub fn symbol(&self) -> String {
        match self.variant {
            Variant::AttentionFwd(t) => format!(
                "blockflash_{}_{}_d{}_q{}_kv{}_w{}_s{}",
                self.source(),
                t.dtype,
                t.head_dim,
                t.block_q,
                t.block_kv,
                t.warps,
                t.stages
            ),
            Variant::AttentionFwdHopper(t) => format!(
                "blockflash_{}_{}_d{}_q{}_kv{}_s{}",
                self.source(),
                t.dtype,
                t.head_dim,
                t.block_q(),
                t.block_kv,
                t.stages
            ),
            Variant::BsrMatmul(t) => format!(
                "blockflash_{}_{}_b{}_n{}_k{}_w{}x{}_s{}",
                self.source(),
                t.dtype,
                t.block_size,
                t.block_n,
                t.block_k,
                t.warps_m,
                t.warps_n,
                t.stages
            ),
            Variant::BsrMatmulHopper(t) => format!("blockflash_{}_{}", self.source(), t.name()),
            Variant::BlockMask(kernel) => format!("blockflash_{}_{}", self.source(), kernel.name()),
            Variant::Probe(probe) => format!("blockflash_{}_{}", self.source(), probe.name()),
        }
    }

    /// Name of the image file in `prebuilt/`, without `.zst`.
    pub fn image_name(&self) -> String {
        let extension = if self.target.is_ptx() { "ptx" } else { "cubin" };
        format!("{}.{}.{extension}", self.symbol(), self.target)
    }

    /// Threads per block.
    pub const fn threads(&self) -> u32 {
        32 * match self.variant {
            Variant::AttentionFwd(t) => t.warps,
            Variant::AttentionFwdHopper(t) => t.warps(),
            Variant::BsrMatmul(t) => t.warps_m * t.warps_n,
            Variant::BsrMatmulHopper(t) => t.warps(),
            Variant::BlockMask(kernel) => kernel.warps(),
            Variant::Probe(_) => 8,
        }
    }

    /// Dynamic shared memory per block in bytes.
    pub const fn smem_bytes(&self) -> u32 {
        match self.variant {
            Variant::AttentionFwd(t) => t.smem_bytes(),
            Variant::AttentionFwdHopper(t) => t.smem_bytes(),
            Variant::BsrMatmul(t) => t.smem_bytes(),
            Variant::BsrMatmulHopper(t) => t.smem_bytes(),
            Variant::BlockMask(_) => 0,
            Variant::Probe(probe) => probe.smem_bytes(),
        }
    }

    /// Preprocessor definitions of this row; `config.cuh` is their only reader.
    pub fn macros(&self) -> Vec<(&'static str, String)> {
        let mut macros = vec![
            ("VARIANT_SYMBOL", self.symbol()),
            ("VARIANT_THREADS", self.threads().to_string()),
            ("VARIANT_SMEM_BYTES", self.smem_bytes().to_string()),
        ];
        let mut number = |name, value: u32| macros.push((name, value.to_string()));
        match self.variant {
            Variant::AttentionFwd(t) => {
                number("VARIANT_DTYPE", t.dtype as u32);
                number("VARIANT_HEAD_DIM", t.head_dim);
                number("VARIANT_BLOCK_Q", t.block_q);
                number("VARIANT_BLOCK_KV", t.block_kv);
                number("VARIANT_WARPS", t.warps);
                number("VARIANT_STAGES", t.stages);
                number("VARIANT_MIN_BLOCKS", t.min_blocks);
            }
            Variant::AttentionFwdHopper(t) => {
                number("VARIANT_DTYPE", t.dtype as u32);
                number("VARIANT_HEAD_DIM", t.head_dim);
                number("VARIANT_BLOCK_KV", t.block_kv);
                number("VARIANT_WARPGROUPS", t.warpgroups);
                number("VARIANT_STAGES", t.stages);
                number("VARIANT_Q_STAGES", t.q_stages);
                number("VARIANT_Q_IN_REGISTERS", t.q_in_registers.into());
                number("VARIANT_MIN_BLOCKS", t.blocks_per_multiprocessor);
            }
            Variant::BsrMatmul(t) => {
                number("VARIANT_DTYPE", t.dtype as u32);
                number("VARIANT_BLOCK_SIZE", t.block_size);
                number("VARIANT_BLOCK_N", t.block_n);
                number("VARIANT_BLOCK_K", t.block_k);
                number("VARIANT_WARPS_M", t.warps_m);
                number("VARIANT_WARPS_N", t.warps_n);
                number("VARIANT_STAGES", t.stages);
                number("VARIANT_MIN_BLOCKS", t.min_blocks);
            }
            Variant::BsrMatmulHopper(t) => t.macros(number),
            Variant::BlockMask(kernel) => kernel.macros(number),
            Variant::Probe(probe) => probe.macros(number),
        }
        macros
    }

    /// Why this row may spill registers to local memory; `None` means that it must not, and the build checks it.
    pub const fn allows_spills(&self) -> Option<&'static str> {
        None
    }

    /// What its machine code must contain and lack; `cargo xtask sass --check` looks. PTX rows are not looked at.
    pub const fn expects(&self) -> &'static [Expect] {
        use Expect::{Contains, Lacks};
        match self.variant {
            Variant::AttentionFwd(_) => &[
                Contains("HMMA"),
                Contains("LDGSTS"),
                Contains("LDSM"),
                Contains("MUFU"),
                Lacks("LDL"),
                Lacks("STL"),
            ],
            Variant::AttentionFwdHopper(_) => &[
                Contains("HGMMA"),
                Contains("UTMALDG"),
                Contains("MUFU"),
                Contains("VIMNMX3"),
                Contains("USETMAXREG"),
                Lacks("LDL"),
                Lacks("STL"),
            ],
            Variant::BsrMatmul(_) => {
                &[Contains("HMMA"), Contains("LDGSTS"), Contains("LDSM"), Lacks("LDL"), Lacks("STL")]
            }
            Variant::BsrMatmulHopper(_) => BsrMatmulHopper::expects(),
            Variant::BlockMask(kernel) => kernel.expects(),
            Variant::Probe(probe) => probe.expects(),
        }
    }
}

/// Every portable target: the tile fits into 99 KB of shared memory.
const ALL: &[Target] = &[Target::Sm90, Target::Sm89, Target::Sm80, Target::Sm120, Target::Ptx80];
/// GPUs with at least 163 KB of shared memory per block.
const LARGE_SMEM: &[Target] = &[Target::Sm90, Target::Sm80];
/// GPUs with 99 KB of shared memory per block, and whatever is not known yet.
const SMALL_SMEM: &[Target] = &[Target::Sm89, Target::Sm120, Target::Ptx80];

const fn attention(
    head_dim: u32,
    block_q: u32,
    block_kv: u32,
    warps: u32,
    stages: u32,
    min_blocks: u32,
) -> AttentionFwd {
    AttentionFwd { dtype: DType::F16, head_dim, block_q, block_kv, warps, stages, min_blocks }
}

/// Attention tiles by head dimension: 32 query rows per warp halve the shared-memory reads of K and V where the accumulators fit
/// into registers (head_dim ≤ 128), else 16. At 128 the tile that is fastest on Hopper leaves room for one block per
/// multiprocessor on GPUs with 100 KB of shared memory, so those take half the keys per step and run two. The narrower tiles of 64
/// and 128 are for block masks with 64 queries per block: dense problems take the first of a head dimension.
const ATTENTION_FWD: &[(&[Target], AttentionFwd)] = &[
    (ALL, attention(64, 128, 64, 4, 1, 2)),
    (ALL, attention(64, 64, 64, 4, 1, 2)),
    (ALL, attention(96, 128, 64, 4, 1, 2)),
    (LARGE_SMEM, attention(128, 128, 64, 4, 1, 2)),
    (SMALL_SMEM, attention(128, 128, 32, 4, 1, 2)),
    (ALL, attention(128, 64, 64, 4, 1, 2)),
    (ALL, attention(192, 64, 64, 4, 1, 2)),
    (ALL, attention(256, 64, 64, 4, 1, 2)),
];

const fn hopper(
    head_dim: u32,
    block_kv: u32,
    warpgroups: u32,
    [stages, q_stages]: [u32; 2],
    q_in_registers: bool,
    blocks_per_multiprocessor: u32,
    step_cost: u32,
) -> AttentionFwdHopper {
    let dtype = DType::F16;
    AttentionFwdHopper {
        dtype,
        head_dim,
        block_kv,
        warpgroups,
        stages,
        q_stages,
        q_in_registers,
        blocks_per_multiprocessor,
        step_cost,
    }
}

/// Attention tiles of Hopper by head dimension. Three warpgroups where registers allow it (outputs, scores and probabilities
/// take at most 132 of 160 per thread); with two or one, Q is in registers where some are free. Narrower blocks are for few
/// queries: a grid that does not fill the multiprocessors costs more than they do. Those with 64 keys are for block masks; of the ones with
/// 64 queries as well two blocks share a multiprocessor, as warpgroups with lists of their own cannot share keys. At 256 they are also
/// the faster ones without: 80 keys, as many as fit, straddle the diagonal of a causal mask.
const ATTENTION_FWD_HOPPER: &[AttentionFwdHopper] = &[
    hopper(64, 128, 3, [2, 2], false, 1, 100),
    hopper(64, 128, 2, [2, 1], true, 1, 78),
    hopper(64, 128, 1, [2, 1], true, 1, 57),
    hopper(64, 64, 2, [4, 1], true, 1, 87),
    hopper(64, 64, 1, [4, 1], true, 2, 85),
    hopper(96, 128, 2, [2, 1], true, 1, 100),
    hopper(128, 128, 2, [2, 1], true, 1, 100),
    hopper(128, 128, 1, [2, 1], true, 1, 69),
    hopper(128, 64, 2, [3, 1], true, 1, 110),
    hopper(128, 64, 1, [2, 1], true, 2, 118),
    hopper(192, 80, 2, [2, 1], false, 1, 100),
    hopper(256, 64, 2, [2, 1], false, 1, 100),
    hopper(256, 64, 1, [2, 1], false, 1, 70),
];

const fn bsr(
    block_size: u32,
    [block_n, block_k]: [u32; 2],
    [warps_m, warps_n]: [u32; 2],
    stages: u32,
    min_blocks: u32,
) -> BsrMatmul {
    BsrMatmul { dtype: DType::F16, block_size, block_n, block_k, warps_m, warps_n, stages, min_blocks }
}

/// BSR tiles by block size: a wide one, and a narrow one for few columns.
const BSR_MATMUL: &[(&[Target], BsrMatmul)] = &[
    (ALL, bsr(16, [256, 32], [1, 4], 3, 4)),
    (ALL, bsr(16, [64, 64], [1, 2], 4, 4)),
    (ALL, bsr(32, [256, 32], [1, 4], 3, 4)),
    (ALL, bsr(32, [64, 64], [1, 2], 4, 4)),
    (ALL, bsr(64, [128, 64], [2, 2], 2, 4)),
    (ALL, bsr(64, [64, 64], [2, 2], 3, 4)),
    (ALL, bsr(128, [128, 64], [2, 2], 3, 2)),
    (ALL, bsr(128, [64, 64], [2, 2], 3, 3)),
];

const fn bsr_hopper(block_size: u32, block_rows: u32, block_n: u32, stages: u32) -> BsrMatmulHopper {
    BsrMatmulHopper { dtype: DType::F16, block_size, block_rows, block_n, stages }
}

/// BSR tiles of Hopper by block size: as many accumulators as two warpgroups have, and fewer for few columns. What flows into shared memory
/// binds all of them: blocks of 64 take the more columns or, in dense patterns, two block rows that share B. Stages are as many as fit.
const BSR_MATMUL_HOPPER: &[BsrMatmulHopper] = &[
    bsr_hopper(64, 1, 512, 3),
    bsr_hopper(64, 2, 256, 4),
    bsr_hopper(64, 1, 256, 5),
    bsr_hopper(64, 1, 128, 8),
    bsr_hopper(128, 1, 256, 4),
    bsr_hopper(128, 1, 128, 6),
    bsr_hopper(128, 1, 64, 8),
];

/// All rows, released and on trial, the preferred targets first. Of rows that suit a problem equally well the first is taken.
pub fn all_rows() -> &'static [Row] {
    static ROWS: LazyLock<Vec<Row>> = LazyLock::new(|| {
        let mut rows = Vec::new();
        for target in Target::ALL {
            let mut push = |variant| rows.push(Row { variant, target });
            for dtype in [DType::F16, DType::BF16] {
                for &tile in ATTENTION_FWD_HOPPER.iter().filter(|_| target == Target::Sm90a) {
                    push(Variant::AttentionFwdHopper(AttentionFwdHopper { dtype, ..tile }));
                }
                for &(_, tile) in ATTENTION_FWD.iter().filter(|(targets, _)| targets.contains(&target)) {
                    push(Variant::AttentionFwd(AttentionFwd { dtype, ..tile }));
                }
                for &tile in BSR_MATMUL_HOPPER.iter().filter(|_| target == Target::Sm90a) {
                    push(Variant::BsrMatmulHopper(BsrMatmulHopper { dtype, ..tile }));
                }
                for &(_, tile) in BSR_MATMUL.iter().filter(|(targets, _)| targets.contains(&target)) {
                    push(Variant::BsrMatmul(BsrMatmul { dtype, ..tile }));
                }
            }
            let kernels = BlockMaskKernel::ALL.into_iter().filter(|_| ALL.contains(&target));
            kernels.for_each(|kernel| push(Variant::BlockMask(kernel)));
            let probes = Probe::ALL.into_iter().filter(|probe| probe.targets().contains(&target));
            probes.for_each(|probe| push(Variant::Probe(probe)));
        }
        rows
    });
    &ROWS
}
