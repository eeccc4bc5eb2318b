//! Attention over all GPUs of this machine, a process for each, by NCCL: compares the results with
//! those of one GPU, and measures.
//!
//! ```sh
//! cargo run --release -p blockflash-dist --example ring_attention -- 2 check
//! cargo run --release -p blockflash-dist --example ring_attention -- 2 131072x32x8
//! ```
//!
//! The first argument is the number of GPUs. Each other one is `check`, a case
//! `<rows>x<heads of q>x<heads of k>` of which causal attention in bf16 with head_dim 128 is
//! measured, or, as the last one, `lost`: the last rank goes without a word, and the others have to
//! notice. NCCL's library must be found (`LD_LIBRARY_PATH`).

mod check;
mod measure;

use blockflash_dist::{Nccl, NcclCommunicator, NcclId};
use blockflash_ops::Device;
use half::bf16;
use std::process::{Command, ExitCode};
use std::time::Duration;

type Failure = Box<dyn std::error::Error>;

const RANK: &str = "BLOCKFLASH_RANK";
const ID: &str = "BLOCKFLASH_NCCL_ID";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match std::env::var(RANK) {
        Ok(rank) => work(&rank, &arguments),
        Err(_) => start(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Starts a process for each GPU.
fn start(arguments: &[String]) -> Result<(), Failure> {
    let world: usize = arguments.first().ok_or("how many GPUs?")?.parse()?;
    let id: Vec<String> = NcclId::new()?.to_bytes().iter().map(|b| format!("{b:02x}")).collect();
    let program = std::env::current_exe()?;
    let ranks = (0..world).map(|rank| {
        let mut command = Command::new(&program);
        command.args(arguments).env(RANK, rank.to_string()).env(ID, id.concat()).spawn()
    });
    let ranks = ranks.collect::<Result<Vec<_>, _>>()?;
    let ends = ranks.into_iter().map(|mut rank| rank.wait());
    let failed = ends.filter(|end| !end.as_ref().is_ok_and(|status| status.success())).count();
    if failed > 0 { Err(format!("{failed} of {world} ranks failed").into()) } else { Ok(()) }
}

/// What one process does.
fn work(rank: &str, arguments: &[String]) -> Result<(), Failure> {
    let (rank, world) = (rank.parse()?, arguments[0].parse()?);
    let text = std::env::var(ID)?;
    let mut id = [0; 128];
    for (at, byte) in id.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2).ok_or("a short id")?, 16)?;
    }
    let device = Device::cuda(rank)?;
    let id = NcclId::from_bytes(id);
    let ranks = NcclCommunicator::new(&device, &id, rank, world, Duration::from_secs(20))?;
    let comm = Nccl::new(ranks)?;
    let stream = device.stream()?;
    for argument in &arguments[1..] {
        match argument.as_str() {
            "check" => check::all(&comm, &stream)?,
            "lost" => return check::lost(&comm, &stream),
            case => {
                let sizes: Vec<usize> =
                    case.split('x').map(str::parse).collect::<Result<_, _>>()?;
                let &[rows, heads_q, heads_kv] = &sizes[..] else {
                    return Err(format!("{case} is no case").into());
                };
                measure::measure(&comm, &stream, rows, [heads_q, heads_kv])?;
            }
        }
    }
    Ok(())
}

/// Numbers of N(0,1).
pub(crate) fn normal(seed: u64, count: usize) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let mut number = || {
        let radius = (-2.0 * uniform().ln()).sqrt();
        bf16::from_f64(radius * (std::f64::consts::TAU * uniform()).cos())
    };
    (0..count).map(|_| number()).collect()
}
