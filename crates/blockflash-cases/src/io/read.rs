use super::array::Array;
use super::convert::{Refusal, Scalar, convert};
use super::entry::Entry;
use super::error::{Error, Problem, Result};
use super::{npy, safetensors};
use blockflash_ops::{E4M3, E5M2};
use blockflash_sys::DType;
use half::{bf16, f16};
use ndarray::{ArrayD, IxDyn, ShapeBuilder};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Bytes read at a time; a multiple of every element size.
const PIECE: usize = 8 << 20;

/// A tensor file whose header has been read.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    source: Box<dyn Source>,
    entries: Vec<Entry>,
}

/// Bytes that can be read anywhere. A trait object: the conversions are compiled once, not for each
/// kind of file.
trait Source: Read + Seek + std::fmt::Debug {}

impl<S: Read + Seek + std::fmt::Debug> Source for S {}

impl TensorFile {
    /// Opens a `.npy` or `.safetensors` file; the contents decide which one it is, not the name.
    ///
    /// # Errors
    /// [`Problem::Io`], [`Problem::NotAFile`], [`Problem::Format`], [`Problem::Unsupported`],
    /// [`Problem::Length`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let open = || {
            if !std::fs::metadata(path)?.is_file() {
                return Err(Problem::NotAFile);
            }
            Ok(File::open(path)?)
        };
        Self::parse(path, open().map_err(|problem| Error { path: path.to_owned(), problem })?)
    }

    /// The same for any bytes; `path` is only used in errors.
    ///
    /// # Errors
    /// As for [`TensorFile::open`].
    pub fn parse(
        path: impl AsRef<Path>,
        mut source: impl Read + Seek + std::fmt::Debug + 'static,
    ) -> Result<Self> {
        let path = path.as_ref().to_owned();
        match entries(&mut source) {
            Ok(entries) => Ok(Self { path, source: Box::new(source), entries }),
            Err(problem) => Err(Error { path, problem }),
        }
    }

    /// All tensors, in the order of the file.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The tensor of this name; the one array of a `.npy` file answers to every name.
    ///
    /// # Errors
    /// [`Problem::NoTensor`].
    pub fn entry(&self, name: &str) -> Result<&Entry> {
        self.find(name).map_err(|problem| self.error(problem))
    }

    /// Checks that the file tells its tensors apart by names, and has these.
    ///
    /// # Errors
    /// [`Problem::Unnamed`] for a `.npy` file, [`Problem::NoTensor`].
    pub fn require(&self, names: &[&str]) -> Result<()> {
        if self.entries.iter().any(|entry| entry.name.is_empty()) {
            return Err(self.error(Problem::Unnamed { wanted: names.join(", ") }));
        }
        names.iter().try_for_each(|name| self.entry(name).map(|_| ()))
    }

    /// Reads a tensor and converts its elements to `dtype`: floating point to floating point,
    /// integers and booleans to i32, i8 also to i8.
    ///
    /// # Errors
    /// [`Problem::NoTensor`], [`Problem::Convert`], [`Problem::Overflow`] for a finite value beyond
    /// the range of `dtype`, [`Problem::OutOfMemory`], [`Problem::Io`].
    pub fn load(&mut self, name: &str, dtype: DType) -> Result<Array> {
        let loaded = match self.find(name).cloned() {
            Ok(entry) => match dtype {
                DType::F16 => self.values::<f16>(&entry),
                DType::BF16 => self.values::<bf16>(&entry),
                DType::F32 => self.values::<f32>(&entry),
                DType::I32 => self.values::<i32>(&entry),
                DType::U8 => self.values::<u8>(&entry),
                DType::E4M3 => self.values::<E4M3>(&entry),
                DType::E5M2 => self.values::<E5M2>(&entry),
                DType::I8 => self.values::<i8>(&entry),
                _ => Err(Problem::Unsupported(format!("cannot be read as {dtype}"))),
            },
            Err(problem) => Err(problem),
        };
        loaded.map_err(|problem| self.error(problem))
    }

    fn error(&self, problem: Problem) -> Error {
        Error { path: self.path.clone(), problem }
    }

    fn find(&self, name: &str) -> std::result::Result<&Entry, Problem> {
        let matches = |entry: &&Entry| entry.name == name || entry.name.is_empty();
        self.entries.iter().find(matches).ok_or_else(|| Problem::NoTensor {
            name: name.to_owned(),
            present: some_names(&self.entries),
        })
    }

    fn values<T: Scalar>(&mut self, entry: &Entry) -> std::result::Result<Array, Problem> {
        let tensor = match entry.name.as_str() {
            "" => "the array".to_owned(),
            name => format!("tensor `{name}`"),
        };
        let stored = entry.stored.clone().map_err(|word| {
            Problem::Unsupported(format!(
                "{tensor} has the element type {word}, which cannot be read here"
            ))
        })?;
        let elements = entry.shape.iter().product::<usize>();
        let reserved = || {
            let mut values = Vec::<T>::new();
            let bytes = elements as u64 * size_of::<T>() as u64;
            values.try_reserve_exact(elements).map_err(|_| Problem::OutOfMemory(bytes))?;
            Ok::<_, Problem>(values)
        };
        let mut values = reserved()?;
        self.source.seek(SeekFrom::Start(entry.offset))?;
        let mut piece = vec![0; PIECE.min(elements * stored.size())];
        while values.len() < elements {
            let start = values.len();
            let count = (elements - start).min(piece.len() / stored.size());
            let bytes = &mut piece[..count * stored.size()];
            self.source.read_exact(bytes)?;
            values.resize(start + count, T::default());
            convert(stored, bytes, &mut values[start..]).map_err(|refusal| match refusal {
                Refusal::Kind => {
                    Problem::Convert { tensor: tensor.clone(), stored, wanted: T::DTYPE }
                }
                Refusal::Range(at, value) => Problem::Overflow {
                    tensor: tensor.clone(),
                    index: (start + at) as u64,
                    value,
                    wanted: T::DTYPE,
                    limit: T::LIMIT,
                },
            })?;
        }
        let impossible =
            || Problem::Unsupported(format!("{tensor} has an impossible shape {:?}", entry.shape));
        if entry.column_major {
            let columns = ArrayD::from_shape_vec(IxDyn(&entry.shape).f(), values);
            let columns = columns.map_err(|_| impossible())?;
            values = reserved()?;
            values.extend(&columns);
        }
        Array::new(&entry.shape, values).ok_or_else(impossible)
    }
}

fn entries(source: &mut dyn Source) -> std::result::Result<Vec<Entry>, Problem> {
    let length = source.seek(SeekFrom::End(0))?;
    source.seek(SeekFrom::Start(0))?;
    let mut magic = [0; 8];
    if length < magic.len() as u64 {
        return Err(Problem::Format(format!("only {length} bytes")));
    }
    source.read_exact(&mut magic)?;
    if magic.starts_with(npy::MAGIC) {
        Ok(vec![npy::entry(source, magic, length)?])
    } else if magic.starts_with(b"PK\x03\x04") {
        Err(Problem::Unsupported(
            "is a zip archive (.npz or .pt): save .npy or .safetensors instead".to_owned(),
        ))
    } else {
        safetensors::entries(source, magic, length)
    }
}

fn some_names(entries: &[Entry]) -> String {
    const SHOWN: usize = 8;
    let mut names: Vec<&str> =
        entries.iter().take(SHOWN).map(|entry| entry.name.as_str()).collect();
    let more = format!("{} more", entries.len().saturating_sub(SHOWN));
    if entries.len() > SHOWN {
        names.push(&more);
    }
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
