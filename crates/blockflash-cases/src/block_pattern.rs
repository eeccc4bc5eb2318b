//! Block masks as text: `causal+window:8+sink:1`.

use crate::case::{Pattern, from_rows};
use blockflash_ops::{Align, BlockGeometry, BlockMask, Error, Mask};
use std::fmt;
use std::str::FromStr;

/// Description of a block mask: the union of some patterns, cut by a causal mask if one is named.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockPattern {
    text: String,
    parts: Vec<Part>,
    causal: bool,
}

/// A set of visited blocks. All sizes are counted in blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    Full,
    Window { left: Option<usize>, right: Option<usize> },
    Dilated { dilation: usize, left: Option<usize>, right: Option<usize> },
    Strided { stride: usize, local: usize },
    Sink(usize),
    Global(usize),
    Drawn { pattern: Pattern, density: f64 },
}

/// A word that is not understood, and the words that could stand there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a part of a pattern: expected full, causal, window:8 (blocks before and behind, \
     or window:8,0), dilated:2,4, strided:4,1, sink:1, global:2, uniform:0.25, random:0.25, \
     power_law:0.25, banded:0.25, full_rows:0.25, clustered:0.25, butterfly:0.25 or \
     paired:0.25, with + between them"
)]
pub struct PatternError(String);

impl FromStr for BlockPattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let (mut parts, mut causal) = (Vec::new(), false);
        for word in text.split('+').map(str::trim) {
            match word {
                "causal" => causal = true,
                _ => parts.push(part(word).ok_or_else(|| PatternError(word.to_owned()))?),
            }
        }
        if parts.is_empty() {
            parts.push(Part::Full);
        }
        Ok(Self { text: text.to_owned(), parts, causal })
    }
}

fn part(word: &str) -> Option<Part> {
    let (name, numbers) = word.split_once(':').unwrap_or((word, ""));
    let numbers: Vec<&str> = numbers.split(',').map(str::trim).collect();
    let count = |text: &str| text.parse::<usize>().ok();
    // `-` leaves this side unbounded.
    let side = |text: &str| if text == "-" { Some(None) } else { count(text).map(Some) };
    let drawn = |pattern| match numbers[..] {
        [density] => {
            let density =
                density.parse().ok().filter(|density| *density > 0.0 && *density <= 1.0)?;
            Some(Part::Drawn { pattern, density })
        }
        _ => None,
    };
    match (name, &numbers[..]) {
        ("full", [""]) => Some(Part::Full),
        ("window", [both]) => Some(Part::Window { left: side(both)?, right: side(both)? }),
        ("window", [left, right]) => Some(Part::Window { left: side(left)?, right: side(right)? }),
        ("dilated", [dilation, both]) => Some(Part::Dilated {
            dilation: count(dilation)?,
            left: side(both)?,
            right: side(both)?,
        }),
        ("dilated", [dilation, left, right]) => Some(Part::Dilated {
            dilation: count(dilation)?,
            left: side(left)?,
            right: side(right)?,
        }),
        ("strided", [stride, local]) => {
            Some(Part::Strided { stride: count(stride)?, local: count(local)? })
        }
        ("sink", [columns]) => Some(Part::Sink(count(columns)?)),
        ("global", [blocks]) => Some(Part::Global(count(blocks)?)),
        _ => drawn(Pattern::named(name)?),
    }
}

impl fmt::Display for BlockPattern {
    /// Writes the words from which the pattern was parsed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl BlockPattern {
    /// Mask inside the blocks: full, or causal with the last query aligned to the last key.
    pub fn token_mask(&self) -> Mask {
        if self.causal { Mask::causal() } else { Mask::Full }
    }

    /// Builds the mask for a number of heads. All heads are equal except for randomly drawn blocks.
    /// Blocks that the causal mask hides completely are not visited.
    ///
    /// # Errors
    /// As the library reports them: no heads, more sinks than columns, too many blocks.
    pub fn mask(
        &self,
        geometry: BlockGeometry,
        heads: usize,
        seed: u64,
    ) -> blockflash_ops::Result<BlockMask> {
        let align = Align::BottomRight;
        fits("heads * (rows + 1)", heads.checked_mul(geometry.rows() + 1))?;
        if heads == 0 {
            return BlockMask::from_parts(geometry, 1, heads, &[], &[]);
        }
        let mut mask: Option<BlockMask> = None;
        for (lane, part) in self.parts.iter().enumerate() {
            let visited = match *part {
                Part::Full => BlockMask::full(geometry)?,
                Part::Window { left, right } => BlockMask::window(geometry, left, right, align)?,
                Part::Dilated { dilation, left, right } => {
                    BlockMask::dilated(geometry, dilation, left, right, align)?
                }
                Part::Strided { stride, local } => {
                    BlockMask::strided(geometry, stride, local, align)?
                }
                Part::Sink(columns) => BlockMask::sink(geometry, columns)?,
                Part::Global(blocks) => {
                    // One block beyond the end is enough to trigger the error of the library.
                    let all = |count: usize| (0..blocks.min(count + 1)).collect::<Vec<_>>();
                    BlockMask::global(geometry, &all(geometry.rows()), &all(geometry.cols()))?
                }
                Part::Drawn { pattern, density } => {
                    drawn(geometry, heads, pattern, density, seed.wrapping_add(lane as u64))?
                }
            };
            mask = Some(match mask {
                Some(before) => before.union(&visited)?,
                None if visited.heads() == heads => visited,
                None => {
                    let none = vec![0; heads * (geometry.rows() + 1)];
                    BlockMask::from_parts(geometry, 1, heads, &none, &[])?.union(&visited)?
                }
            });
        }
        let mask = mask.map_or_else(|| BlockMask::full(geometry), Ok)?;
        if self.causal { mask.intersect_mask(self.token_mask()) } else { Ok(mask) }
    }
}

/// Counts are 32-bit; larger ones are refused before memory is allocated for them.
fn fits(what: &'static str, count: Option<usize>) -> blockflash_ops::Result<()> {
    let (value, limit) = (count.unwrap_or(usize::MAX), i32::MAX as usize);
    if value > limit { Err(Error::TooLarge { what, value, limit }) } else { Ok(()) }
}

/// A pattern of the benchmark cases, drawn separately for each head.
fn drawn(
    geometry: BlockGeometry,
    heads: usize,
    pattern: Pattern,
    density: f64,
    seed: u64,
) -> blockflash_ops::Result<BlockMask> {
    let (rows, cols) = (heads * geometry.rows(), geometry.cols());
    fits("nnz", rows.checked_mul(cols).map(|_| pattern.nnz_blocks(rows, cols, density)))?;
    let (row_ptr, col_idx) = pattern.draw(rows, cols, density, seed);
    from_rows(geometry, heads, &row_ptr, &col_idx)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> BlockGeometry {
        BlockGeometry::new(640, 640, 64, 64).unwrap()
    }

    fn rows(text: &str) -> Vec<Vec<usize>> {
        let pattern: BlockPattern = text.parse().unwrap();
        let mask = pattern.mask(geometry(), 1, 3).unwrap();
        (0..10).map(|row| mask.row(0, 0, row).unwrap().collect()).collect()
    }

    #[test]
    fn words_are_what_they_say() {
        let words = rows("causal+window:2+sink:1");
        assert_eq!(
            (&words[0][..], &words[2][..], &words[6][..]),
            (&[0][..], &[0, 1, 2][..], &[0, 4, 5, 6][..])
        );
        assert_eq!(rows("window:1")[4], [3, 4, 5]);
        assert_eq!(rows("window:-,0")[4], [0, 1, 2, 3, 4]);
        assert_eq!(rows("causal")[4], [0, 1, 2, 3, 4]);
        assert_eq!(rows("dilated:3,1,-")[4], [1, 4, 7]);
        assert_eq!(rows("strided:4,1")[5], [1, 4, 5, 6, 9]);
        assert_eq!(
            (rows("global:1")[0].len(), &rows(" global:1 + window:0 ")[7][..]),
            (10, &[0, 7][..])
        );
        assert!(rows("uniform:0.3").iter().all(|row| row.len() == 3));
        assert_eq!((rows("full_rows:0.1")[5].len(), rows("full_rows:0.1")[4].len()), (10, 0));
        assert_eq!(rows("full")[9].len(), 10);
        let pattern: BlockPattern = "causal+window:2".parse().unwrap();
        assert_eq!(
            (pattern.to_string().as_str(), pattern.token_mask()),
            ("causal+window:2", Mask::causal())
        );
    }

    #[test]
    fn heads_differ_in_what_is_drawn() {
        let pattern: BlockPattern = "sink:1+random:0.2".parse().unwrap();
        let mask = pattern.mask(geometry(), 2, 3).unwrap();
        let head = |head| {
            (0..10)
                .map(|row| mask.row(0, head, row).unwrap().collect::<Vec<_>>())
                .collect::<Vec<_>>()
        };
        assert!(mask.heads() == 2 && head(0) != head(1));
        assert!(head(0).iter().chain(&head(1)).all(|row| row[0] == 0));
        let again = pattern.mask(geometry(), 2, 3).unwrap();
        assert_eq!(again.to_bool().unwrap(), mask.to_bool().unwrap());
    }

    #[test]
    fn other_words_are_refused() {
        for text in [
            "",
            "windw:1",
            "window",
            "window:1,2,3",
            "window:x",
            "full:1",
            "uniform:0",
            "uniform:1.5",
            "sink:-1",
            "causal+",
        ] {
            let error = text.parse::<BlockPattern>().unwrap_err().to_string();
            assert!(error.contains("is not a part of a pattern"), "{text}: {error}");
            assert!(
                Pattern::ALL.iter().all(|pattern| error.contains(&format!(" {pattern}:"))),
                "{error}"
            );
        }
        let pattern = |text: &str| {
            text.parse::<BlockPattern>().unwrap().mask(geometry(), 1, 0).unwrap_err().to_string()
        };
        assert!(pattern("sink:11").contains("11 sink columns"));
        assert!(pattern("dilated:0,1").contains("dilation is 0"));
        assert!(pattern("global:99999999999999").contains("there are 10"));
        let long = BlockGeometry::new(1 << 16, 1 << 30, 64, 64).unwrap();
        let too_large = |text: &str, heads| {
            let pattern: BlockPattern = text.parse().unwrap();
            matches!(pattern.mask(long, heads, 0), Err(Error::TooLarge { .. }))
        };
        assert!(
            too_large("full", usize::MAX)
                && too_large("uniform:0.5", 1)
                && too_large("random:0.5", 2)
        );
        // They are counted before a row is made.
        for text in [
            "causal",
            "window:-",
            "dilated:1,-",
            "strided:1,0",
            "causal+window:-,0",
            "sink:9999999",
        ] {
            assert!(too_large(text, 1), "{text}");
        }
        let none = "full".parse::<BlockPattern>().unwrap().mask(geometry(), 0, 0);
        assert!(none.unwrap_err().to_string().contains("heads is 0"));
    }
}
