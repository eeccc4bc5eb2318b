//! The compile-time parameters of the kernels, and what follows from them.

use crate::manifest::Variant;
use crate::{DType, Row};

/// What every attention kernel has: one block of threads computes `block_q` queries of so many
/// heads, `block_kv` keys at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionTile {
    /// Element type of q, k, v and o.
    pub dtype: DType,
    /// Largest head dimension.
    pub head_dim: u32,
    /// Queries per block of threads.
    pub block_q: u32,
    /// Keys per step of the main loop.
    pub block_kv: u32,
    /// Heads of q per block of threads; they share keys and the block mask.
    pub heads: u32,
    /// When it computes the log-sum-exp.
    pub lse: Lse,
}

/// When an attention kernel computes the log-sum-exp of each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lse {
    /// Where the launch asks for it.
    AsAsked,
    /// In every launch, which has to ask for it.
    Always,
    /// In no launch.
    Never,
}

impl Lse {
    /// Whether such a kernel suits a launch that asks for the log-sum-exp or does not.
    pub const fn suits(self, asked: bool) -> bool {
        match self {
            Lse::AsAsked => true,
            Lse::Always => asked,
            Lse::Never => !asked,
        }
    }
}

/// Tiles of `attention_fwd_sm80.cu`: one block of threads computes `block_q` queries of one head
/// against all keys.
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

/// Tiles of `attention_fwd_sm90a.cu`: blocks of threads that stay, one to three per multiprocessor,
/// take tile after tile, each `block_q` queries of `heads` heads against all keys. One warpgroup
/// copies, the others compute 64 queries of one head each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionFwdHopper {
    /// Element type of q, k, v and o.
    pub dtype: DType,
    /// Head dimension of the tile; smaller ones are padded with zeros on chip.
    pub head_dim: u32,
    /// Keys per step of the main loop.
    pub block_kv: u32,
    /// Warpgroups that compute.
    pub warpgroups: u32,
    /// Heads of q that share the keys of a tile: 1, or one per warpgroup.
    pub heads: u32,
    /// Depth of the K ring and of the V ring in shared memory.
    pub stages: u32,
    /// Q tiles in shared memory per warpgroup.
    pub q_stages: u32,
    /// Whether Q is multiplied from registers.
    pub q_in_registers: bool,
    /// Blocks of threads that share a multiprocessor.
    pub blocks_per_multiprocessor: u32,
    /// Whether it computes the log-sum-exp, which takes a second sum of each row, of the unrounded
    /// probabilities. It has kernels of its own, so that nobody pays for it who does not ask.
    pub lse: bool,
    /// Nanoseconds on an H200 of a key tile, where all blocks of a multiprocessor are busy, and of
    /// the change from one tile of queries to the next. Selection compares them.
    pub cost_ns: [u32; 2],
}

/// What every BSR kernel has: one block of threads computes `block_rows` block rows of A times
/// `block_n` columns of B, `block_k` of the depth at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrTile {
    /// Element type of A and B.
    pub dtype: DType,
    /// Rows and columns of a block of A.
    pub block_size: u32,
    /// Block rows per tile.
    pub block_rows: u32,
    /// Columns of C per tile.
    pub block_n: u32,
    /// Depth of one pipeline stage along K.
    pub block_k: u32,
    /// Blocks of threads that are launched together, with neighbouring columns of C.
    pub cluster: u32,
    /// Whether A is multiplied transposed.
    pub a_transposed: bool,
    /// Whether columns of B are contiguous instead of rows.
    pub b_column_major: bool,
}

impl BsrTile {
    /// Tiles along so many columns of C: those of whole clusters, so that some may have no columns.
    pub const fn tiles_n(&self, n: u64) -> u64 {
        n.div_ceil((self.cluster * self.block_n) as u64) * self.cluster as u64
    }
}

/// Tiles of `bsr_matmul_sm80.cu` and `bsr_matmul_any_sm80.cu`: one block of threads computes one
/// block row of A times `block_n` columns of B.
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

impl Row {
    /// What the attention kernels share; `None` for the others.
    pub const fn attention_tile(&self) -> Option<AttentionTile> {
        match self.variant {
            Variant::AttentionFwd(t) => Some(t.tile()),
            Variant::AttentionFwdHopper(t) => Some(t.tile()),
            Variant::BsrMatmul(_)
            | Variant::BsrMatmulAny(_)
            | Variant::BsrMatmulHopper(_)
            | Variant::BsrSddmm(_)
            | Variant::BsrSddmmHopper(_)
            | Variant::BlockMask(_)
            | Variant::Probe(_) => None,
        }
    }

    /// What the BSR kernels share; `None` for the others. That of a kernel that [takes any
    /// layout](Row::takes_any_layout) is as for A as it is and rows of B.
    pub const fn bsr_tile(&self) -> Option<BsrTile> {
        match self.variant {
            Variant::BsrMatmul(t) | Variant::BsrMatmulAny(t) => Some(t.tile()),
            Variant::BsrMatmulHopper(t) => Some(t.tile()),
            Variant::AttentionFwd(_)
            | Variant::AttentionFwdHopper(_)
            | Variant::BsrSddmm(_)
            | Variant::BsrSddmmHopper(_)
            | Variant::BlockMask(_)
            | Variant::Probe(_) => None,
        }
    }

    /// Whether a BSR kernel takes A as it is and transposed, and B and C by rows and columns.
    pub const fn takes_any_layout(&self) -> bool {
        matches!(self.variant, Variant::BsrMatmulAny(_))
    }
}

impl AttentionFwd {
    /// What it has in common with other attention kernels.
    pub const fn tile(&self) -> AttentionTile {
        let Self { dtype, head_dim, block_q, block_kv, .. } = *self;
        AttentionTile { dtype, head_dim, block_q, block_kv, heads: 1, lse: Lse::AsAsked }
    }

    /// Shared memory in bytes: the Q tile, and a ring of K tiles and of V tiles.
    pub const fn smem_bytes(&self) -> u32 {
        (self.block_q + 2 * self.stages * self.block_kv) * self.head_dim * self.dtype.size() as u32
    }
}

impl AttentionFwdHopper {
    /// Bytes of a row of a panel in shared memory: as much as the swizzle permutes, 64 elements.
    const PANEL_ROW_BYTES: u32 = 128;
    /// Bytes for barriers and the announced tiles, and a page of zeros.
    const EXTRA_BYTES: u32 = 2048;

    /// What it has in common with other attention kernels.
    pub const fn tile(&self) -> AttentionTile {
        let Self { dtype, head_dim, block_kv, heads, .. } = *self;
        let lse = if self.lse { Lse::Always } else { Lse::Never };
        AttentionTile { dtype, head_dim, block_q: self.block_q(), block_kv, heads, lse }
    }

    /// Queries per block of threads.
    pub const fn block_q(&self) -> u32 {
        64 * self.warpgroups / self.heads
    }

    /// Warps per block: four per warpgroup, and those of the one that copies.
    pub const fn warps(&self) -> u32 {
        4 * (self.warpgroups + 1)
    }

    /// Shared memory in bytes: the Q tiles, a ring of K tiles and of V tiles, and per stage a panel
    /// with the ones whose product with the probabilities is the denominator. V has columns to
    /// spare for them in some tiles, and at 256 none would fit.
    pub const fn smem_bytes(&self) -> u32 {
        let panels = self.head_dim.div_ceil(64);
        let ones = self.head_dim.is_multiple_of(64) && self.head_dim < 256;
        let q_rows = self.warpgroups * self.q_stages * 64 * panels;
        let kv_rows = self.stages * self.block_kv * (2 * panels + ones as u32);
        // The output on its way to global memory, where there is room.
        let staged =
            (self.q_in_registers || self.q_stages == 2) && self.blocks_per_multiprocessor == 1;
        let o_rows = if staged { self.warpgroups * 64 * panels } else { 0 };
        (q_rows + kv_rows + o_rows) * Self::PANEL_ROW_BYTES + Self::EXTRA_BYTES
    }
}

impl BsrMatmul {
    /// What it has in common with other BSR kernels.
    pub const fn tile(&self) -> BsrTile {
        let Self { dtype, block_size, block_n, block_k, .. } = *self;
        let (a_transposed, b_column_major) = (false, false);
        BsrTile {
            dtype,
            block_size,
            block_rows: 1,
            block_n,
            block_k,
            cluster: 1,
            a_transposed,
            b_column_major,
        }
    }

    /// Shared memory in bytes: a ring of A and B tiles.
    pub const fn smem_bytes(&self) -> u32 {
        self.stages * (self.block_size + self.block_n) * self.block_k * self.dtype.size() as u32
    }
}

#[cfg(test)]
#[path = "tile_tests.rs"]
mod tests;
