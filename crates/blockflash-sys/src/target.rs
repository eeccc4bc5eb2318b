use serde::{Deserialize, Serialize};
use std::fmt;

/// Compute capability of a GPU, as the driver reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ComputeCapability {
    /// 8 for Ampere and Ada, 9 for Hopper, 10 and 12 for Blackwell.
    pub major: u32,
    /// The 9 of 8.9, for example.
    pub minor: u32,
}

impl ComputeCapability {
    /// `ComputeCapability::new(8, 9)` is Ada.
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)
    }
}

/// The target that a kernel image is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Target {
    /// Machine code for compute capability 8.0 (runs on every 8.x whose shared memory is large
    /// enough).
    Sm80,
    /// Machine code for 8.9 (Ada).
    Sm89,
    /// Machine code for 9.0 (Hopper), portable instructions only.
    Sm90,
    /// Machine code for 9.0 with its architecture-specific instructions (WGMMA, setmaxnreg).
    Sm90a,
    /// Machine code for 12.x (RTX Blackwell).
    Sm120,
    /// PTX for 8.0: the driver compiles it for any newer GPU that has no machine code here.
    Ptx80,
}

impl Target {
    /// Every target, in the order in which images are preferred: machine code first, PTX last.
    pub const ALL: [Target; 6] =
        [Target::Sm90a, Target::Sm90, Target::Sm89, Target::Sm80, Target::Sm120, Target::Ptx80];

    /// Name used in image files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Target::Sm80 => "sm_80",
            Target::Sm89 => "sm_89",
            Target::Sm90 => "sm_90",
            Target::Sm90a => "sm_90a",
            Target::Sm120 => "sm_120",
            Target::Ptx80 => "ptx_80",
        }
    }

    /// The compiler's `-gencode` value.
    pub const fn gencode(self) -> &'static str {
        match self {
            Target::Sm80 => "arch=compute_80,code=sm_80",
            Target::Sm89 => "arch=compute_89,code=sm_89",
            Target::Sm90 => "arch=compute_90,code=sm_90",
            Target::Sm90a => "arch=compute_90a,code=sm_90a",
            Target::Sm120 => "arch=compute_120,code=sm_120",
            Target::Ptx80 => "arch=compute_80,code=compute_80",
        }
    }

    /// Whether the image is PTX text rather than machine code.
    pub const fn is_ptx(self) -> bool {
        matches!(self, Target::Ptx80)
    }

    /// Whether it is machine code for Hopper, which is embedded in any case; images for other
    /// targets come with the feature `all-gpus`.
    pub const fn is_hopper(self) -> bool {
        matches!(self, Target::Sm90 | Target::Sm90a)
    }

    /// Whether later GPUs run its instructions as well.
    pub const fn is_portable(self) -> bool {
        !matches!(self, Target::Sm90a)
    }

    /// Whether a GPU can load an image of this target. Machine code runs within its major version
    /// from its own minor version upwards (CUDA's binary compatibility rule), architecture-specific
    /// code on exactly its own.
    pub fn runs_on(self, gpu: ComputeCapability) -> bool {
        match self {
            Target::Sm80 => gpu.major == 8,
            Target::Sm89 => gpu.major == 8 && gpu.minor >= 9,
            Target::Sm90 => gpu.major == 9,
            Target::Sm90a => gpu == ComputeCapability::new(9, 0),
            Target::Sm120 => gpu.major == 12,
            Target::Ptx80 => gpu >= ComputeCapability::new(8, 0),
        }
    }

    /// Bytes of shared memory that one CTA may use on the smallest GPU of this target. Tests check
    /// every kernel against it.
    pub const fn smem_limit(self) -> u32 {
        match self {
            Target::Sm80 => 163 * 1024,
            Target::Sm90 | Target::Sm90a => 227 * 1024,
            Target::Sm89 | Target::Sm120 | Target::Ptx80 => 99 * 1024,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
