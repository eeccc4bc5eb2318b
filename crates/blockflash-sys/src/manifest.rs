//! The table of kernels: every image that exists, with its tile sizes. Nothing else in the workspace writes a tile size.
//!
//! Where tiles differ between targets it is because of shared memory: sm_80 and sm_90 have 163 KB and more, every other GPU 99 KB.
//! Rows with equal [`Row::symbol`] are the same source with the same tiles for different targets.

use crate::{DType, Expect, Probe, Target};
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
    /// Dense attention forward.
    AttentionFwd(AttentionFwd),
    /// Block-sparse (BSR) matrix times dense matrix.
    BsrMatmul(BsrMatmul),
    /// No operation: one unit of the GPU at its highest rate, which kernels are held against.
    Probe(Probe),
}

/// Tiles of `attention_fwd_sm80.cu`: one block of threads computes `block_q` queries of one head against all keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionFwd {
    /// Element type of q, k, v and o.
    pub dtype: DType,
    /// Head dimension of the tile; smaller ones are padded with zeros on chip.
    pub head_dim: u32,
    /// Queries per block of threads.
    pub block_q: u32,
    /// Keys per step of the main loop.
    pub block_kv: u32,
    /// Warps per block; each owns `block_q / warps` query rows.
    pub warps: u32,
    /// Depth of the K ring and of the V ring in shared memory.
    pub stages: u32,
    /// Blocks per multiprocessor that the register allocation must allow.
    pub min_blocks: u32,
}

/// Tiles of `bsr_matmul_sm80.cu`: one block of threads computes one block row of A times `block_n` columns of B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrMatmul {
    /// Element type of A and B.
    pub dtype: DType,
    /// Rows and columns of a block of A.
    pub block_size: u32,
    /// Columns of C per block of threads.
    pub block_n: u32,
    /// Depth of one pipeline stage along K.
    pub block_k: u32,
    /// Warps along M and along N.
    pub warps_m: u32,
    /// Warps along N.
    pub warps_n: u32,
    /// Pipeline stages in shared memory.
    pub stages: u32,
    /// Blocks per multiprocessor that the register allocation must allow.
    pub min_blocks: u32,
}

impl AttentionFwd {
    /// Shared memory in bytes: the Q tile, and a ring of K tiles and of V tiles.
    pub const fn smem_bytes(&self) -> u32 {
        (self.block_q + 2 * self.stages * self.block_kv) * self.head_dim * self.dtype.size() as u32
    }
}

impl BsrMatmul {
    /// Shared memory in bytes: a ring of A and B tiles.
    pub const fn smem_bytes(&self) -> u32 {
        self.stages * (self.block_size + self.block_n) * self.block_k * self.dtype.size() as u32
    }
}

impl Row {
    /// Name of the source file in `kernels/`, without `.cu`.
    pub const fn source(&self) -> &'static str {
        match self.variant {
            Variant::AttentionFwd(_) => "attention_fwd_sm80",
            Variant::BsrMatmul(_) => "bsr_matmul_sm80",
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
            Variant::BsrMatmul(t) => t.warps_m * t.warps_n,
            Variant::Probe(_) => 8,
        }
    }

    /// Dynamic shared memory per block in bytes.
    pub const fn smem_bytes(&self) -> u32 {
        match self.variant {
            Variant::AttentionFwd(t) => t.smem_bytes(),
            Variant::BsrMatmul(t) => t.smem_bytes(),
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
            Variant::Probe(probe) => {
                number("VARIANT_PROBE", probe as u32);
                number("VARIANT_MIN_BLOCKS", probe.min_blocks());
            }
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
            Variant::BsrMatmul(_) => {
                &[Contains("HMMA"), Contains("LDGSTS"), Contains("LDSM"), Lacks("LDL"), Lacks("STL")]
            }
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
/// multiprocessor on GPUs with 100 KB of shared memory, so those take half the keys per step and run two.
const ATTENTION_FWD: &[(&[Target], AttentionFwd)] = &[
    (ALL, attention(64, 128, 64, 4, 1, 2)),
    (ALL, attention(96, 128, 64, 4, 1, 2)),
    (LARGE_SMEM, attention(128, 128, 64, 4, 1, 2)),
    (SMALL_SMEM, attention(128, 128, 32, 4, 1, 2)),
    (ALL, attention(192, 64, 64, 4, 1, 2)),
    (ALL, attention(256, 64, 64, 4, 1, 2)),
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

/// All rows. The order is the order of preference: the first row that accepts a problem and a GPU is taken.
pub fn rows() -> &'static [Row] {
    static ROWS: LazyLock<Vec<Row>> = LazyLock::new(|| {
        let mut rows = Vec::new();
        for target in Target::ALL {
            for dtype in [DType::F16, DType::BF16] {
                for &(_, tile) in ATTENTION_FWD.iter().filter(|(targets, _)| targets.contains(&target)) {
                    rows.push(Row { variant: Variant::AttentionFwd(AttentionFwd { dtype, ..tile }), target });
                }
                for &(_, tile) in BSR_MATMUL.iter().filter(|(targets, _)| targets.contains(&target)) {
                    rows.push(Row { variant: Variant::BsrMatmul(BsrMatmul { dtype, ..tile }), target });
                }
            }
            let probes = Probe::ALL.into_iter().filter(|probe| probe.targets().contains(&target));
            rows.extend(probes.map(|probe| Row { variant: Variant::Probe(probe), target }));
        }
        rows
    });
    &ROWS
}
