//! Token by token, with times.

use crate::attention::Kind;
use crate::model::Model;
use candle_core::{Error, Result};
use indicatif::{ProgressBar, ProgressStyle};
use std::time::{Duration, Instant};

/// What was generated, and in what time.
pub(crate) struct Generation {
    tokens: Vec<u32>,
    /// Those that each token was chosen by, on the CPU.
    logits: Vec<Vec<f32>>,
    /// Until the first token.
    pub(crate) prompt: Duration,
    /// Mean of all others.
    pub(crate) per_token: Duration,
}

/// How tokens and logits differ from a reference.
#[derive(Default)]
pub(crate) struct Differences {
    /// Tokens that have the largest logit in both.
    pub(crate) equal: usize,
    /// Other tokens whose logit in the reference is the largest but for rounding.
    pub(crate) ties: usize,
    pub(crate) others: usize,
    /// ‖logits − logits of the reference‖ / ‖logits of the reference‖, over all tokens
    pub(crate) distance: f64,
}

impl Generation {
    /// Logits that differ by less than the part `rounding` of the largest are equal but for that.
    pub(crate) fn differences(&self, reference: &Self, rounding: f32) -> Differences {
        let mut found = Differences::default();
        let (mut squares, mut reference_squares) = (0f64, 0f64);
        for (own, exact) in self.logits.iter().zip(&reference.logits) {
            let (chosen, best) = (largest(own), largest(exact));
            let lost = (exact[best] - exact[chosen]) / exact[best].abs();
            match lost {
                _ if chosen == best => found.equal += 1,
                lost if lost <= rounding => found.ties += 1,
                _ => found.others += 1,
            }
            for (&own, &exact) in own.iter().zip(exact) {
                squares += f64::from(own - exact).powi(2);
                reference_squares += f64::from(exact).powi(2);
            }
        }
        found.distance = (squares / reference_squares).sqrt();
        found
    }
}

/// Where the first of the largest is.
fn largest(logits: &[f32]) -> usize {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|&logit| logit == largest).unwrap_or_default()
}

/// Generates two tokens or more after a prompt: those with the largest logits, or those of another
/// generation, so that one other token does not change all that follow.
pub(crate) fn generate(
    model: &Model,
    name: &str,
    kind: Kind,
    prompt: &[u32],
    count: usize,
    given: Option<&Generation>,
) -> Result<Generation> {
    let style = ProgressStyle::with_template("{msg:25} {bar:30} {pos}/{len} tokens, {elapsed}");
    let style = style.map_err(Error::msg)?;
    let progress = ProgressBar::new(count as u64).with_style(style).with_message(name.to_owned());
    progress.tick();
    let mut caches = model.caches(kind, prompt.len() + count)?;
    let (mut tokens, mut all): (Vec<u32>, Vec<Vec<f32>>) = (Vec::new(), Vec::new());
    let mut times = Vec::new();
    while tokens.len() < count {
        let started = Instant::now();
        let new = tokens.last().map_or(prompt, std::slice::from_ref);
        let logits = model.logits(new, &mut caches)?;
        let own = largest(&logits) as u32;
        times.push(started.elapsed());
        if logits.iter().any(|logit| !logit.is_finite()) {
            return Err(Error::msg("a token has logits that are not finite"));
        }
        tokens.push(given.map_or(own, |given| given.tokens[tokens.len()]));
        all.push(logits);
        progress.set_position(tokens.len() as u64);
    }
    progress.finish();
    let per_token = times[1..].iter().sum::<Duration>() / (count - 1) as u32;
    Ok(Generation { tokens, logits: all, prompt: times[0], per_token })
}
