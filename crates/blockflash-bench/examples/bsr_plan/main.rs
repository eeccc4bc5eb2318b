//! What it costs to take over a block-sparse pattern that is on the GPU: validation, order and groups of its block rows.
//!
//! ```text
//! cargo run --release --example bsr_plan                      8192 × 8192, on a GPU
//! cargo run --release --example bsr_plan -- --size 2048 --device cpu
//! ```
//!
//! Prints for each block size and density the median time of `BsrMatrix::from_tensors`, from the call until the stream is idle: there, and
//! on the CPU, where no array has to be copied either.
#![forbid(unsafe_code)]
// Nothing is outside of a program: `pub` is `pub(crate)` here.
#![allow(unreachable_pub)]

#[path = "../common/program.rs"]
mod program;

use blockflash_bench::case::Pattern;
use blockflash_bench::timing::median;
use blockflash_ops::{BsrMatrix, DType, Device, Stream, Tensor};
use clap::Parser;
use program::Failure;
use std::process::ExitCode;
use std::time::Instant;

/// Time of planning block-sparse patterns where they are.
#[derive(Parser)]
struct Args {
    /// Rows and columns, a multiple of the block sizes
    #[arg(long, default_value_t = 8192)]
    size: usize,
    /// Rows and columns of a block
    #[arg(long, value_delimiter = ',', default_value = "16,32,64,128")]
    block: Vec<usize>,
    /// Stored blocks per block
    #[arg(long, value_delimiter = ',', default_value = "0.1,0.5")]
    density: Vec<f64>,
    /// Calls that are measured
    #[arg(long, default_value_t = 30)]
    calls: usize,
    /// cpu or cuda:0
    #[arg(long)]
    device: Option<String>,
}

fn main() -> ExitCode {
    program::main(run)
}

fn run(args: Args) -> Result<(), Failure> {
    let device = program::device(args.device.as_deref())?;
    let (stream, cpu) = (device.stream()?, Device::cpu().stream()?);
    println!("   pattern block density   blocks  {device} µs   cpu µs");
    for &block in &args.block {
        if block == 0 || !args.size.is_multiple_of(block) {
            return Err(format!("{} is no multiple of blocks of {block}", args.size).into());
        }
        let rows = args.size / block;
        for &density in &args.density {
            for pattern in [Pattern::Uniform, Pattern::Random, Pattern::PowerLaw, Pattern::Clustered] {
                let indices = pattern.draw(rows, rows, density, 1);
                let [there, here] = [&stream, &cpu].map(|stream| time(&args, block, &indices, stream));
                let (blocks, name) = (indices.1.len(), pattern.to_string());
                println!("{name:>10} {block:5} {density:7} {blocks:8} {:8.1} {:8.1}", there?, here?);
            }
        }
    }
    Ok(())
}

/// The median of some calls in µs. The plan is compared with that of the host.
fn time(
    args: &Args,
    block: usize,
    (row_ptr, col_idx): &(Vec<i32>, Vec<i32>),
    stream: &Stream,
) -> Result<f64, Failure> {
    let mut times = Vec::new();
    for call in 0..args.calls + 3 {
        let index = |numbers: &[i32]| Tensor::from_slice(stream, numbers, &[numbers.len()]);
        let arrays = [index(row_ptr)?, index(col_idx)?];
        let values = Tensor::zeros(stream, DType::F16, &[col_idx.len(), block, block])?;
        stream.synchronize()?;
        let [row_ptr, col_idx] = arrays;
        let start = Instant::now();
        let matrix = BsrMatrix::from_tensors(args.size, args.size, block, row_ptr, col_idx, values, stream)?;
        stream.synchronize()?;
        let time = start.elapsed();
        match call {
            0 => matrix.check_plan(stream)?,
            // The first ones load kernels and let the memory pool grow.
            1 | 2 => {}
            _ => times.push(time.as_secs_f64() * 1e6),
        }
    }
    Ok(median(&mut times).unwrap_or(0.0))
}
