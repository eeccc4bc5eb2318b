//! Token by token, with times.

use crate::attention::Kind;
use crate::model::Model;
use candle_core::{Error, Result};
use indicatif::{ProgressBar, ProgressStyle};
use std::time::{Duration, Instant};

/// What was generated, and in what time.
#[derive(Clone)]
pub(crate) struct Generation {
    pub(crate) tokens: Vec<u32>,
    /// For each token by how much its logit is below the largest one, as a part of that.
    pub(crate) lost: Vec<f32>,
    /// Until the first token.
    pub(crate) prompt: Duration,
    /// Mean of all others.
    pub(crate) per_token: Duration,
}

/// Generates two tokens or more after a prompt: those with the largest logits, or the given ones.
pub(crate) fn generate(
    model: &Model,
    name: &str,
    kind: Kind,
    prompt: &[u32],
    count: usize,
    given: Option<&[u32]>,
) -> Result<Generation> {
    let style = ProgressStyle::with_template("{msg:25} {bar:30} {pos}/{len} tokens, {elapsed}");
    let style = style.map_err(Error::msg)?;
    let progress = ProgressBar::new(count as u64).with_style(style).with_message(name.to_owned());
    progress.tick();
    let mut caches = model.caches(kind, prompt.len() + count)?;
    let (mut tokens, mut lost): (Vec<u32>, Vec<f32>) = (Vec::new(), Vec::new());
    let mut times = Vec::new();
    while tokens.len() < count {
        let started = Instant::now();
        let new = tokens.last().map_or(prompt, std::slice::from_ref);
        let logits = model.logits(new, &mut caches)?;
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let best = || logits.iter().position(|&logit| logit == largest);
        let token = given.and_then(|given| given.get(tokens.len()).copied());
        let token = token.or_else(|| best().map(|best| best as u32));
        let Some(&logit) = token.and_then(|token| logits.get(token as usize)) else {
            return Err(Error::msg("the logits of a token have no largest one"));
        };
        lost.push((largest - logit) / largest.abs());
        tokens.extend(token);
        times.push(started.elapsed());
        progress.set_position(tokens.len() as u64);
    }
    progress.finish();
    let per_token = times[1..].iter().sum::<Duration>() / (count - 1) as u32;
    Ok(Generation { tokens, lost, prompt: times[0], per_token })
}
