//! What happens to a row of scaled scores on the CPU, and to its gradients.

use crate::attention::ScoresProblem;
use crate::math;
use crate::panels::{LANES, Lanes};

impl ScoresProblem {
    /// Caps scores that are scaled and visible.
    #[inline(always)]
    pub(crate) fn cap(&self, row: &mut [f32]) {
        if let Some(softcap) = self.softcap {
            row.iter_mut().for_each(|x| *x = softcap * math::tanh(*x / softcap));
        }
    }

    /// Turns scores that are scaled into probabilities, and `d_o · v` into the gradients of these
    /// scores.
    #[inline(always)]
    pub(crate) fn gradients(&self, p: &mut Lanes, ds: &mut Lanes, lse: &Lanes, delta: &Lanes) {
        match self.softcap {
            None => {
                for lane in 0..LANES {
                    p[lane] = math::probability(p[lane] - lse[lane]);
                    ds[lane] = p[lane] * (ds[lane] - delta[lane]);
                }
            }
            Some(softcap) => {
                for lane in 0..LANES {
                    let [tanh, slope] = math::tanh_and_slope(p[lane] / softcap);
                    p[lane] = math::probability(softcap * tanh - lse[lane]);
                    ds[lane] = p[lane] * (ds[lane] - delta[lane]) * slope;
                }
            }
        }
    }
}
