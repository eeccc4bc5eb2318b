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
            facts.add(
                "CUDA driver",
                format!("{}.{}", driver.version / 1000, driver.version % 1000 / 10),
            );
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

/// For the CPU, which runs everything, the sizes that GPUs run, too; for a GPU its kernels.
fn support_text(rows: &[SupportRow]) -> String {
    if rows.iter().all(|row| row.status == Status::Cpu) {
        return sizes(rows);
    }
    let mut sorted: Vec<&SupportRow> = rows.iter().collect();
    sorted.sort_by_key(|row| (row.op, row.dtype));
    // What the same kernel computes is one line, and so is what is missing for the same reason.
    let same =
        |a: &&SupportRow, b: &&SupportRow| (a.op, a.dtype, &a.status) == (b.op, b.dtype, &b.status);
    let cells = sorted.chunk_by(same).map(|rows| {
        let row = rows[0];
        let runs = match &row.status {
            Status::Kernel { symbol, target, .. } => format!("{symbol} ({target})"),
            Status::Cpu => "runs on the CPU".to_owned(),
            Status::Unsupported { reason } => format!("none: {reason}"),
            other => format!("{other:?}"),
        };
        let size = match row.status {
            Status::Kernel { .. } => {
                rows.iter().map(|row| row.size.as_str()).collect::<Vec<_>>().join("; ")
            }
            _ if rows.len() == 1 => row.size.clone(),
            _ => "all sizes".to_owned(),
        };
        vec![row.op.to_owned(), row.dtype.to_string(), size, runs]
    });
    grid(&["operation", "inputs", "size", "kernel"], cells.collect()).to_string()
}

/// Where which sizes run. What the table has after a comma, layouts and blocks of masks, is left
/// out.
fn sizes(rows: &[SupportRow]) -> String {
    let types = |size: &SupportRow, on_gpus: bool| {
        let same = |row: &&SupportRow| {
            (row.op, &row.size) == (size.op, &size.size) && (row.on_gpus || !on_gpus)
        };
        let names: Vec<&str> = rows.iter().filter(same).map(|row| row.dtype.name()).collect();
        if names.is_empty() { "–".to_owned() } else { names.join(", ") }
    };
    // Codes have sizes of their own.
    let has_lines = |row: &SupportRow| row.dtype == DType::F16 || row.dtype.is_code();
    let plain = |row: &&SupportRow| has_lines(row) && !row.size.contains(", ");
    let cells = rows
        .iter()
        .filter(plain)
        .map(|row| vec![row.op.to_owned(), row.size.clone(), types(row, false), types(row, true)]);
    grid(&["operation", "size", "CPU", "GPUs from sm_80 on"], cells.collect()).to_string()
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
                other => (false, None, None, Some(format!("{other:?}"))),
            };
            json!({
                "operation": row.op, "dtype": row.dtype.name(), "size": row.size,
                "on_gpus": row.on_gpus,
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
