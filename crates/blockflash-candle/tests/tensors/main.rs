//! Everything against the f64 oracle, on the CPU and with the feature `cuda` on a GPU, too; and
//! what is refused. All of it for each line of candle that is enabled.
#![allow(clippy::duplicate_mod)]

#[cfg(feature = "candle-0-10")]
mod candle_0_10;
#[cfg(feature = "candle-0-11")]
mod candle_0_11;
#[cfg(feature = "candle-0-9")]
mod candle_0_9;
