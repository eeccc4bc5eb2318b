use crate::{Expect, Target, params};

/// What `probe_sm80.cu` and `probe_sm90a.cu` keep busy. The discriminants are the
/// `BLOCKFLASH_PROBE_…` constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Probe {
    /// `mma.sync` with f16 inputs and f32 accumulation.
    MmaF16 = params::BLOCKFLASH_PROBE_MMA_F16 as u32,
    /// `mma.sync` with bf16 inputs.
    MmaBf16 = params::BLOCKFLASH_PROBE_MMA_BF16 as u32,
    /// `mma.sync` with e4m3 inputs (Hopper has no such instruction and converts to f16).
    MmaE4m3 = params::BLOCKFLASH_PROBE_MMA_E4M3 as u32,
    /// Exponentials.
    Exp2 = params::BLOCKFLASH_PROBE_EXP2 as u32,
    /// Loads that bypass L1: of device memory, or of L2 when the input is small.
    Read = params::BLOCKFLASH_PROBE_READ as u32,
    /// A copy within device memory.
    Copy = params::BLOCKFLASH_PROBE_COPY as u32,
    /// `wgmma` from shared memory with f16 inputs.
    WgmmaF16 = params::BLOCKFLASH_PROBE_WGMMA_F16 as u32,
    /// `wgmma` with bf16 inputs.
    WgmmaBf16 = params::BLOCKFLASH_PROBE_WGMMA_BF16 as u32,
    /// `wgmma` with e4m3 inputs.
    WgmmaE4m3 = params::BLOCKFLASH_PROBE_WGMMA_E4M3 as u32,
    /// Bulk copies into shared memory: of L2 when the input is small.
    Bulk = params::BLOCKFLASH_PROBE_BULK as u32,
}

impl Probe {
    /// Every probe.
    pub const ALL: [Probe; 10] = [
        Probe::MmaF16,
        Probe::MmaBf16,
        Probe::MmaE4m3,
        Probe::Exp2,
        Probe::Read,
        Probe::Copy,
        Probe::WgmmaF16,
        Probe::WgmmaBf16,
        Probe::WgmmaE4m3,
        Probe::Bulk,
    ];

    /// Name in symbols.
    pub const fn name(self) -> &'static str {
        match self {
            Probe::MmaF16 => "mma_f16",
            Probe::MmaBf16 => "mma_bf16",
            Probe::MmaE4m3 => "mma_e4m3",
            Probe::Exp2 => "exp2",
            Probe::Read => "read",
            Probe::Copy => "copy",
            Probe::WgmmaF16 => "wgmma_f16",
            Probe::WgmmaBf16 => "wgmma_bf16",
            Probe::WgmmaE4m3 => "wgmma_e4m3",
            Probe::Bulk => "bulk",
        }
    }

    /// Whether it is made of instructions that only Hopper has.
    pub(crate) const fn is_hopper(self) -> bool {
        matches!(self, Probe::WgmmaF16 | Probe::WgmmaBf16 | Probe::WgmmaE4m3 | Probe::Bulk)
    }

    /// Shared memory in bytes: the tiles of two warpgroups and the one they share, or the ring of
    /// copies.
    pub const fn smem_bytes(self) -> u32 {
        match self {
            Probe::WgmmaF16 | Probe::WgmmaBf16 | Probe::WgmmaE4m3 => (2 * 64 + 256) * 128,
            Probe::Bulk => 12 * 16384,
            _ => 0,
        }
    }

    /// Calls `number` with the name and the value of each preprocessor definition.
    pub(crate) fn macros(self, mut number: impl FnMut(&'static str, u32)) {
        number("VARIANT_PROBE", self as u32);
        number("VARIANT_MIN_BLOCKS", self.min_blocks());
    }

    /// Blocks per multiprocessor that saturate the unit; one more would not fit.
    pub const fn min_blocks(self) -> u32 {
        match self {
            Probe::MmaF16 | Probe::MmaBf16 => 2,
            Probe::Exp2 | Probe::Read | Probe::Copy => 3,
            _ => 1,
        }
    }

    /// What it is compiled for.
    pub(crate) const fn targets(self) -> &'static [Target] {
        match self {
            probe if probe.is_hopper() => &[Target::Sm90a],
            Probe::MmaE4m3 => &[Target::Sm90, Target::Sm89, Target::Sm120],
            _ => &[Target::Sm90, Target::Sm89, Target::Sm80, Target::Sm120, Target::Ptx80],
        }
    }

    pub(crate) const fn expects(self) -> &'static [Expect] {
        use Expect::{Contains, Lacks};
        match self {
            Probe::MmaF16 | Probe::MmaBf16 => &[Contains("HMMA"), Lacks("LDL"), Lacks("STL")],
            Probe::MmaE4m3 => &[Lacks("LDL"), Lacks("STL")],
            Probe::Exp2 => &[Contains("MUFU"), Lacks("LDL"), Lacks("STL")],
            Probe::Read | Probe::Copy => &[Contains("LDG"), Lacks("LDL"), Lacks("STL")],
            Probe::WgmmaF16 | Probe::WgmmaBf16 => &[Contains("HGMMA"), Lacks("LDL"), Lacks("STL")],
            Probe::WgmmaE4m3 => &[Contains("QGMMA"), Lacks("LDL"), Lacks("STL")],
            Probe::Bulk => &[Contains("UBLKCP"), Lacks("LDL"), Lacks("STL")],
        }
    }
}
