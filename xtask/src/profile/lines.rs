//! The lines of a page: which numbers it shows, and where they come from.

use super::{
    ceilings::Ceilings,
    figures::{Figures, From, Line},
    launch::Launch,
    unit::Unit,
};

const fn metric(
    key: &'static str,
    label: &'static str,
    unit: Unit,
    names: &'static [&'static str],
) -> Line {
    Line { key, label, unit, from: From::Metric(names) }
}

const fn work(
    key: &'static str,
    label: &'static str,
    unit: Unit,
    value: fn(&Launch, &Figures) -> Option<f64>,
) -> Line {
    Line { key, label, unit, from: From::Work(value) }
}

fn get(figures: &Figures, key: &str) -> Option<f64> {
    figures.get(key).copied()
}

fn ratio(above: Option<f64>, below: Option<f64>) -> Option<f64> {
    below.filter(|&below| below > 0.0).and_then(|below| Some(above? / below))
}

fn sum(figures: &Figures, keys: &[&str]) -> Option<f64> {
    keys.iter().map(|key| get(figures, key)).sum()
}

/// The page: headings and their lines, in the order in which they are computed.
pub const PAGE: &[(&str, &[Line])] = &[
    ("time", TIME),
    ("utilisation, % of peak", UTILISATION),
    ("occupancy and registers", OCCUPANCY),
    ("bytes", BYTES),
    ("shared memory", SHARED),
    ("roofline", ROOFLINE),
];

const TIME: &[Line] = &[
    metric("seconds", "duration", Unit::Time, &["gpu__time_duration.sum"]),
    metric(
        "clock",
        "clock of the multiprocessors",
        Unit::Rate("Hz"),
        &[
            "sm__cycles_elapsed.avg.per_second",
            "smsp__cycles_elapsed.avg.per_second",
            "gpc__cycles_elapsed.avg.per_second",
        ],
    ),
    work("flop_rate", "useful operations", Unit::Rate("FLOP/s"), |launch, figures| {
        ratio(Some(launch.flops), get(figures, "seconds"))
    }),
    work("exp_rate", "exponentials", Unit::Rate("exp/s"), |launch, figures| {
        ratio(Some(launch.exps).filter(|&exps| exps > 0.0), get(figures, "seconds"))
    }),
];

const UTILISATION: &[Line] = &[
    metric(
        "tensor_pipe",
        "matrix (tensor) pipe",
        Unit::Percent,
        &[
            "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
            "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
            "sm__pipe_tensor_subpipe_hmma_cycles_active.avg.pct_of_peak_sustained_active",
            "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
        ],
    ),
    metric(
        "tensor_gmma",
        "  warpgroup instructions issued to it",
        Unit::Percent,
        &["sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active"],
    ),
    metric(
        "issue",
        "issue slots",
        Unit::Percent,
        &[
            "smsp__issue_active.avg.pct_of_peak_sustained_active",
            "sm__issue_active.avg.pct_of_peak_sustained_active",
            "sm__inst_issued.avg.pct_of_peak_sustained_active",
        ],
    ),
    metric(
        "xu",
        "special functions (XU)",
        Unit::Percent,
        &[
            "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
            "sm__pipe_xu_cycles_active.avg.pct_of_peak_sustained_active",
        ],
    ),
    metric(
        "fma",
        "FMA pipe",
        Unit::Percent,
        &[
            "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
            "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
        ],
    ),
    metric(
        "alu",
        "ALU pipe",
        Unit::Percent,
        &[
            "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",
            "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
        ],
    ),
    metric(
        "shared_pipe",
        "shared-memory pipe",
        Unit::Percent,
        &[
            "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
            "l1tex__lsu_writeback_active.avg.pct_of_peak_sustained_elapsed",
        ],
    ),
    metric(
        "l2_busy",
        "L2",
        Unit::Percent,
        &[
            "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
            "lts__throughput.avg.pct_of_peak_sustained_elapsed",
        ],
    ),
    metric(
        "hbm_busy",
        "device memory",
        Unit::Percent,
        &[
            "dram__throughput.avg.pct_of_peak_sustained_elapsed",
            "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        ],
    ),
];

const OCCUPANCY: &[Line] = &[
    metric(
        "occupancy",
        "achieved, % of warps",
        Unit::Percent,
        &["sm__warps_active.avg.pct_of_peak_sustained_active"],
    ),
    metric(
        "occupancy_limit",
        "possible, % of warps",
        Unit::Percent,
        &["sm__maximum_warps_per_active_cycle_pct"],
    ),
    metric("waves", "waves of blocks", Unit::Number, &["launch__waves_per_multiprocessor"]),
    metric(
        "limit_registers",
        "blocks that registers allow",
        Unit::Count,
        &["launch__occupancy_limit_registers"],
    ),
    metric(
        "limit_smem",
        "blocks that shared memory allows",
        Unit::Count,
        &["launch__occupancy_limit_shared_mem"],
    ),
    metric(
        "limit_warps",
        "blocks that warps allow",
        Unit::Count,
        &["launch__occupancy_limit_warps"],
    ),
    metric("registers", "registers per thread", Unit::Count, &["launch__registers_per_thread"]),
    metric("smem", "shared memory per block", Unit::Bytes, &["launch__shared_mem_per_block"]),
    metric(
        "spill_loads",
        "spilled (local memory), loaded",
        Unit::Bytes,
        &["l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum"],
    ),
    metric(
        "spill_stores",
        "spilled (local memory), stored",
        Unit::Bytes,
        &["l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum"],
    ),
];

const BYTES: &[Line] = &[
    metric("l1", "asked of L1", Unit::Bytes, &["l1tex__t_bytes.sum"]),
    metric(
        "l2_read",
        "L2 to multiprocessors",
        Unit::Bytes,
        &["l1tex__m_xbar2l1tex_read_bytes.sum"],
    ),
    work("l2_counted", "  counted", Unit::Bytes, |launch, _| {
        Some(launch.l2_bytes).filter(|&bytes| bytes > 0.0)
    }),
    work("l2_ratio", "  measured / counted", Unit::Number, |_, figures| {
        ratio(get(figures, "l2_read"), get(figures, "l2_counted"))
    }),
    work("l2_rate", "  rate", Unit::Rate("B/s"), |_, figures| {
        ratio(get(figures, "l2_read"), get(figures, "seconds"))
    }),
    metric(
        "l2_write",
        "multiprocessors to L2",
        Unit::Bytes,
        &["l1tex__m_l1tex2xbar_write_bytes.sum"],
    ),
    metric("l2_all", "all accesses to L2", Unit::Bytes, &["lts__t_bytes.sum"]),
    metric("l2_hits", "  hits, %", Unit::Percent, &["lts__t_sector_hit_rate.pct"]),
    metric("hbm_read", "device memory, read", Unit::Bytes, &["dram__bytes_read.sum"]),
    metric("hbm_write", "device memory, written", Unit::Bytes, &["dram__bytes_write.sum"]),
    work("hbm", "device memory", Unit::Bytes, |_, figures| {
        sum(figures, &["hbm_read", "hbm_write"])
    }),
    work("hbm_counted", "  counted minimum", Unit::Bytes, |launch, _| {
        Some(launch.bytes).filter(|&bytes| bytes > 0.0)
    }),
    work("hbm_ratio", "  measured / counted", Unit::Number, |_, figures| {
        ratio(get(figures, "hbm"), get(figures, "hbm_counted"))
    }),
    work("hbm_rate", "  rate", Unit::Rate("B/s"), |_, figures| {
        ratio(get(figures, "hbm"), get(figures, "seconds"))
    }),
];

const SHARED: &[Line] = &[
    metric(
        "wavefronts",
        "wavefronts",
        Unit::Count,
        &["l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"],
    ),
    metric(
        "conflicts",
        "  of them by bank conflicts",
        Unit::Count,
        &["l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"],
    ),
    metric(
        "conflicts_ld",
        "    in loads",
        Unit::Count,
        &["l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"],
    ),
    metric(
        "conflicts_st",
        "    in stores",
        Unit::Count,
        &["l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum"],
    ),
    work("conflict_share", "  bank conflicts, %", Unit::Percent, |_, figures| {
        ratio(get(figures, "conflicts").map(|count| 100.0 * count), get(figures, "wavefronts"))
    }),
];

const ROOFLINE: &[Line] = &[
    work("per_l2_byte", "FLOP per byte from L2", Unit::Number, |launch, figures| {
        ratio(Some(launch.flops), get(figures, "l2_read"))
    }),
    work("per_hbm_byte", "FLOP per byte of device memory", Unit::Number, |launch, figures| {
        ratio(Some(launch.flops), get(figures, "hbm"))
    }),
    Line {
        key: "attainable",
        label: "attainable",
        unit: Unit::Rate("FLOP/s"),
        from: From::Limit(attainable),
    },
    work("attained", "  attained, %", Unit::Percent, |_, figures| {
        ratio(get(figures, "flop_rate").map(|rate| 100.0 * rate), get(figures, "attainable"))
    }),
];

fn attainable(ceilings: &Ceilings, launch: &Launch, figures: &Figures) -> Option<f64> {
    let bytes = |key| get(figures, key).unwrap_or(0.0);
    let limit = ceilings.limit(launch, bytes("l2_read"), bytes("hbm"))?;
    ratio(Some(launch.flops), Some(limit.seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_unique() {
        let mut keys: Vec<&str> =
            PAGE.iter().flat_map(|(_, lines)| *lines).map(|line| line.key).collect();
        let count = keys.len();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), count);
    }
}
