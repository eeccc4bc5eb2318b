//! Plots of block masks: the visited blocks and the lengths of rows.

use super::drawing::Drawing;
use super::error::{MAX_SHOWN, PlotError};
use super::figure::{Axis, Cells, Figure, Line, Panel, length};
use super::style::{self, Marker, Style};
use blockflash_ops::BlockMask;

/// Width of a figure in pixels.
const WIDTH: f64 = 900.0;
/// Narrower cells would blur.
const CELL: f64 = 1.5;
/// Pixels of a panel besides its axes: margins, caption and labels.
const BESIDE: f64 = 24.0;
const ABOVE_AND_BELOW: f64 = 68.0;

/// Content of a plot of a mask.
#[derive(Clone, Copy, Debug)]
pub struct MaskPicture<'a> {
    /// The mask, on the CPU.
    pub mask: &'a BlockMask,
    /// Name of the mask.
    pub name: &'a str,
    /// Batch entries and heads to show, at most [`MAX_SHOWN`], one panel each.
    pub shown: &'a [[usize; 2]],
}

/// Rows of one head.
struct Head {
    title: String,
    rows: Vec<Vec<usize>>,
    longest: usize,
    mean: f64,
}

impl MaskPicture<'_> {
    /// Draws one panel per head; a single head also gets a panel with the lengths of its rows.
    ///
    /// # Errors
    /// [`PlotError::Heads`] if none or too many are shown, [`PlotError::NoHead`],
    /// [`PlotError::Mask`] for a mask that is not on the CPU.
    pub fn draw(&self) -> Result<Drawing, PlotError> {
        if self.shown.is_empty() || self.shown.len() > MAX_SHOWN {
            return Err(PlotError::Heads(self.shown.len()));
        }
        let heads =
            self.shown.iter().map(|&at| self.head(at)).collect::<Result<Vec<_>, PlotError>>()?;
        let columns = match heads.len() {
            0..=4 => 2,
            5..=9 => 3,
            _ => 4,
        };
        let y_labels = if columns == 2 { 62 } else { 40 };
        let width = WIDTH / columns as f64 - BESIDE - f64::from(y_labels);
        let aspect = self.mask.seqlen_q() as f64 / self.mask.seqlen_kv().max(1) as f64;
        let height = width * aspect.clamp(0.25, 1.5);
        let behind = [self.mask.rows(), self.mask.cols()];
        let behind = [
            behind[0].div_ceil((height / CELL) as usize),
            behind[1].div_ceil((width / CELL) as usize),
        ];
        let behind = behind.map(|blocks| blocks.max(1));
        let named = columns == 2;
        let mut panels: Vec<_> = heads.iter().map(|head| self.panel(head, behind, named)).collect();
        if let [head] = heads.as_slice() {
            panels.push(self.lengths(head, panels[0].y.clone()));
        }
        let figure = Figure {
            title: self.title()?,
            subtitle: self.subtitle(named),
            legend: legend(behind, heads.len() == 1),
            columns,
            panel_height: (height + ABOVE_AND_BELOW) as u32,
            y_labels,
            panels,
        };
        Ok(Drawing(figure))
    }

    fn title(&self) -> Result<String, PlotError> {
        const LONGEST: usize = 44;
        let name = match self.name.char_indices().nth(LONGEST) {
            Some((end, _)) => format!("{}...", &self.name[..end]),
            None => self.name.to_owned(),
        };
        Ok(format!(
            "{name}: density {}, {} blocks, imbalance {:.2}",
            percent(self.mask.density()),
            thousands(self.mask.nnz()),
            self.mask.imbalance()?
        ))
    }

    fn subtitle(&self, named: bool) -> String {
        let mask = self.mask;
        let groups = match [mask.batch(), mask.heads()] {
            [1, 1] => String::new(),
            [1, heads] => format!(" · {} of {heads} heads", self.shown.len()),
            [batch, heads] => {
                format!(" · {} of {batch} × {heads} batch entries and heads", self.shown.len())
            }
        };
        let sizes = [mask.seqlen_q(), mask.seqlen_kv()].map(length);
        let axes = if named { "" } else { " · queries downwards, keys to the right" };
        format!(
            "{} × {} tokens in blocks of {} × {}{groups} · imbalance: longest row / mean row{axes}",
            sizes[0],
            sizes[1],
            mask.block_q(),
            mask.block_kv()
        )
    }

    fn head(&self, [batch, head]: [usize; 2]) -> Result<Head, PlotError> {
        if batch >= self.mask.batch() || head >= self.mask.heads() {
            return Err(PlotError::NoHead { batch, head });
        }
        let row = |row| self.mask.row(batch, head, row).map(Iterator::collect);
        let rows = (0..self.mask.rows()).map(row).collect::<Result<Vec<Vec<usize>>, _>>()?;
        let visited: usize = rows.iter().map(Vec::len).sum();
        let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
        let mean = visited as f64 / rows.len().max(1) as f64;
        let entry = if self.mask.batch() > 1 { format!("batch {batch}, ") } else { String::new() };
        let head = if self.mask.heads() > 1 { format!("head {head}: ") } else { String::new() };
        let density = percent(mean / self.mask.cols().max(1) as f64);
        let title = match self.shown.len() {
            1 => format!("{entry}{head}longest row {longest}"),
            2..=9 => format!("{entry}{head}{density}, longest row {longest}"),
            _ => format!("{entry}{head}{density}"),
        };
        Ok(Head { title, rows, longest, mean })
    }

    /// `behind`: number of query blocks and of key blocks that a cell represents.
    fn panel(&self, head: &Head, behind: [usize; 2], named: bool) -> Panel {
        let geometry = self.mask.geometry();
        let [rows, columns] = [
            self.mask.rows().div_ceil(behind[0]).max(1),
            self.mask.cols().div_ceil(behind[1]).max(1),
        ];
        let mut visited = vec![0usize; rows * columns];
        for (row, blocks) in head.rows.iter().enumerate() {
            blocks
                .iter()
                .for_each(|block| visited[row / behind[0] * columns + block / behind[1]] += 1);
        }
        let shade = |(at, &visited): (usize, &usize)| {
            // Cells at the ends represent fewer blocks.
            let left = |blocks: usize, at: usize, behind: usize| behind.min(blocks - at * behind);
            let there = left(self.mask.rows().max(1), at / columns, behind[0])
                * left(self.mask.cols().max(1), at % columns, behind[1]);
            // The square root keeps a single block among many visible.
            ((visited as f64 / there as f64).sqrt() * f64::from(Cells::SHADES)).ceil() as u8
        };
        let shades = visited.iter().enumerate().map(shade).collect();
        let tokens_q = (rows * behind[0] * geometry.block_q()) as f64;
        let tokens_kv = (columns * behind[1] * geometry.block_kv()) as f64;
        let label = |text: &str| if named { text.to_owned() } else { String::new() };
        let ticks = |seqlen| positions(seqlen, if named { 4 } else { 2 });
        Panel {
            title: head.title.clone(),
            x: Axis {
                label: label("key"),
                low: 0.0,
                high: tokens_kv,
                ticks: ticks(geometry.seqlen_kv()),
            },
            // The first query is at the top.
            y: Axis {
                label: label("query"),
                low: tokens_q,
                high: 0.0,
                ticks: ticks(geometry.seqlen_q()),
            },
            cells: Some(Cells { columns, shades }),
            ..Panel::default()
        }
    }

    fn lengths(&self, head: &Head, y: Axis) -> Panel {
        let block = self.mask.block_q() as f64;
        let middle = |row: usize| (row as f64 + 0.5) * block;
        let points =
            head.rows.iter().enumerate().map(|(row, blocks)| (blocks.len() as f64, middle(row)));
        let mean = vec![(head.mean, y.high), (head.mean, y.low)];
        Panel {
            title: format!("blocks in each row: mean {:.1}", head.mean),
            x: Axis::from_zero("blocks", head.longest as f64),
            y: Axis { label: String::new(), ..y },
            lines: vec![
                Line { points: mean, style: style::CEILING, joined: true },
                Line { points: points.collect(), style: style::LENGTHS, joined: true },
            ],
            ..Panel::default()
        }
    }
}

fn legend(behind: [usize; 2], lengths: bool) -> Vec<(String, Style)> {
    let square = |shade| Style {
        colour: style::shade(shade),
        width: 0,
        dashed: false,
        marker: Some(Marker::Square),
    };
    let mut legend = match behind {
        [1, 1] => vec![
            ("visited".to_owned(), square(Cells::SHADES)),
            ("not visited".to_owned(), square(0)),
        ],
        [rows, columns] => vec![
            (format!("all of {rows} × {columns} blocks visited"), square(Cells::SHADES)),
            ("one of them".to_owned(), square(1)),
            ("none".to_owned(), square(0)),
        ],
    };
    if lengths {
        legend.push(("mean".to_owned(), style::CEILING));
    }
    legend
}

/// Ticks at multiples of a power of two, at most `steps + 1`.
fn positions(seqlen: usize, steps: usize) -> Vec<(f64, String)> {
    let step = seqlen.div_ceil(steps).next_power_of_two();
    (0..=seqlen).step_by(step.max(1)).map(|token| (token as f64, length(token))).collect()
}

/// A percentage with two significant digits.
fn percent(part: f64) -> String {
    let decimals = match part {
        part if part >= 0.1 => 1,
        part if part >= 0.01 => 2,
        _ => 3,
    };
    format!("{:.decimals$} %", part * 100.0)
}

fn thousands(value: usize) -> String {
    let digits = value.to_string();
    let pieces: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    pieces.join(",")
}

#[cfg(test)]
#[path = "mask_tests.rs"]
mod tests;
