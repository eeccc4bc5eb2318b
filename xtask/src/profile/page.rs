//! One page of text about one launch.

use super::measurement::{DURATION, HBM_READ, HBM_WRITE, L2_READ, Measurement, TENSOR_PIPE, ratio};
use crate::workspace::table;

/// Number of stall reasons that are shown.
const STALLS_SHOWN: usize = 6;

/// Source of the number in a line. If several counters are given, the first that the GPU has is
/// used: their names depend on the architecture.
enum From {
    /// A metric in this unit.
    Metric(&'static str, &'static str),
    /// A counter in per cent of its peak while the SMs are active.
    Active(&'static [&'static str]),
    /// A counter in per cent of its peak over the whole duration.
    Elapsed(&'static [&'static str]),
    /// Computed from the counted work, the metrics and the ceilings, in this unit.
    Derived(&'static str, fn(&Measurement) -> Option<f64>),
}
use From::{Active, Derived, Elapsed, Metric};

impl From {
    /// The metrics that it reads.
    fn metrics(&self) -> Vec<String> {
        let all = |counters: &[&str], suffix| {
            counters
                .iter()
                .map(|name| format!("{name}.avg.pct_of_peak_sustained_{suffix}"))
                .collect()
        };
        match self {
            Metric(_, name) => vec![name.to_string()],
            Active(counters) => all(counters, "active"),
            Elapsed(counters) => all(counters, "elapsed"),
            Derived(..) => Vec::new(),
        }
    }

    fn shown(&self, measurement: &Measurement) -> Option<String> {
        let first = || self.metrics().iter().find_map(|name| measurement.raw.get(name));
        match self {
            Metric(unit, _) => first().map(|value| shown(value, unit)),
            Active(_) | Elapsed(_) => first().map(|value| shown(value, "%")),
            Derived(unit, value) => value(measurement).map(|value| shown(value, unit)),
        }
    }
}

/// Headings, each with its labelled lines.
const PAGE: &[(&str, &[(&str, From)])] = &[
    ("time", TIME),
    ("utilisation", UTILISATION),
    ("occupancy", OCCUPANCY),
    ("memory", MEMORY),
    ("shared memory", SHARED),
];

const TIME: &[(&str, From)] = &[
    ("duration", Metric("s", DURATION)),
    ("SM clock", Metric("Hz", "sm__cycles_elapsed.avg.per_second")),
    ("useful operations", Derived("FLOP/s", Measurement::flop_rate)),
    ("  attainable", Derived("FLOP/s", Measurement::attainable)),
    ("exponentials", Derived("exp/s", |p| p.rate(p.launch.exps).filter(|&rate| rate > 0.0))),
];

const UTILISATION: &[(&str, From)] = &[
    ("tensor pipe", Active(TENSOR_PIPE)),
    ("  WGMMA instructions issued", Active(&["sm__inst_executed_pipe_tensor_op_gmma"])),
    ("issue slots", Active(&["smsp__issue_active", "sm__issue_active", "sm__inst_issued"])),
    ("special functions", Active(&["sm__inst_executed_pipe_xu", "sm__pipe_xu_cycles_active"])),
    ("FMA pipe", Active(&["sm__pipe_fma_cycles_active", "sm__inst_executed_pipe_fma"])),
    ("ALU pipe", Active(&["sm__pipe_alu_cycles_active", "sm__inst_executed_pipe_alu"])),
    (
        "shared-memory pipe",
        Elapsed(&["l1tex__data_pipe_lsu_wavefronts", "l1tex__lsu_writeback_active"]),
    ),
    ("L2 throughput", Elapsed(&["lts__t_sectors", "lts__throughput"])),
    ("device memory throughput", Elapsed(&["dram__throughput", "gpu__dram_throughput"])),
];

const OCCUPANCY: &[(&str, From)] = &[
    ("achieved", Active(&["sm__warps_active"])),
    ("theoretical", Metric("%", "sm__maximum_warps_per_active_cycle_pct")),
    ("waves", Metric("", "launch__waves_per_multiprocessor")),
    ("CTAs that registers allow", Metric("", "launch__occupancy_limit_registers")),
    ("CTAs that shared memory allows", Metric("", "launch__occupancy_limit_shared_mem")),
    ("CTAs that warps allow", Metric("", "launch__occupancy_limit_warps")),
    ("registers per thread", Metric("", "launch__registers_per_thread")),
    ("shared memory per CTA", Metric("B", "launch__shared_mem_per_block")),
    ("spill loads", Metric("B", "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum")),
    ("spill stores", Metric("B", "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum")),
];

const MEMORY: &[(&str, From)] = &[
    ("L2 to SMs", Metric("B", L2_READ)),
    ("  counted", Derived("B", |p| Some(p.launch.l2_bytes).filter(|&bytes| bytes > 0.0))),
    ("  rate", Derived("B/s", |p| p.rate(p.l2_bytes()?))),
    ("  hit rate of L2", Metric("%", "lts__t_sector_hit_rate.pct")),
    ("SMs to L2", Metric("B", "l1tex__m_l1tex2xbar_write_bytes.sum")),
    ("device memory, read", Metric("B", HBM_READ)),
    ("device memory, written", Metric("B", HBM_WRITE)),
    ("  counted minimum of both", Derived("B", |p| Some(p.launch.bytes).filter(|&b| b > 0.0))),
    ("  rate of both", Derived("B/s", |p| p.rate(p.hbm_bytes()?))),
];

const SHARED: &[(&str, From)] = &[
    ("wavefronts", Metric("", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum")),
    ("bank conflicts", Metric("", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum")),
    ("  in loads", Metric("", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum")),
    ("  in stores", Metric("", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum")),
];

/// Every metric that the page shows by name.
pub fn metrics() -> impl Iterator<Item = String> {
    PAGE.iter().flat_map(|(_, lines)| *lines).flat_map(|(_, from)| from.metrics())
}

/// The page.
pub fn text(measurement: &Measurement) -> String {
    let mut rows = Vec::new();
    for (heading, lines) in PAGE {
        rows.push([heading.to_string(), String::new()]);
        rows.extend(lines.iter().map(|(label, from)| {
            [format!("  {label}"), from.shown(measurement).unwrap_or("not reported".into())]
        }));
    }
    rows.push(["stalls, cycles per instruction".into(), String::new()]);
    let reasons =
        measurement.raw.between("smsp__average_warps_issue_stalled_", "_per_issue_active.ratio");
    // A warp in the state `selected` issues an instruction, so it is not stalled.
    let mut reasons: Vec<_> = reasons.filter(|(reason, _)| *reason != "selected").collect();
    reasons.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    rows.extend(reasons.into_iter().take(STALLS_SHOWN).map(|(reason, cycles)| {
        [format!("  {}", reason.replace('_', " ")), format!("{cycles:.2}")]
    }));
    let Measurement { gpu, images, launch, ceilings, .. } = measurement;
    let attained = || ratio(100.0 * measurement.flop_rate()?, measurement.attainable());
    let conclusion = match measurement.limit().zip(attained()) {
        Some((limit, attained)) => format!(
            "{attained:.0} % of the attainable; the limit is {} (ceilings {})",
            limit.name, ceilings.origin
        ),
        None => "no ceilings are known for this GPU".into(),
    };
    format!(
        "{}\n{} on {}, driver {}; images: {images}\n\n{}\n{conclusion}\n",
        launch.symbol,
        launch.case,
        gpu.name,
        gpu.driver,
        table(rows)
    )
}

/// A number with four significant digits and a decimal prefix.
fn shown(value: f64, unit: &str) -> String {
    if unit == "%" {
        return format!("{value:.1} %");
    }
    let prefixes = [("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3)];
    let fits = prefixes.into_iter().find(|(_, scale)| value.abs() >= *scale);
    let (prefix, scale) = match fits {
        Some(found) if !unit.is_empty() || found.1 >= 1e6 => found,
        None if value != 0.0 && !unit.is_empty() => ("µ", 1e-6),
        _ => ("", 1.0),
    };
    let value = value / scale;
    let decimals = if value.fract() == 0.0 && scale == 1.0 {
        0
    } else {
        3 - (value.abs().max(1.0).log10().floor() as usize).min(3)
    };
    format!("{value:.decimals$} {prefix}{unit}").trim_end().to_string()
}

#[cfg(test)]
mod tests {
    use super::{super::measurement::tests::sample, *};

    #[test]
    fn a_page_is_one_page() {
        let mut measurement = sample();
        let text = text(&measurement);
        assert!(text.starts_with(
            "blockflash_sample\n\
            b4_s4096_h32_d64_full_bf16 on Some GPU, driver 1.2; images: 0123456789ab\n"
        ));
        for part in
            ["500.0 µs", "400.0 TFLOP/s", "54.1 %", "not reported", "short scoreboard", "200.0 M"]
        {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(!text.contains("  selected") && !text.contains("branch resolving"), "{text}");
        assert!(text.lines().count() < 60, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        assert!(text.contains(" % of the attainable; the limit is "), "{text}");
        measurement.ceilings = Default::default();
        assert!(super::text(&measurement).ends_with("no ceilings are known for this GPU\n"));
        measurement.ceilings.matmul = Some(800e12);
        assert!(
            super::text(&measurement)
                .contains("50 % of the attainable; the limit is the tensor cores")
        );
    }

    #[test]
    fn numbers_are_readable() {
        assert_eq!(shown(512.34e-6, "s"), "512.3 µs");
        assert_eq!(shown(1.5e-3, "s"), "1.500 ms");
        assert_eq!(shown(0.0, "B"), "0 B");
        assert_eq!(shown(402.8e6, "B"), "402.8 MB");
        assert_eq!(shown(6.1e14, "FLOP/s"), "610.0 TFLOP/s");
        assert_eq!(shown(255.0, ""), "255");
        assert_eq!(shown(15.52, ""), "15.52");
        assert_eq!(shown(295_569_767.0, ""), "295.6 M");
        assert_eq!(shown(54.1, "%"), "54.1 %");
    }
}
