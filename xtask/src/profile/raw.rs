//! The table of `ncu --page raw --csv --print-units base`: a line of names, a line of units, a line
//! of values for each launch.

use anyhow::{Context, Result};
use std::collections::BTreeMap;

/// What the page needs besides the predefined set "full"; what a GPU does not count is left out.
pub const WANTED: &[&str] = &[
    "dram__bytes.sum.peak_sustained",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__cycles_elapsed.avg.per_second",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "l1tex__m_l1tex2xbar_write_bytes.sum",
    "l1tex__m_xbar2l1tex_read_bytes.sum",
    "l1tex__t_bytes.sum",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum",
    "lts__cycles_elapsed.avg.per_second",
    "lts__t_bytes.sum",
    "lts__t_bytes.sum.peak_sustained",
    "sm__cycles_elapsed.avg.per_second",
    "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "sm__ops_path_tensor_src_bf16_dst_fp32_sparsity_off.sum.peak_sustained",
    "sm__ops_path_tensor_src_fp16_dst_fp32_sparsity_off.sum.peak_sustained",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
];

/// The numbers of one launch in seconds, bytes, hertz and per cent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Raw(BTreeMap<String, f64>);

impl Raw {
    /// The first of some metrics that was reported.
    pub fn first(&self, names: &[&str]) -> Option<f64> {
        names.iter().find_map(|name| self.0.get(*name).copied())
    }

    /// Metrics whose name begins and ends so, by what stands between.
    pub fn between<'a>(
        &'a self,
        prefix: &'a str,
        suffix: &'a str,
    ) -> impl Iterator<Item = (&'a str, f64)> {
        let middle = move |name: &'a str| name.strip_prefix(prefix)?.strip_suffix(suffix);
        self.0.iter().filter_map(move |(name, &value)| Some((middle(name)?, value)))
    }
}

/// Reads the numbers of a kernel's first launch.
pub fn parse(csv: &str, symbol: &str) -> Result<Raw> {
    // ncu may print notes of its own around the table.
    let mut lines =
        csv.lines().map(fields).skip_while(|cells| cells.first().is_none_or(|cell| cell != "ID"));
    let (names, units) = (lines.next(), lines.next());
    let (names, units) = names.zip(units).context("ncu printed no table of metrics")?;
    let column = names
        .iter()
        .position(|name| name == "Kernel Name")
        .context("ncu's table names no kernels")?;
    let is_it = |cells: &Vec<String>| cells.get(column).is_some_and(|name| name.contains(symbol));
    let values =
        lines.find(is_it).with_context(|| format!("ncu's report has no launch of {symbol}"))?;
    let number = |((name, unit), value): ((String, String), String)| {
        let number: f64 = value.replace(',', "").parse().ok()?;
        Some((name, number * scale(&unit)))
    };
    Ok(Raw(names.into_iter().zip(units).zip(values).filter_map(number).collect()))
}

/// The cells of a line; a quote inside a quoted cell is doubled.
fn fields(line: &str) -> Vec<String> {
    let mut cells = vec![String::new()];
    let (mut quoted, mut before) = (false, ' ');
    for c in line.trim_end_matches('\r').chars() {
        match c {
            '"' => {
                if !quoted && before == '"' {
                    cells.last_mut().expect("there is always a cell").push('"');
                }
                quoted = !quoted;
            }
            ',' if !quoted => cells.push(String::new()),
            _ => cells.last_mut().expect("there is always a cell").push(c),
        }
        before = c;
    }
    cells
}

/// How many seconds, bytes or hertz a unit is; 1 for what is none of them, like per cent and
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
        let value = |name| raw.first(&[name]);
        assert_eq!(value("gpu__time_duration.sum"), Some(500e-6));
        assert_eq!(value("dram__bytes_read.sum"), Some(200e6));
        assert_eq!(value("sm__cycles_elapsed.avg.per_second"), Some(1.75e9));
        assert_eq!(value("launch__registers_per_thread"), Some(255.0));
        assert_eq!(value("launch__func_cache_config"), None, "words are no numbers");
        assert_eq!(raw.first(&["absent", "dram__bytes_write.sum"]), Some(50e6));
        let stalls = raw.between("smsp__average_warps_issue_stalled_", "_per_issue_active.ratio");
        assert_eq!(stalls.filter(|(reason, _)| *reason == "wait").count(), 1);
    }

    #[test]
    fn a_report_without_the_kernel_is_refused() {
        assert!(parse(CSV, "another").unwrap_err().to_string().contains("no launch of another"));
        assert!(parse("==ERROR== x", "k").unwrap_err().to_string().contains("no table"));
    }

    #[test]
    fn cells_may_hold_commas_and_quotes() {
        assert_eq!(fields(r#""a, ""b""",c,"","1,234.5""#), ["a, \"b\"", "c", "", "1,234.5"]);
    }

    #[test]
    fn units() {
        let scales = [
            "ns",
            "usecond",
            "Mbyte",
            "byte",
            "%",
            "",
            "inst",
            "Gbyte/s",
            "cycle/nsecond",
            "byte/cycle",
            "Ghz",
            "warp",
        ];
        let expected = [1e-9, 1e-6, 1e6, 1.0, 1.0, 1.0, 1.0, 1e9, 1e9, 1.0, 1e9, 1.0];
        for (unit, expected) in scales.iter().zip(expected) {
            assert!((scale(unit) / expected - 1.0).abs() < 1e-12, "{unit}");
        }
    }
}
