//! Exchanges and all-gathers without GPUs: ranks are threads, or there is one alone.
#![cfg(target_os = "linux")]

mod exchange;
mod fake;
mod guard;
mod window;
