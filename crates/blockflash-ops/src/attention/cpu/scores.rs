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

    /// Turns scores that are scaled into probabilities, with the `terms` that are added to them,
    /// and `d_o · v` into the gradients of these scores, before the cap or `capped`.
    #[inline(always)]
    pub(crate) fn gradients(
        &self,
        [p, ds]: [&mut Lanes; 2],
        terms: Option<&Lanes>,
        [lse, delta]: [&Lanes; 2],
        capped: bool,
    ) {
        let terms = terms.unwrap_or(&[0.0; LANES]);
        match self.softcap {
            None => {
                for lane in 0..LANES {
                    p[lane] = math::probability(p[lane] + terms[lane] - lse[lane]);
                    ds[lane] = p[lane] * (ds[lane] - delta[lane]);
                }
            }
            Some(softcap) => {
                for lane in 0..LANES {
                    let [tanh, slope] = math::tanh_and_slope(p[lane] / softcap);
                    p[lane] = math::probability(softcap * tanh + terms[lane] - lse[lane]);
                    let slope = if capped { 1.0 } else { slope };
                    ds[lane] = p[lane] * (ds[lane] - delta[lane]) * slope;
                }
            }
        }
    }
}
