use super::family::Family;
use crate::{Target, params};

/// The unit that `probe_sm80` and `probe_sm90a.cu` keep busy. The discriminants are the
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

    /// Whether the probe uses instructions that only Hopper has.
    const fn is_hopper(self) -> bool {
        matches!(self, Probe::WgmmaF16 | Probe::WgmmaBf16 | Probe::WgmmaE4m3 | Probe::Bulk)
    }

    /// CTAs per SM that saturate the unit; one more would not fit.
    pub const fn min_blocks(self) -> u32 {
        match self {
            Probe::MmaF16 | Probe::MmaBf16 => 2,
            Probe::Exp2 | Probe::Read | Probe::Copy => 3,
            _ => 1,
        }
    }

    fn is_compiled_for(self, target: Target) -> bool {
        match self {
            probe if probe.is_hopper() => target == Target::Sm90a,
            Probe::MmaE4m3 => matches!(target, Target::Sm90 | Target::Sm89 | Target::Sm120),
            _ => target.is_portable(),
        }
    }
}

pub(super) fn tiles(target: Target) -> impl Iterator<Item = Probe> {
    Probe::ALL.into_iter().filter(move |probe| probe.is_compiled_for(target))
}

impl Family for Probe {
    fn source(&self) -> &'static str {
        if self.is_hopper() { "probe_sm90a" } else { "probe_sm80" }
    }

    fn name(&self) -> String {
        Probe::name(*self).to_owned()
    }

    fn warps(&self) -> u32 {
        8
    }

    /// The tiles of two warpgroups and the one they share, or the ring of bulk copies.
    fn smem_bytes(&self) -> u32 {
        match self {
            Probe::WgmmaF16 | Probe::WgmmaBf16 | Probe::WgmmaE4m3 => (2 * 64 + 256) * 128,
            Probe::Bulk => 12 * 16384,
            _ => 0,
        }
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define("VARIANT_PROBE", *self as u32);
        define("VARIANT_MIN_BLOCKS", self.min_blocks());
    }

    fn contains(&self) -> &'static [&'static str] {
        match self {
            Probe::MmaF16 | Probe::MmaBf16 => &["HMMA"],
            Probe::MmaE4m3 => &[],
            Probe::Exp2 => &["MUFU"],
            Probe::Read | Probe::Copy => &["LDG"],
            Probe::WgmmaF16 | Probe::WgmmaBf16 => &["HGMMA"],
            Probe::WgmmaE4m3 => &["QGMMA"],
            Probe::Bulk => &["UBLKCP"],
        }
    }
}
