//! What makes two problems alike.

use blockflash_sys::{DType, Major};
use serde::{Deserialize, Serialize};

/// Largest factor between sizes of problems that count as alike: √2, so that cases whose sizes
/// double leave no gap.
const NEAR: f64 = std::f64::consts::SQRT_2;

/// The properties of a problem that tuning compares: those of its class must be equal, its sizes
/// near. Options that are not among them, such as a softcap, a bias or a workspace, change the time
/// of all kernels about alike.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Likeness {
    /// Attention forward.
    Attention {
        /// Class: element type of q, k, v and o.
        dtype: DType,
        /// Class: elements of a row.
        head_dim: usize,
        /// Class: whether the mask is causal, from the last query and the last key on; else there
        /// is none.
        causal: bool,
        /// Class: queries and keys of a block of the mask.
        block_mask: Option<[u32; 2]>,
        /// Size: batch entries times heads of q.
        heads: usize,
        /// Size: heads of q that share keys.
        group: usize,
        /// Size: queries.
        seqlen_q: usize,
        /// Size: keys.
        seqlen_kv: usize,
    },
    /// BSR matmul.
    BsrMatmul {
        /// Class: element type of A and B.
        dtype: DType,
        /// Class: rows and columns of a block.
        block_size: usize,
        /// Class: whether A is multiplied transposed.
        a_transposed: bool,
        /// Class: what is contiguous in B.
        b_major: Major,
        /// Class: what is contiguous in C.
        c_major: Major,
        /// Size: rows of C.
        m: usize,
        /// Size: columns of C.
        n: usize,
        /// Size: rows of B.
        k: usize,
        /// Size: stored blocks, as a part of all.
        density: f64,
        /// Size: blocks of the longest block row, in mean block rows.
        longest: f64,
    },
}

impl Likeness {
    /// The largest factor between two sizes; `None` if the classes differ or a size is not near.
    pub fn distance(&self, other: &Self) -> Option<f64> {
        let (sizes, others) = (self.sizes(), other.sizes());
        let factors = sizes.into_iter().zip(others).map(|(a, b)| (a / b).max(b / a));
        let most = factors.fold(1.0, f64::max);
        (self.class() == other.class() && most <= NEAR).then_some(most)
    }

    /// Whether every size is positive, so that distances are numbers.
    pub(crate) fn is_valid(&self) -> bool {
        self.sizes().iter().all(|size| size.is_finite() && *size > 0.0)
    }

    fn sizes(&self) -> [f64; 5] {
        match *self {
            Self::Attention { heads, group, seqlen_q, seqlen_kv, .. } => {
                [heads as f64, group as f64, seqlen_q as f64, seqlen_kv as f64, 1.0]
            }
            Self::BsrMatmul { m, n, k, density, longest, .. } => {
                [m as f64, n as f64, k as f64, density, longest]
            }
        }
    }

    /// The same with every size equal.
    fn class(self) -> Self {
        match self {
            Self::Attention { dtype, head_dim, causal, block_mask, .. } => Self::Attention {
                dtype,
                head_dim,
                causal,
                block_mask,
                heads: 1,
                group: 1,
                seqlen_q: 1,
                seqlen_kv: 1,
            },
            Self::BsrMatmul { dtype, block_size, a_transposed, b_major, c_major, .. } => {
                Self::BsrMatmul {
                    dtype,
                    block_size,
                    a_transposed,
                    b_major,
                    c_major,
                    m: 1,
                    n: 1,
                    k: 1,
                    density: 1.0,
                    longest: 1.0,
                }
            }
        }
    }
}
