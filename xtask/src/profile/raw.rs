//! The table of `ncu --page raw --csv --print-units base`: a line of names, a line of units, a line
//! of values for each launch.

use anyhow::{Context, Result};
use csv::StringRecord;
use std::collections::BTreeMap;

/// Metrics of one launch in seconds, bytes, hertz and per cent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Raw(BTreeMap<String, f64>);

impl Raw {
    /// A metric, if it was reported.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).copied()
    }

    /// Metrics whose names have the given prefix and suffix, keyed by the part in between.
    pub fn between<'a>(
        &'a self,
        prefix: &'a str,
        suffix: &'a str,
    ) -> impl Iterator<Item = (&'a str, f64)> {
        let middle = move |name: &'a str| name.strip_prefix(prefix)?.strip_suffix(suffix);
        self.0.iter().filter_map(move |(name, &value)| Some((middle(name)?, value)))
    }
}

/// Parses the metrics of a kernel's first launch.
pub fn parse(csv: &str, symbol: &str) -> Result<Raw> {
    // ncu may print notes of its own before the table.
    let table = &csv[csv.find("\"ID\",").context("ncu printed no table of metrics")?..];
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(table.as_bytes());
    let names = reader.headers()?.clone();
    let column = names.iter().position(|name| name == "Kernel Name");
    let column = column.context("ncu's table names no kernels")?;
    let mut lines = reader.records();
    let units = lines.next().context("ncu's table has no units")??;
    let is_it = |line: &csv::Result<StringRecord>| {
        line.as_ref().is_ok_and(|cells| cells.get(column).is_some_and(|name| name.contains(symbol)))
    };
    let values =
        lines.find(is_it).with_context(|| format!("ncu's report has no launch of {symbol}"))??;
    let number = |((name, unit), value): ((&str, &str), &str)| {
        let number: f64 = value.replace(',', "").parse().ok()?;
        Some((name.to_string(), number * scale(unit)))
    };
    Ok(Raw(names.iter().zip(&units).zip(&values).filter_map(number).collect()))
}

/// Factor from a unit to seconds, bytes or hertz; 1 for any other unit, such as per cent and
/// instructions.
fn scale(unit: &str) -> f64 {
    if let Some((above, below)) = unit.split_once('/') {
        return scale(above) / scale(below);
    }
    let prefix = |name: &str| match unit.strip_suffix(name) {
        Some("n") => Some(1e-9),
        Some("u") => Some(1e-6),
        Some("m") => Some(1e-3),
        Some("K" | "k") => Some(1e3),
        Some("M") => Some(1e6),
        Some("G") => Some(1e9),
        Some("T") => Some(1e12),
        _ => None,
    };
    ["second", "sec", "byte", "hz", "Hz", "s"].iter().find_map(|name| prefix(name)).unwrap_or(1.0)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The layout that the documentation of Nsight Compute describes, with made-up numbers.
    pub(in super::super) const CSV: &str = include_str!("sample.csv");

    #[test]
    fn numbers_have_base_units() {
        let raw = parse(CSV, "blockflash_sample").unwrap();
        let value = |name| raw.get(name);
        assert_eq!(value("gpu__time_duration.sum"), Some(500e-6));
        assert_eq!(value("dram__bytes_read.sum"), Some(200e6));
        assert_eq!(value("sm__cycles_elapsed.avg.per_second"), Some(1.75e9));
        assert_eq!(value("launch__registers_per_thread"), Some(255.0));
        assert_eq!(value("launch__func_cache_config"), None, "words are no numbers");
        assert_eq!((value("absent"), value("dram__bytes_write.sum")), (None, Some(50e6)));
        let stalls = raw.between("smsp__average_warps_issue_stalled_", "_per_issue_active.ratio");
        assert_eq!(stalls.filter(|(reason, _)| *reason == "wait").count(), 1);
    }

    #[test]
    fn a_report_without_the_kernel_is_refused() {
        assert!(parse(CSV, "another").unwrap_err().to_string().contains("no launch of another"));
        assert!(parse("==ERROR== x", "k").unwrap_err().to_string().contains("no table"));
    }

    #[test]
    fn units() {
        let scales = "ns usecond Mbyte byte % inst Gbyte/s cycle/nsecond byte/cycle Ghz warp";
        let expected = [1e-9, 1e-6, 1e6, 1.0, 1.0, 1.0, 1e9, 1e9, 1.0, 1e9, 1.0];
        assert_eq!(scale(""), 1.0);
        for (unit, expected) in scales.split(' ').zip(expected) {
            assert!((scale(unit) / expected - 1.0).abs() < 1e-12, "{unit}");
        }
    }
}
