//! The native module of the Python package `blockflash`.
//!
//! It converts tensors, streams, numbers and errors of torch and of XLA, and calls
//! `blockflash-ops`. Nothing is computed here. What users call is Python, in `python/blockflash`;
//! these functions write into tensors that the caller allocated and know nothing of gradients.

mod append;
mod attention;
mod attention_backward;
mod decode;
#[cfg(target_os = "linux")]
mod dispatcher;
mod distributed;
mod error;
mod foreign;
mod index;
mod index_backward;
mod info;
mod latent;
mod linear;
mod mask;
mod mask_patterns;
mod options;
mod pages;
mod pattern;
mod plan;
mod quantize;
mod sdpa;
mod table;
mod window;
mod xla;

/// `blockflash._native`
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use super::register_kernels;
    #[pymodule_export]
    use crate::append::append_kv;
    #[pymodule_export]
    use crate::attention::attention;
    #[pymodule_export]
    use crate::attention_backward::attention_backward;
    #[pymodule_export]
    use crate::decode::{attention_decode, attention_merge};
    #[pymodule_export]
    use crate::distributed::{
        Exchange as BlockMaskExchange, group_pieces, plan_steps, shard_block_mask, shard_ranges,
    };
    #[pymodule_export]
    use crate::error::{DeviceError, Misaligned, Unsupported};
    #[pymodule_export]
    use crate::index::{block_scores, index_attention, top_k};
    #[pymodule_export]
    use crate::index_backward::index_attention_backward;
    #[pymodule_export]
    use crate::info::{describe, driver_problem, gpu_problem, initialised, set_checks};
    #[pymodule_export]
    use crate::latent::mla_append;
    #[pymodule_export]
    use crate::linear::{bsr_linear, dense_bsr, sddmm};
    #[pymodule_export]
    use crate::mask::Handle as BlockMask;
    #[pymodule_export]
    use crate::mask_patterns::{
        mask_complement, mask_of_dilated_window, mask_of_documents, mask_of_intervals,
        mask_of_neighborhood, mask_of_padding, mask_of_prefixes, mask_of_streaming, mask_of_tree,
    };
    #[pymodule_export]
    use crate::options::options;
    #[pymodule_export]
    use crate::pages::{choose_pages, summarize_pages};
    #[pymodule_export]
    use crate::pattern::Handle as BsrPattern;
    #[pymodule_export]
    use crate::plan::forecasts;
    #[pymodule_export]
    use crate::quantize::quantize;
    #[pymodule_export]
    use crate::sdpa::{sdpa, sdpa_backward};
    #[pymodule_export]
    use crate::xla::xla_targets;
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

/// Registers native kernels for `attention`, `attention_forward` and `attention_out` of this
/// namespace, and returns the dispatch keys for which that was possible: none on other systems than
/// Linux.
#[pyo3::pyfunction]
#[cfg_attr(not(target_os = "linux"), allow(unused_variables))]
fn register_kernels(namespace: &str) -> Vec<&'static str> {
    #[cfg(target_os = "linux")]
    return dispatcher::register(namespace);
    #[cfg(not(target_os = "linux"))]
    Vec::new()
}
