//! Tables and numbers for people.

use blockflash_bench::io::printable;
pub use blockflash_bench::memory::{count, number, text as bytes};
use comfy_table::{Table, presets};
use std::fmt::Display;

/// Facts about one run, a line each.
#[derive(Default)]
pub struct Facts(Vec<[String; 2]>);

impl Facts {
    pub fn add(&mut self, name: &str, value: impl Display) {
        self.0.push([name.to_owned(), printable(&value.to_string())]);
    }
}

impl Display for Facts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED).add_rows(&self.0);
        table.fmt(f)
    }
}

/// A table with a header.
pub fn grid(header: &[&str], rows: Vec<Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header).add_rows(rows);
    table
}

/// `1.23 ms`.
pub fn time(us: f64) -> String {
    match us {
        us if us < 1e3 => format!("{} µs", number(us)),
        us if us < 1e6 => format!("{} ms", number(us / 1e3)),
        us => format!("{} s", number(us / 1e6)),
    }
}

/// `550 GFLOP`, `1.20 TFLOP`.
pub fn flops(flops: f64) -> String {
    match flops {
        flops if flops < 1e3 => format!("{flops:.0} FLOP"),
        flops if flops < 1e6 => format!("{} kFLOP", number(flops / 1e3)),
        flops if flops < 1e9 => format!("{} MFLOP", number(flops / 1e6)),
        flops if flops < 1e12 => format!("{} GFLOP", number(flops / 1e9)),
        flops => format!("{} TFLOP", number(flops / 1e12)),
    }
}
