//! Where packed sequences are stored.

use crate::failure::Result;
use crate::operand::Source;
use blockflash_bench::io::{Array, Format};
use blockflash_ops::DType;
use std::path::PathBuf;

/// Where sequences begin and the last one ends.
#[derive(Clone, Debug)]
pub enum Offsets {
    List(Vec<i32>),
    File(PathBuf),
}

impl Offsets {
    /// `0,100,250`, or a file.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let path = PathBuf::from(text);
        if Format::of(&path).is_some() {
            return Ok(Self::File(path));
        }
        let list: std::result::Result<_, _> =
            text.split(',').map(|offset| offset.trim().parse()).collect();
        list.map(Self::List).map_err(|_| {
            "expected integers with commas between, for example 0,100,250, or a .npy or \
             .safetensors file"
                .to_owned()
        })
    }

    /// The file, if it is one.
    pub fn file(&self) -> Option<&PathBuf> {
        match self {
            Self::File(path) => Some(path),
            Self::List(_) => None,
        }
    }

    /// The offsets; a file calls them `name`.
    pub fn load(&self, name: &'static str) -> Result<Array> {
        match self {
            Self::File(path) => Source::open(path, name)?.load(DType::I32),
            Self::List(list) => Ok(list.clone().into()),
        }
    }
}
