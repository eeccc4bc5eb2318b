use super::family::{Family, Size, Support};
use crate::{DType, Target};

/// The kernels that choose the pages of a cache, with their compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageKernel {
    /// `page_summaries_sm80`: what is kept of the keys of each page.
    Summaries {
        /// Element type of the keys.
        dtype: DType,
        /// Loads of 16 bytes in flight per thread.
        loads: u32,
    },
    /// `page_choice_sm80`: scores of pages, and the choice of the largest ones.
    Choice {
        /// Element type of the queries and the summaries.
        dtype: DType,
        /// Scores that a choice holds in shared memory; it reads others several times.
        held: u32,
    },
}

const KERNELS: [PageKernel; 4] = [
    PageKernel::Summaries { dtype: DType::F16, loads: 8 },
    PageKernel::Summaries { dtype: DType::BF16, loads: 8 },
    PageKernel::Choice { dtype: DType::F16, held: 8192 },
    PageKernel::Choice { dtype: DType::BF16, held: 8192 },
];

/// Other targets run the machine code for sm_80, or PTX.
pub(super) fn tiles(target: Target) -> impl Iterator<Item = PageKernel> {
    let compiled = target.is_baseline();
    KERNELS.into_iter().filter(move |_| compiled)
}

impl Family for PageKernel {
    fn source(&self) -> &'static str {
        match self {
            Self::Summaries { .. } => "page_summaries_sm80",
            Self::Choice { .. } => "page_choice_sm80",
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Summaries { dtype, loads } => format!("{dtype}_l{loads}"),
            Self::Choice { dtype, held } => format!("{dtype}_h{held}"),
        }
    }

    fn warps(&self) -> u32 {
        match self {
            Self::Summaries { .. } => 4,
            Self::Choice { .. } => 8,
        }
    }

    /// A choice stands between the queries and the attention of every token, so it is launched
    /// while the kernel before it ends.
    fn is_persistent(&self) -> bool {
        matches!(self, Self::Choice { .. })
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        match *self {
            Self::Summaries { dtype, loads } => {
                define("VARIANT_DTYPE", dtype as u32);
                define("VARIANT_SUMMARY_LOADS", loads);
                define("VARIANT_MIN_BLOCKS", 4);
            }
            Self::Choice { dtype, held } => {
                define("VARIANT_DTYPE", dtype as u32);
                define("VARIANT_HELD_SCORES", held);
                define("VARIANT_MIN_BLOCKS", 2);
            }
        }
    }

    fn contains(&self) -> &'static [&'static str] {
        match self {
            Self::Summaries { .. } => &["FADD", "FMNMX"],
            Self::Choice { .. } => &["FFMA", "SHFL", "ATOMS", "VOTE"],
        }
    }

    fn supports(&self) -> Option<Support> {
        let (operation, dtype) = match *self {
            Self::Summaries { dtype, .. } => ("summaries of pages", dtype),
            Self::Choice { dtype, .. } => ("choice of pages", dtype),
        };
        Some(Support { operation, size: Size::HeadDim(256), dtype })
    }
}
