//! Says what is missing when no version of the bindings is chosen, which cudarc would answer by a
//! panic.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let chosen = |(name, _): (String, String)| name.starts_with("CARGO_FEATURE_CUDA_");
    if !std::env::vars().any(chosen) {
        println!(
            "cargo::error=no version of CUDA's bindings is chosen: `default-features = false` of \
             blockflash needs one of the features `cuda-12040` to `cuda-13040`, the one that the \
             program's other users of cudarc have, or `cuda-version-from-build-system`"
        );
    }
}
