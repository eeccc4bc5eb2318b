#![doc = include_str!("../README.md")]

#[cfg(feature = "dlpack")]
mod dlpack;
mod error;
mod names;
mod options;
mod tensor;
#[cfg(feature = "xla")]
pub mod xla;

#[cfg(feature = "dlpack")]
pub use dlpack::DLTensor;
pub use error::{Error, Result};
pub use names::with_parameters;
pub use options::{
    Argument, Arguments, AttentionNumbers, AttentionOptions, AttentionTensors, DecodeNumbers,
    DecodeOptions, DecodeTensors, Kind, ScoreNumbers, ScoreTensors, Value,
};
pub use tensor::{Borrowed, Described, Foreign, Operands, Views, ViewsMut, layout, views};
