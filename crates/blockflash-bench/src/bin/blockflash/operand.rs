//! Operands: read or random.

use crate::failure::{Failure, Result, bail};
use crate::progress::Progress;
use crate::table;
use blockflash_bench::io::{Array, Error, Problem, Stored, TensorFile};
use blockflash_bench::memory;
use blockflash_bench::random;
use blockflash_ops::{DType, View};
use std::path::Path;

/// An N(0, 1) array; `lane` separates the operands of one seed.
pub fn random(what: &str, dtype: DType, shape: &[usize], seed: u64, lane: u64) -> Result<Array> {
    let total = shape.iter().fold(1u64, |product, &size| product.saturating_mul(size as u64));
    let progress = Progress::bar(&format!("drawing {what}"), total);
    random::normal(dtype, shape, seed, lane, |done| progress.add(done)).map_err(|bytes| {
        Failure::new(format!(
            "{what} of {shape:?} needs {}, which is more than there is",
            table::bytes(bytes)
        ))
    })
}

/// A tensor of this type and shape without its elements, for the checks that come before they are
/// drawn or read: all of its rows are the same memory.
pub struct StandIn<'a> {
    row: Array,
    shape: &'a [usize],
}

impl<'a> StandIn<'a> {
    /// `None` for a row that would be large itself.
    pub fn new(dtype: DType, shape: &'a [usize]) -> Option<Self> {
        let width = shape.last().copied().filter(|&width| width <= 1 << 20)?;
        let mut of_row = vec![1; shape.len()];
        of_row[shape.len() - 1] = width;
        let row = random::normal(dtype, &of_row, 0, 0, |_| ()).ok()?;
        Some(Self { row, shape })
    }

    pub fn view(&self) -> Result<View<'_>> {
        let mut view = self.row.view()?;
        for (dim, &extent) in self.shape.iter().enumerate().rev().skip(1) {
            view = view.expand(dim, extent)?;
        }
        Ok(view)
    }
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

    /// Several tensors of a file that tells them apart by their names; `instead` says what takes
    /// those that have none.
    pub fn open_named<const N: usize>(
        path: &Path,
        names: [&'static str; N],
        instead: &str,
    ) -> Result<[Self; N]> {
        TensorFile::open(path)?.require(&names).map_err(|error| match &error {
            Error { problem: Problem::Unnamed { .. }, .. } => {
                Failure::new(format!("{error}{instead}"))
            }
            _ => error.into(),
        })?;
        let sources: Result<Vec<Self>> = names.iter().map(|name| Self::open(path, name)).collect();
        sources?.try_into().map_err(|_| Failure::new("as many tensors as names"))
    }

    /// Sizes in the file.
    pub fn shape(&self) -> Result<&[usize]> {
        Ok(&self.file.entry(self.name)?.shape)
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

/// Loads all of them, once it is sure that there is memory for all and for a result of this many
/// bytes: a file may claim anything.
pub fn load_all<const N: usize>(
    sources: [Source; N],
    dtype: DType,
    result: u64,
) -> Result<[Array; N]> {
    load_each(sources, [dtype; N], result)
}

/// The same, in a type of its own each.
pub fn load_each<const N: usize>(
    sources: [Source; N],
    dtypes: [DType; N],
    result: u64,
) -> Result<[Array; N]> {
    let (mut names, mut bytes) = (Vec::new(), result);
    for (source, dtype) in sources.iter().zip(dtypes) {
        names.push(source.name);
        bytes = bytes.saturating_add(memory::size(&[source.shape()?], dtype.size()));
    }
    memory::ensure(&format!("{} and the result", names.join(", ")), bytes)?;
    let loads = sources.into_iter().zip(dtypes);
    let arrays: Result<Vec<Array>> = loads.map(|(source, dtype)| source.load(dtype)).collect();
    arrays?.try_into().map_err(|_| Failure::new("as many arrays as files"))
}

/// The element type to compute in: the wish, else the type of the files if they agree on one, else
/// f16.
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
                bail!(
                    "{name} would be computed in {other} and {} in {dtype}: choose one with \
                     --dtype",
                    source.name
                );
            }
            _ => found = Some((dtype, source.name)),
        }
    }
    Ok(found.map_or(DType::F16, |(dtype, _)| dtype))
}
