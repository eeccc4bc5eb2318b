//! Parses the output of nvdisasm.

use std::collections::BTreeMap;

/// Count of each opcode, without the padding at the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mix(BTreeMap<String, u64>);

impl Mix {
    /// Counts opcodes.
    pub fn of<'o>(opcodes: impl Iterator<Item = &'o str>) -> Self {
        let mut mix = Self::default();
        for opcode in opcodes.filter(|&opcode| opcode != "NOP") {
            *mix.0.entry(opcode.to_string()).or_default() += 1;
        }
        mix
    }

    /// Count of an opcode.
    pub fn count(&self, opcode: &str) -> u64 {
        self.0.get(opcode).copied().unwrap_or(0)
    }

    /// All instructions.
    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }
}

/// The opcodes of a listing, in its order.
pub fn opcodes(listing: &str) -> impl Iterator<Item = &str> {
    listing.lines().filter_map(opcode)
}

/// The opcode of a line, up to its first dot: `LDG` in
/// `/*0b30*/   @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;`.
fn opcode(line: &str) -> Option<&str> {
    let (address, instruction) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    if address.is_empty() || !address.chars().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut words = instruction.split_whitespace().filter(|word| !word.starts_with('@'));
    let word = words.next()?.trim_end_matches(';');
    let opcode = word.split('.').next()?;
    opcode.starts_with(|first: char| first.is_ascii_uppercase()).then_some(opcode)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = "\t.section\t.text.blockflash_x,\"ax\",@progbits
.text.blockflash_x:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR6][R2.64] ;
        /*0020*/              @UP0 UTMALDG.2D [UR8], [UR4] ;
.L_x_1:
        /*0030*/                   HMMA.16816.F32 R8, R4, R2, R8 ;
        /*0040*/                   HMMA.16816.F32.BF16 R8, R4, R2, R8 ;
        /*0050*/                   EXIT ;
        /*0060*/                   BRA `(.L_x_1);
        /*0070*/                   NOP;
";

    #[test]
    fn opcodes_are_counted_without_predicates_and_suffixes() {
        let mix = Mix::of(opcodes(LISTING));
        assert_eq!(mix.count("HMMA"), 2);
        assert_eq!(
            [mix.count("LDG"), mix.count("UTMALDG"), mix.count("BRA"), mix.count("NOP")],
            [1, 1, 1, 0]
        );
        assert_eq!((mix.count("LD"), mix.total()), (0, 7));
    }

    #[test]
    fn comments_and_labels_are_no_instructions() {
        assert_eq!(opcode("  /* why */ HMMA"), None);
        assert_eq!(opcode(".L_x_1:"), None);
        assert_eq!(opcode("/*0000*/"), None);
    }
}
