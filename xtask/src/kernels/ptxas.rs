//! Parses the output of `ptxas -v` for a kernel.

use anyhow::{Result, bail};

/// Resources of a compiled kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of spill stores plus spill loads, of the kernel and of every function it calls.
    pub spill_bytes: u32,
    /// Statically allocated shared memory in bytes.
    pub smem_static: u32,
}

/// Reads the output of `ptxas -v` for one kernel.
pub fn parse(text: &str) -> Result<Usage> {
    let mut usage = Usage::default();
    let mut kernels = 0;
    for line in text.lines() {
        let fields = line.trim().trim_start_matches("ptxas info").trim_start_matches([' ', ':']);
        for field in fields.split(',').map(str::trim) {
            let field = field.strip_prefix("Used ").unwrap_or(field);
            let Some((number, what)) = field.split_once(' ') else { continue };
            let Ok(number) = number.parse::<u32>() else { continue };
            match what {
                "registers" => {
                    kernels += 1;
                    usage.registers = number;
                }
                "bytes spill stores" | "bytes spill loads" => usage.spill_bytes += number,
                "bytes smem" => usage.smem_static = number,
                _ => {}
            }
        }
    }
    match kernels {
        1 => Ok(usage),
        _ => bail!("expected one kernel in the output of ptxas -v, found {kernels}:\n{text}"),
    }
}

/// Lines of the compiler's output that are not part of the resource report: warnings and errors.
pub fn complaints(text: &str) -> String {
    let is_report =
        |line: &&str| !line.starts_with("ptxas info") && !line.contains("bytes stack frame");
    text.lines().filter(is_report).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'blockflash_x' for 'sm_80'
ptxas info    : Function properties for blockflash_x
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 512 bytes smem, 480 bytes cmem[0]
ptxas info    : Compile time = 8.560 ms
";

    #[test]
    fn reads_registers_spills_and_shared_memory() {
        assert_eq!(
            parse(REPORT).unwrap(),
            Usage { registers: 168, spill_bytes: 36, smem_static: 512 }
        );
    }

    #[test]
    fn spills_of_called_functions_count() {
        let callee = "ptxas info    : Function properties for callee\n    \
            0 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n";
        assert_eq!(parse(&format!("{callee}{REPORT}")).unwrap().spill_bytes, 44);
    }

    #[test]
    fn shared_memory_may_be_absent() {
        let report = "ptxas info    : Used 10 registers, used 0 barriers, 400 bytes cmem[0]";
        assert_eq!(parse(report).unwrap(), Usage { registers: 10, ..Usage::default() });
    }

    #[test]
    fn an_image_holds_exactly_one_kernel() {
        assert!(parse("").is_err());
        assert!(parse(&format!("{REPORT}{REPORT}")).is_err());
    }

    #[test]
    fn complaints_are_what_is_left() {
        let text = format!("{REPORT}a.cu(3): error: expected a \";\"");
        assert_eq!(complaints(&text), "a.cu(3): error: expected a \";\"");
    }
}
