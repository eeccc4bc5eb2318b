//! Charts of block masks: the visited blocks, and the lengths of rows.

use super::draw::WIDTH;
use super::{Axis, CEILING, Cells, Chart, ChartError, Line, Panel, group};
use blockflash_ops::{BlockMask, Mask};

/// Maximum number of heads in one chart.
pub const MAX_SHOWN: usize = 16;
/// Narrower cells would blur.
const CELL: f64 = 1.5;

/// Content of a chart of a mask.
#[derive(Clone, Copy, Debug)]
pub struct MaskPicture<'a> {
    /// The mask, on the CPU.
    pub mask: &'a BlockMask,
    /// Name of the mask.
    pub name: &'a str,
    /// Batch entries and heads to show, at most [`MAX_SHOWN`], one panel each.
    pub shown: &'a [[usize; 2]],
}

impl MaskPicture<'_> {
    /// One panel per head; a single head also gets a panel with the lengths of its rows.
    ///
    /// # Errors
    /// [`ChartError::Heads`] if none or too many are shown, [`ChartError::NoHead`],
    /// [`ChartError::Mask`] for a mask that is not on the CPU.
    pub fn draw(&self) -> Result<Chart, ChartError> {
        let mask = self.mask;
        let columns = match self.shown.len() {
            count if count == 0 || count > MAX_SHOWN => return Err(ChartError::Heads(count)),
            1..=4 => 2,
            5..=9 => 3,
            _ => 4,
        };
        let width = f64::from(WIDTH) / columns as f64 - if columns == 2 { 86.0 } else { 64.0 };
        let aspect = mask.seqlen_q() as f64 / mask.seqlen_kv().max(1) as f64;
        let height = width * aspect.clamp(0.25, 1.5);
        let blocks = |blocks: usize, pixels: f64| blocks.div_ceil((pixels / CELL) as usize).max(1);
        let behind = [blocks(mask.rows(), height), blocks(mask.cols(), width)];
        let heads = self.shown.iter().map(|&at| self.panels(at, behind, columns == 2));
        let mut panels = heads.collect::<Result<Vec<_>, _>>()?.concat();
        if self.shown.len() > 1 {
            panels = panels.into_iter().step_by(2).collect(); // without the lengths of rows
        }
        let keys = match behind {
            [1, 1] if mask.bits().is_some() => vec![
                ("all pairs of a block visible".to_owned(), Cells::SHADES),
                ("few of them".to_owned(), 1),
                ("not visited".to_owned(), 0),
            ],
            [1, 1] => vec![("visited".to_owned(), Cells::SHADES), ("not visited".to_owned(), 0)],
            [rows, columns] => vec![
                (format!("all of {rows} × {columns} blocks visited"), Cells::SHADES),
                ("one of them".to_owned(), 1),
                ("none".to_owned(), 0),
            ],
        };
        let key = |(name, shade)| Line { name, style: Cells::key(shade), ..Line::default() };
        panels[0].lines = keys.into_iter().map(key).collect();
        let (title, subtitle) = self.words(columns == 2)?;
        Ok(Chart { title, subtitle, panels, columns, panel_height: height as u32 + 68 })
    }

    fn words(&self, named: bool) -> Result<(String, String), ChartError> {
        const LONGEST: usize = 44;
        let (mask, shown) = (self.mask, self.shown.len());
        let name = match self.name.char_indices().nth(LONGEST) {
            Some((end, _)) => format!("{}...", &self.name[..end]),
            None => self.name.to_owned(),
        };
        let (density, imbalance) = (percent(mask.density()), mask.imbalance()?);
        let groups = match [mask.batch(), mask.heads()] {
            [1, 1] => String::new(),
            [1, heads] => format!(" · {shown} of {heads} heads"),
            [batch, heads] => format!(" · {shown} of {batch} × {heads} batch entries and heads"),
        };
        let axes = if named { "" } else { " · queries downwards, keys to the right" };
        let [q, kv] = [mask.seqlen_q(), mask.seqlen_kv()].map(length);
        Ok((
            format!("{name}: density {density}, {} blocks, imbalance {imbalance:.2}", mask.nnz()),
            format!(
                "{q} × {kv} tokens in blocks of {} × {}{groups} · imbalance: longest row / mean \
                 row{axes}",
                mask.block_q(),
                mask.block_kv()
            ),
        ))
    }

    /// The blocks of a head, and the lengths of its rows. A cell represents `behind` blocks of
    /// queries and of keys.
    fn panels(
        &self,
        [batch, head]: [usize; 2],
        behind: [usize; 2],
        named: bool,
    ) -> Result<[Panel; 2], ChartError> {
        let mask = self.mask;
        if batch >= mask.batch() || head >= mask.heads() {
            return Err(ChartError::NoHead { batch, head, has: [mask.batch(), mask.heads()] });
        }
        let [rows, columns] =
            [mask.rows().div_ceil(behind[0]).max(1), mask.cols().div_ceil(behind[1]).max(1)];
        // Blocks of a cell, of a partial one the share of its pairs that are visible.
        let mut visited = vec![0f64; rows * columns];
        let mut lengths = Vec::new();
        for row in 0..mask.rows() {
            let blocks = mask.row_pairs(batch, head, row, Mask::Full)?;
            let first = row / behind[0] * columns;
            lengths.push(blocks.len());
            let geometry = mask.sequences().map_or(mask.geometry(), |sequences| sequences[batch]);
            for (block, pairs) in blocks {
                let all = geometry.queries(row).len() * geometry.keys(block).len();
                visited[first + block / behind[1]] += pairs as f64 / all as f64;
            }
        }
        let shade = |(at, &visited): (usize, &f64)| {
            // Cells at the ends represent fewer blocks.
            let left = |blocks: usize, at: usize, behind: usize| behind.min(blocks - at * behind);
            let there = left(mask.rows().max(1), at / columns, behind[0])
                * left(mask.cols().max(1), at % columns, behind[1]);
            // The square root keeps a single block among many visible.
            ((visited / there as f64).sqrt() * f64::from(Cells::SHADES)).ceil() as u8
        };
        let shades = visited.iter().enumerate().map(shade).collect();
        let axis = |label: &str, seqlen: usize, tokens: usize| {
            // Ticks at multiples of a power of two, of which there are few.
            let step = seqlen.div_ceil(if named { 4 } else { 2 }).next_power_of_two();
            let ticks = (0..=seqlen).step_by(step).map(|at| (at as f64, length(at))).collect();
            let label = if named { label.to_owned() } else { String::new() };
            Axis { label, high: tokens as f64, ticks, ..Axis::default() }
        };
        let down = axis("query", mask.seqlen_q(), rows * behind[0] * mask.block_q());
        let y = Axis { low: down.high, high: down.low, ..down }; // the first query is at the top
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mean = lengths.iter().sum::<usize>() as f64 / lengths.len().max(1) as f64;
        let entry = if mask.batch() > 1 { format!("batch {batch}, ") } else { String::new() };
        let head = if mask.heads() > 1 { format!("head {head}: ") } else { String::new() };
        let density = percent(mean / mask.cols().max(1) as f64);
        let title = match self.shown.len() {
            1 => format!("{entry}{head}longest row {longest}"),
            2..=9 => format!("{entry}{head}{density}, longest row {longest}"),
            _ => format!("{entry}{head}{density}"),
        };
        let block = mask.block_q() as f64;
        let middle = |(row, &blocks): (usize, &usize)| (blocks as f64, (row as f64 + 0.5) * block);
        let points = lengths.iter().enumerate().map(middle).collect();
        let ends = vec![(mean, y.high), (mean, y.low)];
        let style = super::Style { marker: None, width: 2, ..group(1) };
        let of_rows = Line { points, style, ..Line::default() };
        Ok([
            Panel {
                title,
                x: axis("key", mask.seqlen_kv(), columns * behind[1] * mask.block_kv()),
                y: y.clone(),
                cells: Some(Cells { columns, shades }),
                ..Panel::default()
            },
            Panel {
                title: format!("blocks in each row: mean {mean:.1}"),
                x: Axis::from_zero("blocks", longest as f64),
                y: Axis { label: String::new(), ..y },
                lines: vec![
                    of_rows,
                    Line { name: "mean".into(), points: ends, style: CEILING, apart: false },
                ],
                ..Panel::default()
            },
        ])
    }
}

/// `16k` for 16384.
pub(crate) fn length(length: usize) -> String {
    match length % 1024 {
        0 if length > 0 => format!("{}k", length / 1024),
        _ => length.to_string(),
    }
}

/// A percentage with two significant digits.
fn percent(part: f64) -> String {
    let decimals = 1 + usize::from(part < 0.1) + usize::from(part < 0.01);
    format!("{:.decimals$} %", part * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockflash_ops::{Align, BlockGeometry};

    #[test]
    fn cells_are_blocks_or_many_blocks() {
        let geometry = BlockGeometry::new(512, 512, 64, 64).unwrap();
        let mask = BlockMask::window(geometry, Some(0), Some(0), Align::TopLeft).unwrap();
        let draw = |mask, shown| MaskPicture { mask, name: "m", shown }.draw();
        let chart = draw(&mask, &[[0, 0]]).unwrap();
        let cells = chart.panels[0].cells.as_ref().unwrap();
        let diagonal = |at: usize| if at.is_multiple_of(9) { Cells::SHADES } else { 0 };
        assert_eq!(cells.shades, (0..64).map(diagonal).collect::<Vec<_>>());
        assert_eq!(chart.panels[1].lines[0].points[7], (1.0, 480.0));
        assert!(chart.svg().unwrap().contains("M7 7h1v1h-1z"));
        assert!(matches!(draw(&mask, &[]), Err(ChartError::Heads(0))));
        // A causal mask of pairs: diagonal blocks are a little lighter than full ones.
        let causal = BlockMask::from_masks(geometry, &[Mask::causal()]).unwrap();
        let chart = draw(&causal, &[[0, 0]]).unwrap();
        let cells = chart.panels[0].cells.as_ref().unwrap();
        let half = ((65.0 / 128.0f64).sqrt() * f64::from(Cells::SHADES)).ceil() as u8;
        assert!(half < Cells::SHADES);
        assert_eq!(cells.shades[8..11], [Cells::SHADES, half, 0]);
        assert_eq!(chart.panels[0].lines[0].name, "all pairs of a block visible");
        let missing = draw(&mask, &[[0, 3]]).unwrap_err();
        assert!(missing.to_string().contains("1 heads, no head 3"), "{missing}");

        let geometry = BlockGeometry::new(1 << 17, 1 << 17, 64, 64).unwrap();
        let mask = BlockMask::window(geometry, Some(0), Some(0), Align::TopLeft).unwrap();
        let chart = draw(&mask, &[[0, 0]]).unwrap();
        let cells = chart.panels[0].cells.as_ref().unwrap();
        assert!(cells.columns < 300 && cells.shades[0] > 0 && cells.shades[1] == 0);
        assert!(chart.svg().unwrap().contains("blocks visited"));
    }
}
