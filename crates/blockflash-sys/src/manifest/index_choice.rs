use super::family::{Family, Size, Support};
use crate::{DType, Target};

/// The kernels that score blocks of keys for each query and choose the largest scores, with their
/// compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IndexKernel {
    /// `index_scores_sm80`: scores of blocks of keys.
    Scores {
        /// Element type of the queries and the keys.
        dtype: DType,
        /// The largest head dimension.
        head_dim: u32,
        /// What the 16 columns of a product are: heads of one query and group, or queries and
        /// groups for one head of each. A launch takes the kernel with fewer products.
        columns: IndexColumns,
    },
    /// `top_k_sm80` with a row of scores for each warp.
    TopKWarps {
        /// The most columns of a row, whose keys are in shared memory.
        columns: u32,
    },
    /// `top_k_sm80` with a row of scores for each CTA, or for several.
    TopK {
        /// Candidates in shared memory. Shorter rows need one CTA.
        held: u32,
        /// Threads per CTA.
        threads: u32,
    },
}

/// The columns of products of [`IndexKernel::Scores`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IndexColumns {
    /// 16 heads of one query and group.
    Heads,
    /// 16 pairs of queries and groups, one head of each.
    Queries,
}

impl IndexColumns {
    /// Columns of a product.
    pub const WIDTH: u32 = 16;

    /// Products for `outputs` pairs of queries and groups, of `heads` heads each.
    pub const fn products(self, outputs: u32, heads: u32) -> u32 {
        match self {
            Self::Heads => outputs * heads.div_ceil(Self::WIDTH),
            Self::Queries => outputs.div_ceil(Self::WIDTH) * heads,
        }
    }
}

/// Other targets run the machine code for sm_80, or PTX.
pub(super) fn tiles(target: Target) -> impl Iterator<Item = IndexKernel> {
    let scores = [DType::F16, DType::BF16].into_iter().flat_map(|dtype| {
        [64, 128, 256].into_iter().flat_map(move |head_dim| {
            [IndexColumns::Heads, IndexColumns::Queries].map(|columns| IndexKernel::Scores {
                dtype,
                head_dim,
                columns,
            })
        })
    });
    let choices = [
        IndexKernel::TopKWarps { columns: 1024 },
        IndexKernel::TopKWarps { columns: 4096 },
        IndexKernel::TopK { held: 10240, threads: 1024 },
    ];
    scores.chain(choices).filter(move |_| target.is_baseline())
}

impl IndexKernel {
    /// Keys of the tile of a warp of [`Scores`](Self::Scores), of which 128 registers of a lane
    /// hold the elements; 0 for others.
    const fn keys_of_warp(&self) -> u32 {
        match *self {
            Self::Scores { head_dim, .. } if head_dim > 128 => 32,
            Self::Scores { .. } => 64,
            _ => 0,
        }
    }

    /// Keys of a tile of [`Scores`](Self::Scores): of an item, beside a tile of queries.
    pub const fn keys(&self) -> u32 {
        4 * self.keys_of_warp()
    }

    /// Stages of 32 columns in the ring of [`Scores`](Self::Scores).
    const fn stages(head_dim: u32) -> u32 {
        if head_dim > 128 { 2 } else { 3 }
    }
}

impl Family for IndexKernel {
    fn source(&self) -> &'static str {
        match self {
            Self::Scores { .. } => "index_scores_sm80",
            Self::TopKWarps { .. } | Self::TopK { .. } => "top_k_sm80",
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Scores { dtype, head_dim, columns } => {
                let columns = match columns {
                    IndexColumns::Heads => "heads",
                    IndexColumns::Queries => "queries",
                };
                format!("{dtype}_d{head_dim}_{columns}")
            }
            Self::TopKWarps { columns } => format!("warps_n{columns}"),
            Self::TopK { held, threads } => format!("h{held}_t{threads}"),
        }
    }

    fn warps(&self) -> u32 {
        match self {
            Self::Scores { .. } | Self::TopKWarps { .. } => 4,
            Self::TopK { threads, .. } => threads / 32,
        }
    }

    /// The keys of a tile, the ring of queries, and what warps tell one another; or the candidates,
    /// and the counts of their digits.
    fn smem_bytes(&self) -> u32 {
        match *self {
            Self::Scores { head_dim, .. } => {
                (self.keys() + Self::stages(head_dim) * 32) * head_dim * 2 + 3072
            }
            Self::TopKWarps { columns } => self.warps() * columns * 4,
            Self::TopK { held, .. } => held * 8 + 9 * 1024,
        }
    }

    fn counts_tiles(&self) -> bool {
        matches!(self, Self::Scores { .. })
    }

    /// Both stand between the queries and the attention of every token.
    fn waits_for_predecessor(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        match *self {
            Self::Scores { dtype, head_dim, columns } => {
                define("VARIANT_DTYPE", dtype as u32);
                define("VARIANT_INDEX_COLUMNS", head_dim);
                define("VARIANT_INDEX_WIDE", u32::from(columns == IndexColumns::Heads));
                define("VARIANT_WARPS", self.warps());
                define("VARIANT_STAGES", Self::stages(head_dim));
                define("VARIANT_MIN_BLOCKS", 2);
            }
            Self::TopKWarps { columns } => {
                define("VARIANT_TOP_K_WARPS", 1);
                define("VARIANT_TOP_K_HELD", columns);
                define("VARIANT_MIN_BLOCKS", 3);
            }
            Self::TopK { held, .. } => {
                define("VARIANT_TOP_K_WARPS", 0);
                define("VARIANT_TOP_K_HELD", held);
                define("VARIANT_MIN_BLOCKS", 1);
            }
        }
    }

    fn supports(&self) -> Option<Support> {
        let Self::Scores { dtype, head_dim, .. } = *self else { return None };
        let (operation, size) = ("scores of blocks of keys", Size::HeadDim(head_dim));
        Some(Support { operation, size, dtype })
    }

    fn contains(&self) -> &'static [&'static str] {
        match self {
            Self::Scores { .. } => &["HMMA", "LDGSTS", "LDSM", "FMNMX"],
            Self::TopKWarps { .. } => &["VOTE", "REDUX"],
            Self::TopK { .. } => &["VOTE", "REDUX", "ATOMS", "SHFL"],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{IndexColumns, IndexKernel};
    use crate::manifest::{Variant, kernels};

    #[test]
    fn one_cta_fits_everywhere_and_tiles_are_whole_blocks() {
        let mut count = 0;
        for kernel in kernels() {
            let Variant::Index(variant) = kernel.variant else { continue };
            count += 1;
            assert!(kernel.smem_bytes() <= 99 * 1024, "{}", kernel.image_name());
            let IndexKernel::Scores { .. } = variant else { continue };
            assert!(variant.keys().is_multiple_of(128), "{}", kernel.image_name());
        }
        let targets = kernels().iter().filter(|kernel| kernel.target.is_baseline());
        let targets: std::collections::HashSet<_> = targets.map(|kernel| kernel.target).collect();
        assert_eq!(count, targets.len() * (2 * 3 * 2 + 3));
    }

    #[test]
    fn columns_fill_products() {
        assert_eq!(IndexColumns::Heads.products(64, 64), 256);
        assert_eq!(IndexColumns::Queries.products(64, 64), 256);
        assert_eq!(IndexColumns::Heads.products(1, 64), 4);
        assert_eq!(IndexColumns::Queries.products(1, 64), 64);
        assert_eq!(IndexColumns::Queries.products(256, 1), 16);
    }
}
