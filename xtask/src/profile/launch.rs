//! Parses the report of `blockflash launch` about the kernel that it ran.

use serde::Deserialize;

/// A launched kernel and its counted work.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Launch {
    /// The shape as a readable id.
    pub case: String,
    /// Name of the kernel.
    pub symbol: String,
    /// Useful floating-point operations.
    pub flops: f64,
    /// Fewest bytes of device memory: every input and every output once.
    pub bytes: f64,
    /// Bytes of operands that the SMs fetch from L2.
    pub l2_bytes: f64,
    /// Exponentials.
    pub exps: f64,
}

impl Launch {
    /// Finds the JSON line in the mixed output of ncu and the program.
    pub fn find(text: &str) -> Option<Self> {
        let lines = text.lines().map(str::trim).filter(|line| line.starts_with('{'));
        lines
            .filter_map(|line| serde_json::from_str::<Self>(line).ok())
            .find(|launch| !launch.symbol.is_empty())
    }

    /// Type of the inputs, which ends the id.
    pub fn dtype(&self) -> &str {
        self.case.rsplit('_').next().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_found() {
        let text = r#"==PROF== Connected
{"other": 1}
{"case":"b1_s64_h1_d64_full_f16","symbol":"blockflash_x","flops":1048576,"bytes":3e4,"new":[]}
==PROF== Disconnected
"#;
        let launch = Launch::find(text).unwrap();
        assert_eq!((launch.flops, launch.bytes, launch.exps), (1048576.0, 30000.0, 0.0));
        assert_eq!(launch.dtype(), "f16");
        assert_eq!(Launch::find("==PROF== {"), None);
    }
}
