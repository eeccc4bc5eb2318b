use super::family::Family;
use super::variant::Variant;
use crate::{Expect, Target};
use std::sync::LazyLock;

/// One kernel image: a variant compiled for a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// The computation and the tiles of the kernel.
    pub variant: Variant,
    /// The target that the image is compiled for.
    pub target: Target,
}

impl Kernel {
    /// The parameters of the kernel's family.
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
        format!("{}.{}", self.source(), self.target.archive())
    }

    /// CTAs per cluster in x, y and z, for kernels with clusters.
    pub fn cluster(&self) -> Option<[u32; 3]> {
        let cluster = self.family().cluster();
        (cluster > 1).then_some([cluster, 1, 1])
    }

    /// The most CTAs of a cluster, for kernels that a launch may give clusters of any size up to
    /// this one, or none.
    pub fn most_in_cluster(&self) -> Option<u32> {
        let most = self.family().most_in_cluster();
        let any = self.family().cluster() == 1 && most > 1 && self.target.has_clusters();
        any.then_some(most)
    }

    /// Threads per CTA.
    pub fn threads(&self) -> u32 {
        32 * self.family().warps()
    }

    /// Dynamic shared memory per CTA in bytes.
    pub fn smem_bytes(&self) -> u32 {
        self.family().smem_bytes()
    }

    /// Whether the machine code waits for the kernel before it on the stream, so that it may start
    /// before that kernel ends (programmatic dependent launch).
    pub fn waits_for_predecessor(&self) -> bool {
        self.target.has_programmatic_launch() && self.family().waits_for_predecessor()
    }

    /// Preprocessor definitions of this kernel; `config/` is their only reader.
    pub fn macros(&self) -> Vec<(&'static str, String)> {
        let mut macros = vec![
            ("VARIANT_SYMBOL", self.symbol()),
            ("VARIANT_THREADS", self.threads().to_string()),
            ("VARIANT_SMEM_BYTES", self.smem_bytes().to_string()),
        ];
        self.family().macros(&mut |name, value| macros.push((name, value.to_string())));
        macros
    }

    /// Instructions that the machine code must contain or lack, checked by `cargo xtask sass
    /// --check`. In addition, no kernel may use local memory, which holds spilled registers and the
    /// stack. PTX is not checked.
    pub fn expects(&self) -> Vec<Expect> {
        let contains = self.family().contains().iter().copied().map(Expect::Contains);
        contains.chain([Expect::Lacks("LDL"), Expect::Lacks("STL")]).collect()
    }
}

/// All kernels, the preferred targets first. Among kernels that suit a problem equally well,
/// selection takes the first. Each has a committed image, a line in `kernels.lock` and a recorded
/// GPU pass. Without the feature `all-gpus` there are those for Hopper only.
pub fn kernels() -> &'static [Kernel] {
    static KERNELS: LazyLock<Vec<Kernel>> = LazyLock::new(|| {
        let of = |target| {
            Variant::all(target).into_iter().map(move |variant| Kernel { variant, target })
        };
        let embedded = |target: &Target| cfg!(feature = "all-gpus") || target.is_always_embedded();
        Target::ALL.into_iter().filter(embedded).flat_map(of).collect()
    });
    &KERNELS
}

#[cfg(test)]
mod tests {
    use crate::Expect;
    use crate::manifest::{self, AttentionBwdStep};
    use std::collections::HashSet;

    #[test]
    fn images_have_names_of_their_own() {
        let names: HashSet<_> =
            manifest::kernels().iter().map(|kernel| kernel.image_name()).collect();
        assert_eq!(names.len(), manifest::kernels().len());
    }

    #[test]
    fn tensor_maps_are_for_tensor_copies() {
        for kernel in manifest::kernels() {
            let of_attention = kernel.attention_tile().map(|tile| tile.tensor_maps);
            let of_gradients = kernel.attention_bwd_tile().map(|tile| tile.tensor_maps);
            let of_product = kernel.bsr_matmul_tile().map(|tile| tile.tensor_maps);
            let copies = kernel.expects().contains(&Expect::Contains("UTMALDG"));
            let told = of_attention.or(of_gradients).or(of_product);
            assert!(told.is_none_or(|told| told == copies), "{}", kernel.symbol());
        }
    }

    /// The kernels of Hopper are persistent, apart from the probes, most of the attention backward
    /// the attention of small grids, of wide heads and of few heads to listed latent rows and
    /// the combination of splits, and so are
    /// decoding, the choice of pages, copies of rows and listed latent rows; the last three divide
    /// their work in a fixed way.
    #[test]
    fn persistent_kernels_count_tiles() {
        for kernel in manifest::kernels() {
            let (source, family) = (kernel.source(), kernel.family());
            let sums = kernel.attention_bwd_tile().is_some_and(|tile| {
                tile.step == AttentionBwdStep::KeysAndSums && tile.head_dims.max() <= 128
            });
            let one_tile_each = !sums
                && [
                    "probe",
                    "attention_bwd",
                    "attention_combine",
                    "attention_fwd_small",
                    "attention_fwd_wide",
                    "attention_latent_index_few",
                ]
                .iter()
                .any(|op| source.starts_with(op));
            let portable = ["attention_decode_sm80", "attention_latent_sm80", "index_scores_sm80"];
            let fixed = ["page_choice_sm80", "row_copy_sm80", "attention_latent_index_sm90a"];
            let fixed = fixed.contains(&source);
            let counts = source.ends_with("_sm90a") && !one_tile_each && !fixed
                || portable.contains(&source);
            let persistent = counts || fixed;
            assert_eq!(family.is_persistent(), persistent, "{}", kernel.symbol());
            assert!(!counts || family.counts_tiles(), "{}", kernel.symbol());
        }
    }
}
