//! The CPU path against the f64 oracle, and what is refused.

mod attention;
mod cache;
mod errors;
mod harness;
mod layers;
