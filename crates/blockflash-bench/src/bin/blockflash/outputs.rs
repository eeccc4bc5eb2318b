//! Files that a command writes: checked before it computes, and written all or none.

use crate::failure::{Failure, Result, bail};
use crate::progress::Progress;
use blockflash_bench::io::{Array, Format, Replacement, destination, write_all};
use blockflash_ops::DType;
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// An option that names a file, and the name of the tensor there.
pub type Named<'a> = (&'static str, &'static str, Option<&'a PathBuf>);

/// The files that a command is asked to write.
pub struct Outputs(Vec<Output>);

struct Output {
    option: &'static str,
    tensor: &'static str,
    path: PathBuf,
    /// Equal where two paths name one file.
    destination: PathBuf,
}

impl Outputs {
    /// Makes sure that the files can be written, and that none takes the place of another one or of
    /// an input. `inputs` are the files that are read and must stay.
    pub fn new(wanted: &[Named<'_>], inputs: &[(&str, Option<&PathBuf>)]) -> Result<Self> {
        let mut outputs: Vec<Output> = Vec::new();
        for &(option, tensor, path) in wanted {
            let Some(path) = path else { continue };
            // Started and dropped: it leaves nothing.
            Replacement::begin(path)?;
            let output =
                Output { option, tensor, path: path.clone(), destination: destination(path)? };
            let taken = |other: &&Output| other.destination == output.destination;
            let npy = |path: &Path| Format::of(path) == Some(Format::Npy);
            if let Some(other) =
                outputs.iter().find(taken).filter(|other| npy(path) || npy(&other.path))
            {
                let other = other.option;
                bail!("{other} and {option} name the same .npy file; only .safetensors holds both");
            }
            let same =
                |input: &Path| input.canonicalize().is_ok_and(|input| input == output.destination);
            if let Some((input, _)) =
                inputs.iter().find(|(_, path)| path.is_some_and(|path| same(path)))
            {
                bail!("{option} names the file that {input} reads and would overwrite it");
            }
            outputs.push(output);
        }
        Ok(Self(outputs))
    }

    /// Whether nothing is to be written.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether this tensor is wanted.
    pub fn has(&self, tensor: &str) -> bool {
        self.0.iter().any(|output| output.tensor == tensor)
    }

    /// Writes the requested results; tensors of one `.safetensors` file go there
    /// together. Returns what was written, in words.
    pub fn save(&self, results: &[(&str, &Array)]) -> Result<Vec<String>> {
        let mut stored: Vec<(&Output, Cow<'_, Array>)> = Vec::new();
        for output in &self.0 {
            if let Some((_, array)) = results.iter().find(|(name, _)| *name == output.tensor) {
                stored.push((output, storable(array, &output.path)?));
            }
        }
        let mut files: Vec<(&Output, Vec<(&str, &Array)>)> = Vec::new();
        let mut notes = Vec::new();
        for (output, array) in &stored {
            let tensor = (output.tensor, array.as_ref());
            match files.iter_mut().find(|(other, _)| other.destination == output.destination) {
                Some((_, tensors)) => tensors.push(tensor),
                None => {
                    let converted = matches!(array, Cow::Owned(_));
                    let note = if converted { " (f32, because .npy has no bf16)" } else { "" };
                    notes.push(format!("{}{note}", output.path.display()));
                    files.push((output, vec![tensor]));
                }
            }
        }
        let _progress = Progress::spinner("writing");
        let files: Vec<(&Path, &[_])> =
            files.iter().map(|(output, tensors)| (output.path.as_path(), &tensors[..])).collect();
        write_all(&files)?;
        Ok(notes)
    }
}

/// The array as the file can hold it: `.npy` has no bf16, f32 holds it exactly.
fn storable<'a>(array: &'a Array, path: &Path) -> Result<Cow<'a, Array>> {
    if array.dtype() != DType::BF16 || Format::of(path) != Some(Format::Npy) {
        return Ok(Cow::Borrowed(array));
    }
    Array::new(array.shape(), array.to_f32(0..array.len()))
        .map(Cow::Owned)
        .ok_or_else(|| Failure::new("the shape is too large"))
}
