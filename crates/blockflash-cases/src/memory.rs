//! Host memory: an allocation beyond it succeeds on Linux, and the process is killed when it fills
//! it.

use crate::error::{Error, Result};
pub use crate::words::{count, number, text};

/// Refuses work that needs more host memory than there is.
///
/// # Errors
/// [`Error::HostMemory`].
pub fn ensure(what: &str, bytes: u64) -> Result<()> {
    match available() {
        Some(available) if bytes > available => {
            Err(Error::HostMemory { what: what.to_owned(), needed: bytes, available })
        }
        _ => Ok(()),
    }
}

/// Bytes of these many elements, as large as can be counted.
pub fn size(shapes: &[&[usize]], element: usize) -> u64 {
    let bytes = |shape: &&[usize]| {
        shape.iter().fold(element as u64, |size, &dim| size.saturating_mul(dim as u64))
    };
    shapes.iter().map(bytes).fold(0, u64::saturating_add)
}

/// What the machine, and the container if it is one, still have; `None` where the system does not
/// say.
fn available() -> Option<u64> {
    let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    let read = |name: &str| std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let container = [
        ("memory.max", "memory.current", "memory.stat", "inactive_file "),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file ",
        ),
    ]
    .into_iter()
    .filter_map(|(limit, usage, details, cache)| {
        // File cache counts as used and is given back on demand.
        let reclaimable = read(details).and_then(|text| {
            text.lines().find_map(|line| line.strip_prefix(cache)?.trim().parse::<u64>().ok())
        });
        Some(number(limit)?.saturating_sub(number(usage)?.saturating_sub(reclaimable.unwrap_or(0))))
    });
    machine.into_iter().chain(container).min()
}
