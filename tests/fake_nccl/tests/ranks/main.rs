//! Exchanges and all-gathers without GPUs: ranks are threads, or there is one alone.

mod exchange;
mod fake;
mod window;
