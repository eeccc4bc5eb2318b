//! What `cargo xtask tidy` finds.

/// Messages by weight.
#[derive(Default)]
pub struct Findings {
    /// Broken rules.
    pub errors: Vec<String>,
    /// Rules that are about to be broken.
    pub warnings: Vec<String>,
    /// Numbers worth knowing.
    pub notes: Vec<String>,
}
