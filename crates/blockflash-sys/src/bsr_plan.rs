use crate::Expect;

/// The kernel that plans a block-sparse pattern on the GPU, with its compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrPlanKernel {
    /// Warps per block of threads.
    pub warps: u32,
}

impl BsrPlanKernel {
    /// The only one: groups are formed by one block of threads, as large as there are.
    pub(crate) const TILE: Self = Self { warps: 32 };

    /// What distinguishes it in symbols.
    pub(crate) fn name(self) -> String {
        format!("w{}", self.warps)
    }

    /// Calls `number` with the name and the value of each preprocessor definition.
    pub(crate) fn macros(self, mut number: impl FnMut(&'static str, u32)) {
        number("VARIANT_PLAN_WARPS", self.warps);
        number("VARIANT_MIN_BLOCKS", 1);
    }

    pub(crate) const fn expects(self) -> &'static [Expect] {
        use Expect::{Contains, Lacks};
        &[Contains("REDUX"), Contains("POPC"), Lacks("LDL"), Lacks("STL")]
    }
}
