//! Queries, keys and values with the structure of a long document instead of independent noise.
//!
//! The recipe for a token at position t; each key-value head has its own directions, of length
//! sqrt(head_dim):
//!
//! - The document is a chain of segments with one topic each. Segment lengths are drawn between a
//!   quarter and 7/4 of the mean. Each segment draws one of `TOPICS` topics, so topics return at
//!   large distances.
//! - Keys are 0.7 · topic + 0.7 · place + noise. `place` holds sines and cosines of t with periods
//!   from 32 to 4096 tokens, so that nearby tokens have similar places.
//! - Queries have the same form with the topic that they ask for: the topic of their own segment,
//!   or in every fourth segment the topic of an earlier one. Query heads range from local (place
//!   only) over mixed to topical (topic only). Their parts are scaled so that a matching topic adds
//!   8 to the exponent, the same place adds 8, and the sink adds 12; the noise has a standard
//!   deviation of about 1.5.
//! - The first four tokens are an attention sink, as in trained models: all queries point to their
//!   keys, and their values are small.
//! - Values are the direction of the topic + noise.

use crate::io::Array;
use crate::{Error, Result, random};
use blockflash_sys::DType;
use half::bf16;
use rayon::prelude::*;
use std::f32::consts::TAU;

/// Topics that segments are drawn from.
const TOPICS: usize = 48;
/// Tokens at the beginning that all queries attend to.
const SINK: usize = 4;

/// Weights of topic and place in a key, relative to noise of 1.
const TOPIC: f32 = 0.7;
const PLACE: f32 = 0.7;
const SINK_KEY: f32 = 1.5;
const SINK_VALUE: f32 = 0.1;

/// Contribution to the exponent when a query matches a key.
const TOPIC_LOGIT: f32 = 8.0;
const PLACE_LOGIT: f32 = 8.0;
const SINK_LOGIT: f32 = 12.0;

/// Periods in tokens.
const SHORTEST_PERIOD: f32 = 32.0;
const LONGEST_PERIOD: f32 = 4096.0;

/// Sizes of the document.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    /// Tokens.
    pub seqlen: usize,
    /// Heads of q.
    pub heads_q: usize,
    /// Heads of k and v.
    pub heads_kv: usize,
    /// Elements of a row of a head.
    pub head_dim: usize,
    /// Mean tokens of a segment.
    pub segment: usize,
    /// Equal seeds give equal documents.
    pub seed: u64,
}

/// Properties of one token.
struct Token {
    topic: usize,
    asked: usize,
}

impl Recipe {
    /// Draws q `[1, seqlen, heads_q, head_dim]`, k and v `[1, seqlen, heads_kv, head_dim]`, in
    /// bf16. Equal seeds give equal documents.
    ///
    /// # Errors
    /// Sizes of 0, and too little memory.
    pub fn draw(&self) -> Result<[Array; 3]> {
        let Self { seqlen, heads_q, heads_kv, head_dim, segment, seed } = *self;
        if [seqlen, heads_q, heads_kv, head_dim, segment].contains(&0) || heads_q % heads_kv != 0 {
            return Err(Error::Option(
                "sizes must be positive, and query heads a multiple of key-value heads".to_owned(),
            ));
        }
        let tokens = self.tokens();
        let places = self.places();
        let place = |token: usize| &places[token * head_dim..][..head_dim];
        // Directions of a head: topics of keys, topics of values, the sink.
        let directions = random::normals(heads_kv * (2 * TOPICS + 1) * head_dim, seed ^ 0xD1);
        let direction = |head: usize, which: usize| {
            &directions[(head * (2 * TOPICS + 1) + which) * head_dim..][..head_dim]
        };
        let group = heads_q / heads_kv;
        // Directions have length sqrt(head_dim), and products are divided by sqrt(head_dim).
        let for_logit = |logit: f32, key: f32| logit / (key * (head_dim as f32).sqrt());
        let q = self.rows(heads_q, 0, |token, head, row| {
            // 0 for the most local head, 1 for the most topical one; heads that share keys differ.
            let topical = if heads_q > 1 { head as f32 / (heads_q - 1) as f32 } else { 0.5 };
            let (topic, place_part) = ((2.0 * topical).min(1.0), (2.0 - 2.0 * topical).min(1.0));
            let kv = head / group;
            add(row, for_logit(TOPIC_LOGIT, TOPIC) * topic, direction(kv, tokens[token].asked));
            add(row, for_logit(PLACE_LOGIT, PLACE) * place_part, place(token));
            add(row, for_logit(SINK_LOGIT, SINK_KEY), direction(kv, 2 * TOPICS));
        })?;
        let k = self.rows(heads_kv, 1, |token, head, row| {
            add(row, TOPIC, direction(head, tokens[token].topic));
            add(row, PLACE, place(token));
            if token < SINK {
                add(row, SINK_KEY, direction(head, 2 * TOPICS));
            }
        })?;
        let v = self.rows(heads_kv, 2, |token, head, row| {
            add(row, 1.0, direction(head, TOPICS + tokens[token].topic));
            if token < SINK {
                row.iter_mut().for_each(|value| *value *= SINK_VALUE);
            }
        })?;
        Ok([q, k, v])
    }

    fn tokens(&self) -> Vec<Token> {
        let mut words =
            random::words(4 * self.seqlen.div_ceil(self.segment.div_ceil(4)), self.seed)
                .into_iter();
        let mut draw = |below: usize| words.next().map_or(0, |word| word as u32 as usize % below);
        let mut tokens: Vec<Token> = Vec::with_capacity(self.seqlen);
        while tokens.len() < self.seqlen {
            let length = self.segment.div_ceil(4) + draw(self.segment + self.segment.div_ceil(2));
            let topic = draw(TOPICS);
            let asked = match draw(4) {
                0 if !tokens.is_empty() => tokens[draw(tokens.len())].topic,
                _ => topic,
            };
            let length = length.min(self.seqlen - tokens.len());
            tokens.extend((0..length).map(|_| Token { topic, asked }));
        }
        tokens
    }

    /// `[seqlen, head_dim]`, each row of length sqrt(head_dim).
    fn places(&self) -> Vec<f32> {
        let Self { seqlen, head_dim, .. } = *self;
        let waves = head_dim.div_ceil(2);
        let mut places = vec![0.0; seqlen * head_dim];
        places.par_chunks_mut(head_dim).enumerate().for_each(|(token, row)| {
            for (at, value) in row.iter_mut().enumerate() {
                let step = (at / 2) as f32 / (waves - 1).max(1) as f32;
                let period = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD).powf(step);
                let angle = TAU * (token as f32 / period).fract();
                *value =
                    std::f32::consts::SQRT_2 * if at % 2 == 0 { angle.cos() } else { angle.sin() };
            }
        });
        places
    }

    /// N(0, 1) noise; `shape` adds the signal to each row.
    fn rows(
        &self,
        heads: usize,
        lane: u64,
        shape: impl Fn(usize, usize, &mut [f32]) + Sync,
    ) -> Result<Array> {
        let Self { seqlen, head_dim, seed, .. } = *self;
        let sizes = [1, seqlen, heads, head_dim];
        let out_of_memory = |bytes: u64| Error::Option(format!("{sizes:?} need {bytes} bytes"));
        let noise =
            random::normal(DType::BF16, &sizes, seed, lane, |_| ()).map_err(out_of_memory)?;
        let mut values = vec![bf16::ZERO; noise.len()];
        values.par_chunks_mut(head_dim).enumerate().for_each(|(at, out)| {
            let mut row = noise.to_f32(at * head_dim..(at + 1) * head_dim);
            shape(at / heads, at % heads, &mut row);
            out.iter_mut().zip(row).for_each(|(out, value)| *out = bf16::from_f32(value));
        });
        Array::new(&sizes, values).ok_or_else(|| out_of_memory(u64::MAX))
    }
}

fn add(row: &mut [f32], factor: f32, direction: &[f32]) {
    row.iter_mut().zip(direction).for_each(|(value, part)| *value += factor * part);
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECIPE: Recipe =
        Recipe { seqlen: 2048, heads_q: 4, heads_kv: 2, head_dim: 64, segment: 256, seed: 7 };

    #[test]
    fn documents_are_reproducible_and_have_structure() {
        let [q, k, v] = RECIPE.draw().unwrap();
        assert_eq!((q.shape(), v.shape()), (&[1, 2048, 4, 64][..], &[1, 2048, 2, 64][..]));
        assert!(RECIPE.draw().unwrap() == [q.clone(), k.clone(), v]);
        assert!(Recipe { seed: 8, ..RECIPE }.draw().unwrap()[0] != q);
        assert!(Recipe { heads_kv: 3, ..RECIPE }.draw().is_err());
        assert!(Recipe { segment: 0, ..RECIPE }.draw().is_err());
        let row = |array: &Array, token: usize, head: usize| {
            let heads = array.shape()[2];
            array.to_f32((token * heads + head) * 64..(token * heads + head + 1) * 64)
        };
        let score = |query: usize, head: usize, key: usize| -> f32 {
            let (q, k) = (row(&q, query, head), row(&k, key, head / 2));
            q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>() / 8.0
        };
        let places = [300, 700, 1100, 1500, 1900];
        let mean = |back: std::ops::Range<usize>, head: usize| {
            let pairs = places.iter().flat_map(|&at| back.clone().map(move |back| (at, back)));
            let scores: Vec<f32> = pairs.map(|(at, back)| score(at, head, at - back)).collect();
            scores.iter().sum::<f32>() / scores.len() as f32
        };
        // A local head looks nearby, every head at the sink.
        assert!(mean(1..9, 0) > mean(100..108, 0) + 1.0);
        for head in 0..4 {
            let sink = places.iter().map(|&at| score(at, head, 1)).sum::<f32>() / 5.0;
            assert!(sink > 4.0, "head {head}: {sink}");
        }
    }
}
