//! The optimizer Adam (Kingma and Ba, 2015), on the host.

use rayon::prelude::*;
use std::collections::HashMap;

/// Decay of the two averages.
const DECAYS: [f32; 2] = [0.9, 0.98];
/// Smallest divisor.
const EPSILON: f32 = 1e-8;

/// Averages of the gradients of all parameters and of their squares.
#[derive(Default)]
pub struct Adam {
    averages: HashMap<String, [Vec<f32>; 2]>,
}

impl Adam {
    /// Changes the parameters of this name by their gradient in step `step`, from 1.
    pub fn descend(
        &mut self,
        (step, rate): (usize, f32),
        name: &str,
        values: &mut [f32],
        gradient: &[f32],
    ) {
        let zeros = || [(); 2].map(|()| vec![0.0; values.len()]);
        let [means, squares] = self.averages.entry(name.to_owned()).or_insert_with(zeros);
        // The averages start at 0, which this makes up for.
        let [mean, square] = DECAYS.map(|decay| 1.0 / (1.0 - decay.powi(step as i32)));
        let averages = means.par_iter_mut().zip(squares);
        let values = values.par_iter_mut().zip(gradient);
        values.zip(averages).with_min_len(1 << 12).for_each(
            |((value, &gradient), (average, of_squares))| {
                *average += (1.0 - DECAYS[0]) * (gradient - *average);
                *of_squares += (1.0 - DECAYS[1]) * (gradient * gradient - *of_squares);
                *value -= rate * *average * mean / ((*of_squares * square).sqrt() + EPSILON);
            },
        );
    }
}
