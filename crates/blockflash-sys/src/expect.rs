use std::fmt;

/// A requirement of a kernel on its machine code, which `cargo xtask sass --check` proves on the
/// committed images.
///
/// An instruction is named by its opcode, the part before the first dot: `HMMA` also stands for
/// `HMMA.16816.F32`, but not for `HMMA2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Expect {
    /// The instruction occurs.
    Contains(&'static str),
    /// The instruction does not occur.
    Lacks(&'static str),
}

impl Expect {
    /// Opcode of the instruction.
    pub const fn opcode(self) -> &'static str {
        match self {
            Expect::Contains(opcode) | Expect::Lacks(opcode) => opcode,
        }
    }

    /// Whether the requirement holds for machine code in which the instruction occurs `count`
    /// times.
    pub const fn holds(self, count: u64) -> bool {
        match self {
            Expect::Contains(_) => count > 0,
            Expect::Lacks(_) => count == 0,
        }
    }
}

impl fmt::Display for Expect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Expect::Contains(opcode) => write!(f, "contains {opcode}"),
            Expect::Lacks(opcode) => write!(f, "lacks {opcode}"),
        }
    }
}
