//! The text that is learned: sources of this package, byte by byte.

use blockflash_bench::{Error, Result, random};

/// Files of this package, so that the program needs none when it runs.
const SOURCES: &str = concat!(
    include_str!("../../README.md"),
    include_str!("../../../blockflash-cases/src/random.rs"),
    include_str!("../../src/timing.rs"),
    include_str!("../../../blockflash-cases/src/io/array.rs"),
    include_str!("../../../blockflash-cases/src/io/convert.rs"),
    include_str!("../../../blockflash-cases/src/io/npy.rs"),
    include_str!("../../../blockflash-cases/src/io/replace.rs"),
    include_str!("../../../blockflash-cases/src/io/safetensors.rs"),
    include_str!("../../../blockflash-cases/src/io/write.rs"),
    include_str!("../../src/plot/curves.rs"),
    include_str!("../../src/plot/density.rs"),
    include_str!("../../src/plot/drawing.rs"),
    include_str!("../../src/plot/figure.rs"),
    include_str!("../../src/plot/lengths.rs"),
    include_str!("../../src/plot/mask.rs"),
    include_str!("../../src/plot/ratio.rs"),
    include_str!("../../src/plot/render.rs"),
    include_str!("../../src/plot/roofline.rs"),
    include_str!("../../src/plot/series.rs"),
    include_str!("../../src/plot/speedup.rs"),
    include_str!("../../src/plot/style.rs"),
    include_str!("../../src/plot/tradeoff.rs"),
);

/// Number of bytes that there are, all of them equally likely for a network that knows nothing.
pub const BYTES: usize = 256;

/// One part in so many, at the end of the text, is held out.
const HELD_OUT: usize = 8;

/// Windows of a text: what a network reads, and what it is to predict.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The byte at each position, `[batch, seqlen]`.
    pub bytes: Vec<u8>,
    /// The byte before each position, likewise.
    pub before: Vec<u8>,
    /// The byte after each position, likewise.
    pub targets: Vec<u8>,
}

/// A text in two parts.
pub struct Text {
    learned: &'static [u8],
    held_out: &'static [u8],
}

impl Text {
    /// The sources.
    pub fn new() -> Self {
        let (learned, held_out) =
            SOURCES.as_bytes().split_at(SOURCES.len() - SOURCES.len() / HELD_OUT);
        Self { learned, held_out }
    }

    /// Windows to learn from, drawn anew for each step.
    ///
    /// # Errors
    /// Windows that are longer than the text.
    pub fn draw(&self, [batch, seqlen]: [usize; 2], seed: u64, step: u64) -> Result<Batch> {
        let starts = places(self.learned, seqlen)?;
        Ok(windows(self.learned, &random::choose(batch, starts, seed, step), seqlen))
    }

    /// Windows that are never learned from, evenly spread.
    ///
    /// # Errors
    /// Windows that are longer than the part that is held out.
    pub fn held_out(&self, [batch, seqlen]: [usize; 2]) -> Result<Batch> {
        let starts = places(self.held_out, seqlen)?;
        let starts: Vec<usize> = (0..batch).map(|at| at * (starts - 1) / batch.max(2)).collect();
        Ok(windows(self.held_out, &starts, seqlen))
    }

    /// Entropy of a byte of the text in bits: what a network loses that ignores all other bytes.
    pub fn entropy(&self) -> f64 {
        entropy(SOURCES.bytes().map(|byte| [byte, 0]))
    }

    /// Entropy of a byte in bits if the byte before it is known.
    pub fn entropy_after_a_byte(&self) -> f64 {
        let text = SOURCES.as_bytes();
        let before = entropy(text[1..].iter().map(|&byte| [byte, 0]));
        entropy(text.windows(2).map(|pair| [pair[0], pair[1]])) - before
    }
}

/// Number of places where a window can start: it has a byte before and one behind it.
fn places(text: &[u8], seqlen: usize) -> Result<usize> {
    let places = text.len().checked_sub(seqlen.saturating_add(1)).filter(|&places| places > 0);
    places.ok_or_else(|| Error::Option(format!("{} bytes have no window of {seqlen}", text.len())))
}

fn windows(text: &[u8], starts: &[usize], seqlen: usize) -> Batch {
    let shifted =
        |by: usize| starts.iter().flat_map(|&at| &text[at + by..][..seqlen]).copied().collect();
    Batch { before: shifted(0), bytes: shifted(1), targets: shifted(2) }
}

fn entropy(symbols: impl Iterator<Item = [u8; 2]>) -> f64 {
    let mut counts = vec![0u64; BYTES * BYTES];
    symbols.for_each(|[high, low]| counts[high as usize * BYTES + low as usize] += 1);
    let all = counts.iter().sum::<u64>() as f64;
    let parts = counts.iter().filter(|&&count| count > 0).map(|&count| count as f64 / all);
    -parts.map(|part| part * part.log2()).sum::<f64>()
}
