//! What several tests of the command need.

use std::path::PathBuf;

/// A folder of one test, removed at the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// `name` is that of the test, and of nothing else in this program.
    pub(crate) fn new(name: &str) -> Self {
        let program = env!("CARGO_CRATE_NAME");
        let path = std::env::temp_dir().join(format!("blockflash-{program}-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// The path of a file in it.
    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
