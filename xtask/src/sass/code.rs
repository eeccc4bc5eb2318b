//! The machine code of an image, by the ELF format.

use anyhow::{Context, Result};
use std::ops::Range;

/// One instruction of Volta and newer.
pub type Instruction = [u8; 16];

/// Flag of a section that holds instructions (`SHF_EXECINSTR`).
const EXECUTABLE: u64 = 4;

/// Every instruction of an image, section after section.
pub fn instructions(image: &[u8]) -> Result<Vec<Instruction>> {
    let code = sections(image).context("it is no complete ELF file")?;
    Ok(code.concat().as_chunks().0.to_vec())
}

/// The content of the sections with instructions.
fn sections(image: &[u8]) -> Option<Vec<&[u8]>> {
    let number = |at: Range<usize>| {
        let bytes = image.get(at)?.iter().rev();
        Some(bytes.fold(0_u64, |number, &byte| number << 8 | u64::from(byte)))
    };
    let headers = number(0x28..0x30)? as usize;
    let (size, count) = (number(0x3a..0x3c)? as usize, number(0x3c..0x3e)? as usize);
    let mut found = Vec::new();
    for header in (0..count).map(|index| headers + index * size) {
        if number(header + 8..header + 16)? & EXECUTABLE != 0 {
            let start = number(header + 24..header + 32)? as usize;
            let length = number(header + 32..header + 40)? as usize;
            found.push(image.get(start..start.checked_add(length)?)?);
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_with_instructions() {
        // Two section headers of 64 bytes follow the header of the file, then their content.
        let mut image = vec![0; 192];
        image[0x28] = 64;
        image[0x3a] = 64;
        image[0x3c] = 2;
        let (data, code) = (64, 128);
        (image[data + 8], image[data + 24], image[data + 32]) = (2, 192, 16);
        (image[code + 8], image[code + 24], image[code + 32]) = (6, 208, 32);
        image.extend([[1; 16], [2; 16], [3; 16]].concat());
        assert_eq!(instructions(&image).unwrap(), [[2; 16], [3; 16]]);
        assert!(instructions(&image[..239]).is_err());
        assert!(instructions(&image[..63]).is_err());
    }
}
