//! Operands: read or random, then placed on the device.

use crate::failure::{Failure, Result};
use crate::progress::Progress;
use crate::{memory, table};
use blockflash_bench::io::{Array, Error, Problem, Stored, TensorFile, Values, write};
use blockflash_bench::random;
use blockflash_ops::{DType, Stream, Tensor, View};
use std::path::{Path, PathBuf};

/// An N(0, 1) array; `lane` separates the operands of one seed.
pub fn random(what: &str, dtype: DType, shape: &[usize], seed: u64, lane: u64) -> Result<Array> {
    let total = shape.iter().fold(1u64, |product, &size| product.saturating_mul(size as u64));
    let progress = Progress::bar(&format!("drawing {what}"), total);
    random::normal(dtype, shape, seed, lane, |done| progress.add(done)).map_err(|bytes| {
        Failure::new(format!("{what} of {shape:?} needs {}, more than there is", table::bytes(bytes)))
    })
}

/// A tensor in a file.
pub struct Source {
    file: TensorFile,
    name: &'static str,
}

impl Source {
    pub fn open(path: &Path, name: &'static str) -> Result<Self> {
        let file = TensorFile::open(path)?;
        file.entry(name)?;
        Ok(Self { file, name })
    }

    /// The same, if the file has such a tensor.
    pub fn open_optional(path: &Path, name: &'static str) -> Result<Option<Self>> {
        let file = TensorFile::open(path)?;
        Ok(file.entry(name).is_ok().then_some(Self { file, name }))
    }

    /// Element type in the file, if it can be read at all.
    pub fn stored(&self) -> Option<Stored> {
        self.file.entry(self.name).ok().and_then(|entry| entry.stored.clone().ok())
    }

    pub fn load(mut self, dtype: DType) -> Result<Array> {
        let entry = self.file.entry(self.name)?;
        memory::ensure(
            &format!("the elements of {}", self.name),
            memory::size(&[&entry.shape], dtype.size()),
        )?;
        let _progress = Progress::spinner(&format!("reading {}", self.name));
        self.file.load(self.name, dtype).map_err(|error| match &error {
            Error { problem: Problem::Overflow { wanted: DType::F16, .. }, .. } => {
                Failure::new(format!("{error}; bf16 can hold it: --dtype bf16"))
            }
            _ => error.into(),
        })
    }
}

/// The element type to compute in: the wish, else the type of the files if they agree on one, else f16.
pub fn common_dtype(wish: Option<DType>, sources: &[Source]) -> Result<DType> {
    if let Some(dtype) = wish {
        return Ok(dtype);
    }
    let mut found: Option<(DType, &str)> = None;
    for source in sources {
        let dtype = match source.stored() {
            Some(Stored::Bf16) => DType::BF16,
            _ => DType::F16,
        };
        match found {
            Some((other, name)) if other != dtype => {
                let message = format!(
                    "{name} would be computed in {other} and {} in {dtype}: choose one with --dtype",
                    source.name
                );
                return Err(Failure::new(message));
            }
            _ => found = Some((dtype, source.name)),
        }
    }
    Ok(found.map_or(DType::F16, |(dtype, _)| dtype))
}

/// An operand where the operation wants it: in place on the CPU, copied on a GPU.
pub enum Placed<'a> {
    Host(&'a Array),
    Device(Tensor),
}

impl<'a> Placed<'a> {
    pub fn new(array: &'a Array, stream: &Stream) -> Result<Self> {
        if stream.device().is_cpu() { Ok(Self::Host(array)) } else { Ok(Self::Device(array.upload(stream)?)) }
    }

    pub fn view(&self) -> Result<View<'_>> {
        match self {
            Placed::Host(array) => Ok(array.view()?),
            Placed::Device(tensor) => Ok(tensor.view()),
        }
    }
}

/// Writes results; those that name the same `.safetensors` file go there together. Returns what was written, in words.
pub fn save(results: &[(&str, &Array, Option<&PathBuf>)]) -> Result<Vec<String>> {
    let mut files: Vec<(&PathBuf, Vec<(&str, Array)>)> = Vec::new();
    let mut notes = Vec::new();
    for &(name, array, path) in results {
        let Some(path) = path else { continue };
        // .npy has no bf16, f32 holds it exactly.
        let npy = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("npy"));
        let array = match (array.dtype(), npy) {
            (DType::BF16, true) => {
                notes.push(format!("{} (f32, because .npy has no bf16)", path.display()));
                Array::new(array.shape(), Values::F32(array.to_f32(0..array.len())))
                    .ok_or_else(|| Failure::new("the shape is too large"))?
            }
            _ => {
                notes.push(path.display().to_string());
                array.clone()
            }
        };
        match files.iter_mut().find(|(other, _)| *other == path) {
            Some((_, tensors)) => tensors.push((name, array)),
            None => files.push((path, vec![(name, array)])),
        }
    }
    for (path, tensors) in &files {
        let _progress = Progress::spinner(&format!("writing {}", path.display()));
        let tensors: Vec<(&str, &Array)> = tensors.iter().map(|(name, array)| (*name, array)).collect();
        write(path, &tensors)?;
    }
    notes.dedup();
    Ok(notes)
}
