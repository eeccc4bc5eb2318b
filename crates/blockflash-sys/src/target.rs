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

/// What is known of a target: everything that depends on it reads its row in
/// [`Target::properties`].
struct Properties {
    name: &'static str,
    gencode: &'static str,
    gpus: &'static str,
    archive: &'static str,
    /// The first GPU that loads its images, and which later ones do, too.
    first: ComputeCapability,
    later: Later,
    smem_limit: u32,
    has_clusters: bool,
    has_programmatic_launch: bool,
    is_always_embedded: bool,
    is_portable: bool,
    is_baseline: bool,
}

/// Which GPUs after the first one load an image: by CUDA's rule of binary compatibility machine
/// code runs within its major version from its own minor version upwards, architecture-specific
/// code on exactly its own, and PTX on every later GPU.
#[derive(Clone, Copy)]
enum Later {
    None,
    OfMajor,
    All,
}

impl Target {
    /// Every target, in the order in which images are preferred: machine code first, PTX last.
    pub const ALL: [Target; 6] =
        [Target::Sm90a, Target::Sm90, Target::Sm89, Target::Sm80, Target::Sm120, Target::Ptx80];

    const fn properties(self) -> Properties {
        // Shared memory of the smallest GPUs; A100 and Hopper have more.
        const SM80: Properties = Properties {
            name: "sm_80",
            gencode: "arch=compute_80,code=sm_80",
            gpus: "sm_80 (A100)",
            // Machine code for sm_80 and sm_89 is nearly equal: one archive compresses it.
            archive: "sm_8x",
            first: ComputeCapability::new(8, 0),
            later: Later::OfMajor,
            smem_limit: 163 * 1024,
            has_clusters: false,
            has_programmatic_launch: false,
            is_always_embedded: false,
            is_portable: true,
            is_baseline: true,
        };
        const SM90: Properties = Properties {
            name: "sm_90",
            gencode: "arch=compute_90,code=sm_90",
            gpus: "sm_90 (Hopper)",
            archive: "sm_90",
            first: ComputeCapability::new(9, 0),
            smem_limit: 227 * 1024,
            has_clusters: true,
            has_programmatic_launch: true,
            is_always_embedded: true,
            ..SM80
        };
        match self {
            Target::Sm80 => SM80,
            Target::Sm89 => Properties {
                name: "sm_89",
                gencode: "arch=compute_89,code=sm_89",
                gpus: "sm_89 (Ada)",
                first: ComputeCapability::new(8, 9),
                smem_limit: 99 * 1024,
                is_baseline: false,
                ..SM80
            },
            Target::Sm90 => SM90,
            Target::Sm90a => Properties {
                name: "sm_90a",
                gencode: "arch=compute_90a,code=sm_90a",
                gpus: "sm_90a (Hopper)",
                archive: "sm_90a",
                later: Later::None,
                is_portable: false,
                is_baseline: false,
                ..SM90
            },
            Target::Sm120 => Properties {
                name: "sm_120",
                gencode: "arch=compute_120,code=sm_120",
                gpus: "sm_120 (RTX Blackwell)",
                archive: "sm_120",
                first: ComputeCapability::new(12, 0),
                smem_limit: 99 * 1024,
                is_baseline: false,
                ..SM80
            },
            Target::Ptx80 => Properties {
                name: "ptx_80",
                gencode: "arch=compute_80,code=compute_80",
                gpus: "other GPUs from sm_80 (PTX)",
                archive: "ptx_80",
                later: Later::All,
                smem_limit: 99 * 1024,
                ..SM80
            },
        }
    }

    /// Name used in image files and on the command line.
    pub const fn name(self) -> &'static str {
        self.properties().name
    }

    /// The compiler's `-gencode` value.
    pub const fn gencode(self) -> &'static str {
        self.properties().gencode
    }

    /// The GPUs that it is for, in words.
    pub const fn gpus(self) -> &'static str {
        self.properties().gpus
    }

    /// End of the names of archives that hold its images.
    pub const fn archive(self) -> &'static str {
        self.properties().archive
    }

    /// Whether the image is PTX text rather than machine code.
    pub const fn is_ptx(self) -> bool {
        matches!(self.properties().later, Later::All)
    }

    /// Whether its images are embedded in any case, as machine code for Hopper is; those for other
    /// targets come with the feature `all-gpus`.
    pub const fn is_always_embedded(self) -> bool {
        self.properties().is_always_embedded
    }

    /// Whether its CTAs may form clusters.
    pub const fn has_clusters(self) -> bool {
        self.properties().has_clusters
    }

    /// Whether its machine code can wait for the kernel before it on the stream (programmatic
    /// dependent launch).
    pub const fn has_programmatic_launch(self) -> bool {
        self.properties().has_programmatic_launch
    }

    /// Whether later GPUs run its instructions as well.
    pub const fn is_portable(self) -> bool {
        self.properties().is_portable
    }

    /// Whether kernels that memory bounds are compiled for it: the other targets take these images.
    pub const fn is_baseline(self) -> bool {
        self.properties().is_baseline
    }

    /// Whether a GPU can load an image of this target.
    pub fn runs_on(self, gpu: ComputeCapability) -> bool {
        let Properties { first, later, .. } = self.properties();
        match later {
            Later::None => gpu == first,
            Later::OfMajor => gpu.major == first.major && gpu >= first,
            Later::All => gpu >= first,
        }
    }

    /// Bytes of shared memory that one CTA may use on the smallest GPU of this target. Tests check
    /// every kernel against it.
    pub const fn smem_limit(self) -> u32 {
        self.properties().smem_limit
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
