//! Options that several commands share, and the parsers of their values.

use crate::failure::Result;
use blockflash_bench::io::Format;
use blockflash_ops::{DType, Device};
use blockflash_safe::{Error, cuda_status};
use std::path::PathBuf;

/// Options of every command that runs an operation.
#[derive(clap::Args)]
#[command(next_help_heading = "Common options")]
pub struct Common {
    #[command(flatten)]
    pub device: DeviceArg,
    /// Seed of random tensors and of the sample of rows that --check compares
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Compare the result with an f64 reference. The exit code is 1 if it is outside the tolerance
    #[arg(long)]
    pub check: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    /// Number of timed runs after the first one [default: as many as fit into a second, at most 20]
    #[arg(long, value_name = "N")]
    pub repeat: Option<usize>,
}

/// Where to run.
#[derive(clap::Args)]
pub struct DeviceArg {
    /// Device to run on: cpu, cuda or cuda:N [default: the first usable GPU, otherwise the CPU]
    #[arg(long, value_name = "DEVICE", help_heading = "Common options")]
    pub device: Option<String>,
}

impl DeviceArg {
    pub fn open(&self) -> Result<Device> {
        Ok(match &self.device {
            Some(name) => name.parse()?,
            None => Device::best(),
        })
    }

    /// The reason why the CPU was chosen although there is a driver, for users who expect their GPU
    /// to be used.
    pub fn note(&self, device: &Device) -> Option<String> {
        if self.device.is_some() || !device.is_cpu() {
            return None;
        }
        match cuda_status() {
            Err(Error::NoDriver) => None,
            Err(reason) => Some(format!("no GPU is used: {reason}")),
            Ok(_) => Some("no GPU is used: none has compute capability 8.0 or newer".to_owned()),
        }
    }
}

/// Element types of operands and results.
#[derive(Clone, Copy, clap::ValueEnum)]
pub enum Float {
    F16,
    Bf16,
    F32,
}

impl From<Float> for DType {
    fn from(float: Float) -> Self {
        match float {
            Float::F16 => DType::F16,
            Float::Bf16 => DType::BF16,
            Float::F32 => DType::F32,
        }
    }
}

/// Element types of q, k and v.
#[derive(Clone, Copy, clap::ValueEnum)]
pub enum Input {
    F16,
    Bf16,
    F32,
    E4m3,
}

impl From<Input> for DType {
    fn from(input: Input) -> Self {
        match input {
            Input::F16 => DType::F16,
            Input::Bf16 => DType::BF16,
            Input::F32 => DType::F32,
            Input::E4m3 => DType::E4M3,
        }
    }
}

/// Element types of caches of codes.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Code {
    E4m3,
    E5m2,
    I8,
}

impl From<Code> for DType {
    fn from(code: Code) -> Self {
        match code {
            Code::E4m3 => DType::E4M3,
            Code::E5m2 => DType::E5M2,
            Code::I8 => DType::I8,
        }
    }
}

/// `2x1024x8x64`.
pub fn sizes<const N: usize>(text: &str) -> std::result::Result<[usize; N], String> {
    let sizes: Option<Vec<usize>> =
        text.split(['x', 'X', '×']).map(|size| size.trim().parse().ok()).collect();
    let example =
        ["", "16", "16x16", "64x64x64", "2x1024x8x64"].get(N).copied().unwrap_or_default();
    sizes
        .and_then(|sizes| sizes.try_into().ok())
        .ok_or_else(|| format!("expected {N} sizes with `x` between them, for example {example}"))
}

/// Keys to see on each side of the diagonal; `None` is all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub left: Option<usize>,
    pub right: Option<usize>,
}

/// `128,0`, `-,16`, `inf,0`.
pub fn window(text: &str) -> std::result::Result<Window, String> {
    let side = |text: &str| match text.trim() {
        "-" | "inf" => Some(None),
        number => number.parse().ok().map(Some),
    };
    text.split_once(',')
        .and_then(|(left, right)| Some(Window { left: side(left)?, right: side(right)? }))
        .ok_or_else(|| {
            "expected two numbers of keys, for example 128,0; `-` leaves a side unlimited"
                .to_owned()
        })
}

/// A file to write, whose name must say the format.
pub fn out_path(text: &str) -> std::result::Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match Format::of(&path) {
        Some(_) => Ok(path),
        None => Err("the name must end in .npy or .safetensors".to_owned()),
    }
}
