//! What an image says about its kernels: the size of the parameter struct.

use std::ffi::CStr;

/// The attribute of a kernel that describes one parameter (`EIATTR_KPARAM_INFO`): 12 bytes, whose
/// last word has the size in its upper bits.
const PARAM_INFO: [u8; 4] = [4, 0x17, 12, 0];
const SIZE_SHIFT: u32 = 18;

/// Bytes of the parameters of a kernel; `None` if the image lacks it.
///
/// # Safety
/// `image` is a complete ELF file, or PTX that ends with a NUL.
pub(crate) unsafe fn param_bytes(image: *const u8, symbol: &str) -> Option<usize> {
    // SAFETY: the shorter of the two is longer than the mark of an ELF file.
    if unsafe { std::slice::from_raw_parts(image, 4) } == b"\x7fELF" {
        // SAFETY: the caller's promise; the sections are before the headers of sections, or behind
        // them up to the end that `elf_bytes` finds.
        let file = unsafe { std::slice::from_raw_parts(image, elf_bytes(image)) };
        return of_cubin(file, symbol);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_str().ok()?;
    let (_, rest) = text.split_once(&format!(" {symbol}_param_0["))?;
    rest.split_once(']')?.0.parse().ok()
}

fn word(file: &[u8], at: usize, bytes: usize) -> usize {
    file[at..at + bytes].iter().rev().fold(0, |word, &byte| word << 8 | usize::from(byte))
}

/// Headers of sections: where they start, bytes of each, number, and the one of the names.
fn headers(start: &[u8]) -> [usize; 4] {
    [word(start, 0x28, 8), word(start, 0x3a, 2), word(start, 0x3c, 2), word(start, 0x3e, 2)]
}

/// Bytes of a file of sections.
///
/// # Safety
/// As [`param_bytes`].
unsafe fn elf_bytes(image: *const u8) -> usize {
    // SAFETY: an ELF file has a header of 64 bytes.
    let [at, size, count, _] = headers(unsafe { std::slice::from_raw_parts(image, 64) });
    at + size * count
}

fn of_cubin(file: &[u8], symbol: &str) -> Option<usize> {
    let [at, size, count, names] = headers(file);
    let section = |index: usize| {
        let header = at + index * size;
        [word(file, header, 4), word(file, header + 0x18, 8), word(file, header + 0x20, 8)]
    };
    let wanted = format!(".nv.info.{symbol}\0");
    let [_, start, bytes] = (0..count)
        .map(section)
        .find(|[name, ..]| file[section(names)[1] + name..].starts_with(wanted.as_bytes()))?;
    let mut at = start;
    while at < start + bytes {
        if file[at..at + 4] == PARAM_INFO {
            return Some(word(file, at + 12, 4) >> SIZE_SHIFT);
        }
        // Attributes of format 4 are followed by as many bytes as their value says.
        at += if file[at] == 4 { 4 + word(file, at + 2, 2) } else { 4 };
    }
    None
}
