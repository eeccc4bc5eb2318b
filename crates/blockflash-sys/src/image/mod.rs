//! The kernel images: embedded, or with the feature `images-from-folder` from a folder that
//! `BLOCKFLASH_IMAGES` names.

mod archive;

pub use archive::{Archive, Entry};

use crate::Kernel;
use std::{
    collections::VecDeque,
    ffi::OsString,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

/// Environment variable with a folder whose images take the place of the embedded ones, in programs
/// that are built with the feature `images-from-folder`. Without the feature, which is the default,
/// it does nothing.
///
/// For kernels under development, for profiles with line information, and for comparing commits.
/// Such a folder holds uncompressed files as [`Kernel::image_name`] names them; each kernel that is
/// used must be there. A program that enables the feature vouches for the images, because the
/// driver runs whatever they contain.
pub const IMAGES_VARIABLE: &str = "BLOCKFLASH_IMAGES";

/// The archives of `prebuilt/` by [`Kernel::archive_name`], sorted: the kernels of Hopper.
static HOPPER: &[(&str, &[u8])] = include!("../../prebuilt/archives.rs");
/// The same of the crate blockflash-images: the kernels of other GPUs.
#[cfg(feature = "all-gpus")]
static OTHERS: &[(&str, &[u8])] = blockflash_images::ARCHIVES;
#[cfg(not(feature = "all-gpus"))]
static OTHERS: &[(&str, &[u8])] = &[];

/// Unpacked frames that are kept, 12 MB at most. The kernels that a program uses mostly share
/// frames, and a loaded kernel does not ask for its image again.
const KEPT_FRAMES: usize = 8;

/// Reasons why an image is not available.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The crate was built from a tree whose `prebuilt/` lacks this image.
    #[error("no precompiled image {0}: run `cargo xtask kernels`")]
    Missing(String),
    /// The embedded archive cannot be read.
    #[error("the precompiled image {0} is damaged: {1}")]
    Damaged(String, String),
    /// The folder that [`IMAGES_VARIABLE`] names lacks this image, or holds something else in its
    /// place.
    #[error("{IMAGES_VARIABLE} is set, but {} {what}", .path.display())]
    Folder {
        /// Path at which the image was looked for.
        path: PathBuf,
        /// What is wrong at this path.
        what: String,
    },
}

/// The cubin of a kernel, or its NUL-terminated PTX, ready for `cuModuleLoadData`: the embedded
/// image, unless [`IMAGES_VARIABLE`] names a folder and the feature `images-from-folder` is
/// enabled.
pub fn load(kernel: &Kernel) -> Result<Vec<u8>, ImageError> {
    let mut bytes = match folder() {
        Some(folder) => from_folder(kernel, Path::new(&folder))?,
        None => embedded(kernel)?,
    };
    if kernel.target.is_ptx() {
        bytes.push(0);
    }
    Ok(bytes)
}

/// The folder that takes the place of the embedded images.
fn folder() -> Option<OsString> {
    if cfg!(feature = "images-from-folder") { std::env::var_os(IMAGES_VARIABLE) } else { None }
}

/// An unpacked frame.
struct Frame {
    /// Name of its archive.
    archive: &'static str,
    /// Where it starts there.
    start: usize,
    raw: Vec<u8>,
}

fn embedded(kernel: &Kernel) -> Result<Vec<u8>, ImageError> {
    // The frames used last, the latest at the end.
    static FRAMES: Mutex<VecDeque<Frame>> = Mutex::new(VecDeque::new());

    let name = kernel.image_name();
    let missing = || ImageError::Missing(name.clone());
    let damaged = |what: String| ImageError::Damaged(name.clone(), what);
    let archives = if kernel.target.is_always_embedded() { HOPPER } else { OTHERS };
    let archive = kernel.archive_name();
    let at = archives.binary_search_by(|(key, _)| (*key).cmp(archive.as_str()));
    let (at, bytes) = archives[at.map_err(|_| missing())?];
    let archive = Archive::parse(bytes).map_err(damaged)?;
    let entry = archive.entries().get(name.as_str()).ok_or_else(missing)?;

    // Held while unpacking, so that other threads do not unpack the same frame again. A panic
    // cannot leave a part of a frame here.
    let mut frames = FRAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let start = entry.frame.start;
    let kept = frames.iter().position(|frame| (frame.archive, frame.start) == (at, start));
    let frame = match kept.and_then(|kept| frames.remove(kept)) {
        Some(frame) => frame,
        None => {
            let raw = archive.unpack(&entry.frame).map_err(damaged)?;
            Frame { archive: at, start, raw }
        }
    };
    let image = frame.raw.get(entry.image.clone()).map(<[u8]>::to_vec);
    if frames.len() == KEPT_FRAMES {
        frames.pop_front();
    }
    frames.push_back(frame);
    image.ok_or_else(|| damaged("the image ends beyond its frame".to_owned()))
}

fn from_folder(kernel: &Kernel, folder: &Path) -> Result<Vec<u8>, ImageError> {
    let path = folder.join(kernel.image_name());
    let failed = |what: String| ImageError::Folder { path: path.clone(), what };
    let bytes = std::fs::read(&path).map_err(|error| failed(format!("cannot be read: {error}")))?;
    // The driver does not check the image.
    if kernel.target.is_ptx() && (bytes.contains(&0) || std::str::from_utf8(&bytes).is_err()) {
        return Err(failed("is not PTX text".into()));
    }
    if !kernel.target.is_ptx() && !bytes.starts_with(b"\x7fELF") {
        return Err(failed("is not machine code (is it compressed?)".into()));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::kernels;

    /// A folder of the test's own, removed at its end.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("blockflash-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).expect("a folder for scratch files");
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn exactly_the_kernels_are_embedded() {
        let mut expected: Vec<String> = kernels().iter().map(Kernel::image_name).collect();
        expected.sort();
        let archives = HOPPER.iter().chain(OTHERS).map(|(_, bytes)| Archive::parse(bytes).unwrap());
        let mut found: Vec<_> = archives
            .flat_map(|archive| {
                archive.entries().keys().map(ToString::to_string).collect::<Vec<_>>()
            })
            .collect();
        found.sort();
        assert_eq!(found, expected);
    }

    /// Images in an order in which frames are dropped and unpacked again, on several threads.
    #[test]
    fn every_image_is_found_in_its_frame() {
        std::thread::scope(|scope| {
            for thread in 0..2 {
                scope.spawn(move || {
                    for kernel in kernels().iter().skip(thread).step_by(2) {
                        let image = embedded(kernel).unwrap();
                        let symbol = kernel.symbol();
                        assert!(image.windows(symbol.len()).any(|at| at == symbol.as_bytes()));
                        assert_eq!(image.starts_with(b"\x7fELF"), !kernel.target.is_ptx());
                    }
                });
            }
        });
    }

    /// Also run by the next test, in a process of its own.
    #[test]
    fn a_kernel_loads() {
        load(&kernels()[0]).unwrap();
    }

    #[test]
    fn the_variable_acts_with_the_feature_only() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "image::tests::a_kernel_loads"])
            .env(IMAGES_VARIABLE, "no such folder")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(said.contains("running 1 test"), "{said}");
        assert_eq!(child.status.success(), !cfg!(feature = "images-from-folder"), "{said}");
    }

    #[test]
    fn a_folder_takes_the_place_of_embedded_images() {
        let scratch = Scratch::new("images");
        let code = kernels().iter().find(|kernel| !kernel.target.is_ptx()).unwrap();
        let text = kernels().iter().find(|kernel| kernel.target.is_ptx()).unwrap();
        for kernel in [code, text] {
            let image = embedded(kernel).unwrap();
            std::fs::write(scratch.0.join(kernel.image_name()), &image).unwrap();
            assert_eq!(from_folder(kernel, &scratch.0).unwrap(), image);
        }
    }

    #[test]
    fn what_is_missing_or_no_image_is_named() {
        let scratch = Scratch::new("no-images");
        let code = kernels().iter().find(|kernel| !kernel.target.is_ptx()).unwrap();
        let text = kernels().iter().find(|kernel| kernel.target.is_ptx()).unwrap();
        let error = |kernel| from_folder(kernel, &scratch.0).unwrap_err().to_string();
        assert!(error(code).contains(&code.image_name()) && error(code).contains("cannot be read"));
        for kernel in [code, text] {
            // An archive in place of the image that it holds.
            std::fs::write(scratch.0.join(kernel.image_name()), HOPPER[0].1).unwrap();
        }
        assert!(error(code).ends_with("is not machine code (is it compressed?)"));
        assert!(error(text).ends_with("is not PTX text"));
        assert_eq!(error(text).lines().count(), 1);
    }
}
