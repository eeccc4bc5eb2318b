use super::family::Family;
use super::tile::{AttentionTile, BsrSddmmTile, BsrTile};
use super::variant::Variant;
use crate::{Expect, Target};
use std::sync::LazyLock;

/// One kernel image: a variant compiled for a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// What is computed, and the tiles it is computed with.
    pub variant: Variant,
    /// What it is compiled for.
    pub target: Target,
}

impl Kernel {
    /// What the kernel's family says about itself.
    pub const fn family(&self) -> &dyn Family {
        self.variant.family()
    }

    /// Name of the folder in `kernels/` that holds the source.
    pub fn source(&self) -> &'static str {
        self.family().source()
    }

    /// Name of the `extern "C"` kernel: at once Nsight filter, test case and bench id. Equal for
    /// all targets of a variant.
    pub fn symbol(&self) -> String {
        format!("blockflash_{}_{}", self.source(), self.family().name())
    }

    /// Name of the image, in archives, in `kernels.lock` and in folders of images.
    pub fn image_name(&self) -> String {
        let extension = if self.target.is_ptx() { "ptx" } else { "cubin" };
        format!("{}.{}.{extension}", self.symbol(), self.target)
    }

    /// Name of the archive in `prebuilt/` that holds the image, without `.zst`.
    pub fn archive_name(&self) -> String {
        format!("{}.{}", self.source(), self.target)
    }

    /// CTAs per cluster in x, y and z, for kernels with clusters.
    pub fn cluster(&self) -> Option<[u32; 3]> {
        let cluster = self.family().cluster();
        (cluster > 1).then_some([cluster, 1, 1])
    }

    /// Threads per CTA.
    pub fn threads(&self) -> u32 {
        32 * self.family().warps()
    }

    /// Dynamic shared memory per CTA in bytes.
    pub fn smem_bytes(&self) -> u32 {
        self.family().smem_bytes()
    }

    /// Preprocessor definitions of this row; `config.cuh` is their only reader.
    pub fn macros(&self) -> Vec<(&'static str, String)> {
        let mut macros = vec![
            ("VARIANT_SYMBOL", self.symbol()),
            ("VARIANT_THREADS", self.threads().to_string()),
            ("VARIANT_SMEM_BYTES", self.smem_bytes().to_string()),
        ];
        self.family().macros(&mut |name, value| macros.push((name, value.to_string())));
        macros
    }

    /// What its machine code must contain and lack; `cargo xtask sass --check` looks. No kernel may
    /// use local memory, where spilled registers and the stack are. PTX rows are not looked at.
    pub fn expects(&self) -> Vec<Expect> {
        let contains = self.family().contains().iter().copied().map(Expect::Contains);
        contains.chain([Expect::Lacks("LDL"), Expect::Lacks("STL")]).collect()
    }

    /// The part that all attention kernels have; `None` for other kernels.
    pub const fn attention_tile(&self) -> Option<AttentionTile> {
        match self.variant {
            Variant::AttentionFwd(tile) => Some(tile.tile()),
            Variant::AttentionFwdHopper(tile) => Some(tile.tile()),
            _ => None,
        }
    }

    /// The part that all BSR kernels have; `None` for other kernels. A kernel that
    /// [takes any layout](Kernel::takes_any_layout) has it for A as it is and a row-major B.
    pub const fn bsr_tile(&self) -> Option<BsrTile> {
        match self.variant {
            Variant::BsrMatmul(tile) => Some(tile.tile()),
            Variant::BsrMatmulAny(tile) => Some(tile.tile()),
            Variant::BsrMatmulHopper(tile) => Some(tile.tile()),
            _ => None,
        }
    }

    /// Whether a BSR kernel takes A as it is and transposed, and B and C row-major and
    /// column-major.
    pub const fn takes_any_layout(&self) -> bool {
        matches!(self.variant, Variant::BsrMatmulAny(_))
    }

    /// The part that all kernels of the sampled product have; `None` for other kernels.
    pub const fn bsr_sddmm_tile(&self) -> Option<BsrSddmmTile> {
        match self.variant {
            Variant::BsrSddmm(tile) => Some(tile.tile()),
            Variant::BsrSddmmHopper(tile) => Some(tile.tile()),
            _ => None,
        }
    }
}

/// All rows, the preferred targets first. Of rows that suit a problem equally well the first is
/// taken. Each has a committed image, a line in `kernels.lock` and a recorded GPU pass.
pub fn kernels() -> &'static [Kernel] {
    static ROWS: LazyLock<Vec<Kernel>> = LazyLock::new(|| {
        let of = |target| {
            Variant::all(target).into_iter().map(move |variant| Kernel { variant, target })
        };
        Target::ALL.into_iter().flat_map(of).collect()
    });
    &ROWS
}

#[cfg(test)]
mod tests {
    use crate::manifest;
    use std::collections::HashSet;

    #[test]
    fn images_have_names_of_their_own() {
        let names: HashSet<_> = manifest::kernels().iter().map(|row| row.image_name()).collect();
        assert_eq!(names.len(), manifest::kernels().len());
    }

    /// The kernels of Hopper are persistent, apart from the probes.
    #[test]
    fn persistent_kernels_count_tiles() {
        for row in manifest::kernels() {
            let persistent = row.source().ends_with("_sm90a") && !row.source().starts_with("probe");
            assert_eq!(row.family().counts_tiles(), persistent, "{}", row.symbol());
        }
    }
}
