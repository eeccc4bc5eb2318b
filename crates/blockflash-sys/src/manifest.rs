//! The table of kernels: every image that exists, with its tile sizes. Nothing else in the
//! workspace writes a tile size.
//!
//! Where tiles differ between targets it is because of shared memory: sm_80 and sm_90 have 163 KB
//! and more, every other GPU 99 KB. Rows with equal [`Row::symbol`] are the same source with the
//! same tiles for different targets.

pub use crate::bsr_matmul_hopper::BsrMatmulHopper;
pub use crate::bsr_sddmm::{BsrSddmm, BsrSddmmHopper, BsrSddmmTile};
pub use crate::rows::rows;
pub use crate::tile::{AttentionFwd, AttentionFwdHopper, AttentionTile, BsrMatmul, BsrTile, Lse};

use crate::{BlockMaskKernel, Expect, Probe, Target};

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
    /// Attention forward, dense or under a block mask, with the instructions that every GPU from
    /// Ampere on has.
    AttentionFwd(AttentionFwd),
    /// Dense attention forward with those that only Hopper has.
    AttentionFwdHopper(AttentionFwdHopper),
    /// Block-sparse (BSR) matrix times dense matrix, with the instructions that every GPU from
    /// Ampere on has.
    BsrMatmul(BsrMatmul),
    /// The same for A as it is or transposed, and B and C by rows or columns, which is decided at
    /// run time.
    BsrMatmulAny(BsrMatmul),
    /// Block-sparse (BSR) matrix times dense matrix with those that only Hopper has.
    BsrMatmulHopper(BsrMatmulHopper),
    /// Product of dense matrices at the stored blocks of a block-sparse one, with the instructions
    /// that every GPU from Ampere on has.
    BsrSddmm(BsrSddmm),
    /// The same with those that only Hopper has.
    BsrSddmmHopper(BsrSddmmHopper),
    /// Block masks made on the GPU.
    BlockMask(BlockMaskKernel),
    /// No operation: one unit of the GPU at its highest rate, which kernels are held against.
    Probe(Probe),
}

impl Row {
    /// Name of the folder in `kernels/` that holds the source.
    pub const fn source(&self) -> &'static str {
        match self.variant {
            Variant::AttentionFwd(_) => "attention_fwd_sm80",
            Variant::AttentionFwdHopper(_) => "attention_fwd_sm90a",
            Variant::BsrMatmul(_) => "bsr_matmul_sm80",
            Variant::BsrMatmulAny(_) => "bsr_matmul_any_sm80",
            Variant::BsrMatmulHopper(t) => t.source(),
            Variant::BsrSddmm(_) => "bsr_sddmm_sm80",
            Variant::BsrSddmmHopper(_) => "bsr_sddmm_sm90a",
            Variant::BlockMask(kernel) => kernel.source(),
            Variant::Probe(probe) if probe.is_hopper() => "probe_sm90a",
            Variant::Probe(_) => "probe_sm80",
        }
    }

    /// Name of the `extern "C"` kernel: at once Nsight filter, test case and bench id. Equal for
    /// all targets of a variant.
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
                "blockflash_{}_{}_d{}_q{}_kv{}_s{}{}{}",
                self.source(),
                t.dtype,
                t.head_dim,
                t.block_q(),
                t.block_kv,
                t.stages,
                if t.heads > 1 { format!("_h{}", t.heads) } else { String::new() },
                if t.lse { "_lse" } else { "" }
            ),
            Variant::BsrMatmul(t) | Variant::BsrMatmulAny(t) => format!(
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
            Variant::BsrSddmm(t) => format!("blockflash_{}_{}", self.source(), t.name()),
            Variant::BsrSddmmHopper(t) => format!("blockflash_{}_{}", self.source(), t.name()),
            Variant::BlockMask(kernel) => format!("blockflash_{}_{}", self.source(), kernel.name()),
            Variant::Probe(probe) => format!("blockflash_{}_{}", self.source(), probe.name()),
        }
    }

    /// Name of the image file in `prebuilt/`, without `.zst`.
    pub fn image_name(&self) -> String {
        let extension = if self.target.is_ptx() { "ptx" } else { "cubin" };
        format!("{}.{}.{extension}", self.symbol(), self.target)
    }

    /// Blocks per cluster in x, y and z, for kernels with clusters.
    pub const fn cluster(&self) -> Option<[u32; 3]> {
        match self.variant {
            Variant::BsrMatmulHopper(t) if t.cluster > 1 => Some([t.cluster, 1, 1]),
            _ => None,
        }
    }

    /// Threads per block.
    pub const fn threads(&self) -> u32 {
        32 * match self.variant {
            Variant::AttentionFwd(t) => t.warps,
            Variant::AttentionFwdHopper(t) => t.warps(),
            Variant::BsrMatmul(t) | Variant::BsrMatmulAny(t) => t.warps_m * t.warps_n,
            Variant::BsrMatmulHopper(t) => t.warps(),
            Variant::BsrSddmm(t) => t.warps_m * t.warps_n,
            Variant::BsrSddmmHopper(t) => t.warps(),
            Variant::BlockMask(kernel) => kernel.warps(),
            Variant::Probe(_) => 8,
        }
    }

    /// Dynamic shared memory per block in bytes.
    pub const fn smem_bytes(&self) -> u32 {
        match self.variant {
            Variant::AttentionFwd(t) => t.smem_bytes(),
            Variant::AttentionFwdHopper(t) => t.smem_bytes(),
            Variant::BsrMatmul(t) | Variant::BsrMatmulAny(t) => t.smem_bytes(),
            Variant::BsrMatmulHopper(t) => t.smem_bytes(),
            Variant::BsrSddmm(t) => t.smem_bytes(),
            Variant::BsrSddmmHopper(t) => t.smem_bytes(),
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
                number("VARIANT_HEADS", t.heads);
                number("VARIANT_STAGES", t.stages);
                number("VARIANT_Q_STAGES", t.q_stages);
                number("VARIANT_Q_IN_REGISTERS", t.q_in_registers.into());
                number("VARIANT_LSE", t.lse.into());
                number("VARIANT_MIN_BLOCKS", t.blocks_per_multiprocessor);
            }
            Variant::BsrMatmul(t) | Variant::BsrMatmulAny(t) => {
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
            Variant::BsrSddmm(t) => t.macros(number),
            Variant::BsrSddmmHopper(t) => t.macros(number),
            Variant::BlockMask(kernel) => kernel.macros(number),
            Variant::Probe(probe) => probe.macros(number),
        }
        macros
    }

    /// Why this row may spill registers to local memory; `None` means that it must not, and the
    /// build checks it.
    pub const fn allows_spills(&self) -> Option<&'static str> {
        None
    }

    /// What its machine code must contain and lack; `cargo xtask sass --check` looks. PTX rows are
    /// not looked at.
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
            Variant::BsrMatmul(_) | Variant::BsrMatmulAny(_) | Variant::BsrSddmm(_) => &[
                Contains("HMMA"),
                Contains("LDGSTS"),
                Contains("LDSM"),
                Lacks("LDL"),
                Lacks("STL"),
            ],
            Variant::BsrMatmulHopper(t) => t.expects(),
            Variant::BsrSddmmHopper(t) => t.expects(),
            Variant::BlockMask(kernel) => kernel.expects(),
            Variant::Probe(probe) => probe.expects(),
        }
    }
}
