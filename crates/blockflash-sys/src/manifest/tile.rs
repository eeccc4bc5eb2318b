//! The parts of a kernel's tile that all kernels of an operation have.

use super::family::{Size, Support};
use crate::DType;

/// A CTA of an attention kernel computes `block_q` queries of `heads` heads, `block_kv` keys at a
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionTile {
    /// Element type of q, k, v and o.
    pub dtype: DType,
    /// Largest head dimension.
    pub head_dim: u32,
    /// Queries per CTA.
    pub block_q: u32,
    /// Keys per step of the main loop.
    pub block_kv: u32,
    /// Heads of q per CTA; they share keys and the block mask.
    pub heads: u32,
    /// When it computes the log-sum-exp.
    pub lse: Lse,
}

impl AttentionTile {
    pub(super) fn support(&self) -> Support {
        let Self { head_dim, dtype, .. } = *self;
        Support { operation: "attention forward", size: Size::HeadDim(head_dim), dtype }
    }

    pub(super) fn profile_case(&self) -> String {
        let Self { head_dim, dtype, .. } = self;
        format!("b4_s4096_h{}_d{head_dim}_full_{dtype}", 2048 / head_dim)
    }
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

/// A CTA of a BSR kernel computes `block_rows` block rows of A times `block_n` columns of B,
/// `block_k` of the depth at a time.
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
    /// CTAs of a cluster, which compute neighbouring columns of C.
    pub cluster: u32,
    /// Whether A is multiplied transposed.
    pub a_transposed: bool,
    /// Whether B is column-major.
    pub b_column_major: bool,
}

impl BsrTile {
    /// Tiles along `n` columns of C: clusters are whole, so some tiles may have no columns.
    pub const fn tiles_n(&self, n: u64) -> u64 {
        n.div_ceil((self.cluster * self.block_n) as u64) * self.cluster as u64
    }

    pub(super) fn support(&self) -> Support {
        let operation = if self.a_transposed || self.b_column_major {
            "BSR matmul, Aᵀ, column-major B"
        } else {
            "BSR matmul"
        };
        Support { operation, size: Size::Block(self.block_size), dtype: self.dtype }
    }

    pub(super) fn profile_case(&self) -> Option<String> {
        let Self { block_size, dtype, a_transposed, b_column_major, .. } = *self;
        // No case of `blockflash bench` has a transposed A or a column-major B.
        (!a_transposed && !b_column_major)
            .then(|| format!("m8192_n1024_k8192_b{block_size}_d0.1_uniform_{dtype}"))
    }
}

/// A tile of the sampled product is at most `blocks` neighbouring stored blocks of a block row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrSddmmTile {
    /// Element type of A and B.
    pub dtype: DType,
    /// Rows and columns of a block of the pattern.
    pub block_size: u32,
    /// Blocks of a tile; the last one of a block row may have fewer.
    pub blocks: u32,
    /// The layouts of A and B that the kernel's tensor maps describe; `None`: any layout, any
    /// leading dimension, starting anywhere.
    pub majors: Option<[Major; 2]>,
}

impl BsrSddmmTile {
    pub(super) fn support(&self) -> Support {
        let Self { block_size, dtype, .. } = *self;
        Support { operation: "sampled product", size: Size::Block(block_size), dtype }
    }

    pub(super) fn profile_case(&self) -> String {
        let Self { block_size, dtype, .. } = self;
        // A kernel for all layouts is profiled on the gradient of weights.
        let [a, b] = self.majors.unwrap_or([Major::Column, Major::Row]).map(Major::name);
        format!("sddmm_m8192_n8192_k4096_b{block_size}_d0.1_uniform_{a}_{b}_{dtype}")
    }
}

/// Which elements of a matrix are neighbours in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Major {
    /// The elements of a row.
    Row,
    /// The elements of a column: the transposed matrix is row-major.
    Column,
}

impl Major {
    /// Both.
    pub const ALL: [Major; 2] = [Major::Row, Major::Column];

    /// `row` or `column`.
    pub const fn name(self) -> &'static str {
        match self {
            Major::Row => "row",
            Major::Column => "column",
        }
    }
}
