//! What needs no GPU: the CPU backend against the oracle, selection and planning, the tolerance
//! rule, and input of any kind. One program, since each is linked with the library and its images.

mod attention;
mod attention_bwd;
mod attention_decode;
mod attention_index;
mod attention_index_bwd;
mod attention_latent;
mod block_mask;
mod bsr;
mod code_rule;
mod dist;
mod fuzz;
mod garbage;
mod head_dims;
mod index_choice;
mod ndarray;
mod page_choice;
mod rule;
mod score_terms;
mod sddmm;
mod select;
mod speed;
mod token_attention;
mod token_masks;
mod token_sources;
mod truncation;
