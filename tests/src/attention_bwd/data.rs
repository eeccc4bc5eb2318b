//! The numbers of a backward pass.

use crate::attention::{AttentionCase, AttentionData, AttentionReference, Content};
use crate::number::{normal_rounded, round};

/// Logical tensors of a backward pass, already rounded to their types and held as f32. Rows that
/// belong to no sequence are NaN.
#[derive(Clone, Debug)]
pub struct BackwardData {
    /// The operands of the forward pass.
    pub forward: AttentionData,
    /// The exact output, rounded; in the shape of q.
    pub o: Vec<f32>,
    /// The exact log-sum-exp in f32.
    pub lse: Vec<f32>,
    /// The gradient of the output, N(0,1).
    pub d_o: Vec<f32>,
    /// Absolute error of the exponents of the probabilities that a correct computation may make.
    pub(super) exponent: f64,
}

impl BackwardData {
    /// The data of a case.
    pub fn generate(case: &AttentionCase) -> Self {
        let forward = AttentionData::generate(case);
        let reference = AttentionReference::compute(case, &forward, f64::INFINITY);
        let (d, width) = (case.head_dim, case.heads_q * case.head_dim);
        let sequences = case.sequences();
        let mut o = vec![f32::NAN; forward.q.len()];
        let mut lse = vec![f32::NAN; case.shapes()[2].iter().product()];
        for (at, &[b, i, h]) in reference.rows.iter().enumerate() {
            let row = ((sequences[b].q_start + i) * case.heads_q + h) * d;
            for (o, &exact) in o[row..][..d].iter_mut().zip(&reference.o.exact[at * d..]) {
                *o = round(case.dtype, exact as f32);
            }
            lse[case.lse_index(b, h, i)] = reference.lse.exact[at] as f32;
        }
        let mut d_o = normal_rounded(!case.seed, forward.q.len(), case.dtype);
        if case.content == Content::HugeScores {
            d_o.iter_mut().for_each(|x| *x = (*x * 4.0).round());
        }
        d_o[case.rows().0[0] * width..].fill(f32::NAN);
        let exponent = reference.rounding(case).exponent;
        Self { forward, o, lse, d_o, exponent }
    }
}
