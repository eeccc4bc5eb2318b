//! What happens to a row of scaled scores on the CPU, and to its gradients.

use crate::attention::ScoresProblem;
use crate::math;

impl ScoresProblem {
    /// Caps scores that are scaled and visible.
    #[inline(always)]
    pub(crate) fn cap(&self, row: &mut [f32]) {
        if let Some(softcap) = self.softcap {
            row.iter_mut().for_each(|x| *x = softcap * math::tanh(*x / softcap));
        }
    }

    /// Turns a row of scores that are scaled and visible into probabilities, and `d_o · v` into the
    /// gradients of these scores.
    #[inline(always)]
    pub(crate) fn gradients(&self, p: &mut [f32], ds: &mut [f32], [lse, delta]: [f32; 2]) {
        match self.softcap {
            None => {
                for (p, ds) in p.iter_mut().zip(ds) {
                    *p = math::probability(*p - lse);
                    *ds = *p * (*ds - delta);
                }
            }
            Some(softcap) => {
                for (p, ds) in p.iter_mut().zip(ds) {
                    let [tanh, slope] = math::tanh_and_slope(*p / softcap);
                    *p = math::probability(softcap * tanh - lse);
                    *ds = *p * (*ds - delta) * slope;
                }
            }
        }
    }
}
