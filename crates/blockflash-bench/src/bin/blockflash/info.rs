//! `blockflash info`.

use crate::args::DeviceArg;
use crate::failure::Result;
use crate::output::{device_name, print};
use crate::table::{self, Facts, grid};
use blockflash_ops::{DType, Device, Status, SupportRow, support};
use blockflash_safe::{CudaProperties, CudaStatus, cuda_status};
use serde_json::{Value, json};
use std::process::ExitCode;

/// Options of `blockflash info`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    device: DeviceArg,
    /// Print one JSON object instead of tables
    #[arg(long, help_heading = "Common options")]
    json: bool,
}

/// Shows devices and what runs on the one that the other commands would take.
pub fn run(args: Args) -> Result<ExitCode> {
    let status = cuda_status();
    let device = args.device.open()?;
    let rows = support(&device);
    let text = if args.json {
        serde_json::to_string(&as_json(&device, &status, &rows))?
    } else {
        format!("{}\n\n{}", devices(&device, &status), support_text(&rows))
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn devices(default: &Device, status: &CudaStatus) -> Facts {
    let mut facts = Facts::default();
    facts.add("blockflash", env!("CARGO_PKG_VERSION"));
    match status {
        Ok(driver) => {
            facts.add("CUDA driver", format!("{}.{}", driver.version / 1000, driver.version % 1000 / 10));
            for gpu in &driver.devices {
                facts.add(&format!("cuda:{}", gpu.ordinal), gpu_line(gpu));
            }
        }
        Err(reason) => facts.add("CUDA", format!("not usable: {reason}")),
    }
    facts.add("cpu", device_name(&Device::cpu()).trim_start_matches("cpu (").trim_end_matches(')'));
    facts.add("used here", default);
    facts
}

fn gpu_line(gpu: &CudaProperties) -> String {
    format!(
        "{} ({}), {}, {} multiprocessors, {} shared memory per block",
        gpu.name,
        gpu.compute_capability,
        table::bytes(gpu.memory_bytes),
        gpu.multiprocessors,
        table::bytes(gpu.smem_per_block.into())
    )
}

/// One line for the CPU, which runs everything; a table of kernels for a GPU.
fn support_text(rows: &[SupportRow]) -> String {
    if rows.iter().all(|row| row.status == Status::Cpu) {
        let mut ops: Vec<&str> = rows.iter().map(|row| row.op).collect();
        ops.dedup();
        ops.sort_unstable();
        ops.dedup();
        let mut dtypes: Vec<&str> = rows.iter().map(|row| row.dtype.name()).collect();
        dtypes.dedup();
        return format!(
            "The CPU runs {} in {}, with any head_dim and block size.\n\
             Sizes that GPUs have kernels for, in f16 and bf16: {}.",
            ops.join(" and "),
            dtypes.join(", "),
            kernel_sizes(rows)
        );
    }
    let mut sorted: Vec<&SupportRow> = rows.iter().collect();
    sorted.sort_by_key(|row| (row.op, row.dtype));
    // What the same kernel computes is one line, and so is what is missing for the same reason.
    let same = |a: &&SupportRow, b: &&SupportRow| (a.op, a.dtype, &a.status) == (b.op, b.dtype, &b.status);
    let cells = sorted.chunk_by(same).map(|rows| {
        let row = rows[0];
        let runs = match &row.status {
            Status::Kernel { symbol, target, .. } => format!("{symbol} ({target})"),
            Status::Cpu => "runs on the CPU".to_owned(),
            Status::Unsupported { reason } => format!("none: {reason}"),
        };
        let size = match row.status {
            Status::Kernel { .. } => rows.iter().map(|row| row.size.as_str()).collect::<Vec<_>>().join("; "),
            _ if rows.len() == 1 => row.size.clone(),
            _ => "all sizes".to_owned(),
        };
        vec![row.op.to_owned(), row.dtype.to_string(), size, runs]
    });
    grid(&["operation", "inputs", "size", "kernel"], cells.collect()).to_string()
}

/// `attention: head_dim 8..=64, …; bsr_matmul: block 16, …`. Of layouts and block masks nothing is
/// said.
fn kernel_sizes(rows: &[SupportRow]) -> String {
    let plain = |row: &&SupportRow| row.dtype == DType::F16 && !row.size.contains(", ");
    let rows: Vec<&SupportRow> = rows.iter().filter(plain).collect();
    let of_op = |rows: &[&SupportRow]| {
        let sizes: Vec<&str> = rows.iter().map(|row| row.size.as_str()).collect();
        format!("{}: {}", rows[0].op, sizes.join(", "))
    };
    rows.chunk_by(|a, b| a.op == b.op).map(of_op).collect::<Vec<_>>().join("; ")
}

fn as_json(device: &Device, status: &CudaStatus, rows: &[SupportRow]) -> Value {
    let support: Vec<Value> = rows
        .iter()
        .map(|row| {
            let (runs, kernel, target, reason) = match &row.status {
                Status::Kernel { symbol, target, .. } => {
                    (true, Some(symbol.to_string()), Some(target.to_string()), None)
                }
                Status::Cpu => (true, None, None, None),
                Status::Unsupported { reason } => (false, None, None, Some(reason.to_string())),
            };
            json!({
                "operation": row.op, "dtype": row.dtype.name(), "size": row.size,
                "runs": runs, "kernel": kernel, "target": target, "reason": reason,
            })
        })
        .collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "cuda_driver": status.as_ref().ok().map(|driver| driver.version),
        "cuda_devices": status.as_ref().map(|driver| driver.devices.clone()).unwrap_or_default(),
        "cuda_problem": status.as_ref().err().map(ToString::to_string),
        "cpu": device_name(&Device::cpu()),
        "device": device.to_string(),
        "support": support,
    })
}
