use super::fit::{Fit, absent, require};
use crate::Kernel;
use cudarc::driver::sys::{self, CUlaunchAttributeID as AttributeId};

/// Geometry of a kernel launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    /// CTAs (thread blocks) in x, y and z.
    pub grid: [u32; 3],
    /// Threads per CTA.
    pub block: u32,
    /// Dynamic shared memory per CTA in bytes.
    pub smem_bytes: u32,
    /// CTAs per cluster in x, y and z (compute capability 9.0 and newer); `None` for kernels
    /// without clusters.
    pub cluster: Option<[u32; 3]>,
    /// Programmatic dependent launch: the kernel may start while its predecessor on the stream is
    /// still finishing. It waits with `griddepcontrol.wait` before it touches memory that the
    /// predecessor wrote.
    pub programmatic_dependent_launch: bool,
}

impl LaunchConfig {
    /// A grid of `blocks` CTAs in x; the kernel decides everything else.
    pub fn of(kernel: &Kernel, blocks: u32, programmatic_dependent_launch: bool) -> Self {
        Self {
            grid: [blocks, 1, 1],
            block: kernel.threads(),
            smem_bytes: kernel.smem_bytes(),
            cluster: kernel.cluster(),
            programmatic_dependent_launch,
        }
    }

    /// Checks the geometry against the kernel and the number of tiles. Persistent kernels share the
    /// tiles among any number of CTAs up to one per tile, or more where some may idle. All others
    /// have one CTA per tile.
    pub(super) fn fits(&self, kernel: &Kernel, tiles: i128, persistent: bool) -> Fit {
        let [x, y, z] = self.grid;
        // The last CTAs of a cluster may find no tile.
        let may_idle = kernel.family().may_idle() || kernel.cluster() != self.cluster;
        let blocks = match persistent {
            true if may_idle => 1..=i128::from(i32::MAX),
            true => 1..=tiles,
            false => tiles..=tiles,
        };
        if !blocks.contains(&i128::from(x)) || y != 1 || z != 1 {
            return Err(format!("a grid of {x}x{y}x{z} blocks, expected {blocks:?} in x"));
        }
        require(
            self.block == kernel.threads(),
            format_args!("{} threads, the kernel has {}", self.block, kernel.threads()),
        )?;
        require(
            self.smem_bytes == kernel.smem_bytes(),
            format_args!(
                "{} bytes of shared memory, the kernel has {}",
                self.smem_bytes,
                kernel.smem_bytes()
            ),
        )?;
        // A launch of a kernel without a cluster of its own may choose one of up to this many CTAs.
        let most = kernel.most_in_cluster().filter(|_| kernel.cluster().is_none()).unwrap_or(1);
        let is_choice = |[x, y, z]: [u32; 3]| (2..=most).contains(&x) && [y, z] == [1, 1];
        if self.cluster != kernel.cluster() && !self.cluster.is_some_and(is_choice) {
            let choice = if most > 1 { format!(" or [2..={most}, 1, 1]") } else { String::new() };
            let (found, own) = (self.cluster, kernel.cluster());
            return Err(format!("clusters of {found:?}, expected {own:?}{choice}"));
        }
        let blocks = self.cluster.map_or(1, |[blocks, ..]| blocks);
        require(x % blocks == 0, format_args!("{x} CTAs do not divide into clusters of {blocks}"))?;
        let early = self.programmatic_dependent_launch && !kernel.waits_for_predecessor();
        let reason = "the kernel does not wait for its predecessor itself";
        absent("programmatic_dependent_launch", early, reason)?;
        if persistent {
            // Each CTA looks for a tile past the last one, and the counter has 32 bits.
            let past = tiles + 2 * i128::from(x);
            require(
                past <= i128::from(i32::MAX),
                format_args!("{tiles} tiles for {x} CTAs, the limit is {}", i32::MAX),
            )?;
        }
        Ok(())
    }

    /// The launch attributes that the configuration asks for, and their number.
    pub(super) fn attributes(&self) -> ([sys::CUlaunchAttribute; 2], u32) {
        let none = sys::CUlaunchAttribute {
            id: AttributeId::CU_LAUNCH_ATTRIBUTE_IGNORE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        };
        let mut attributes = [none; 2];
        let mut count = 0;
        if let Some([x, y, z]) = self.cluster {
            attributes[count].id = AttributeId::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[count].value.clusterDim =
                sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            count += 1;
        }
        if self.programmatic_dependent_launch {
            attributes[count].id =
                AttributeId::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        (attributes, count as u32)
    }
}
