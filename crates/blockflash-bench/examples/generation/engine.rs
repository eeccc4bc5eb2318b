//! Continuous batching: sequences join when there is room for them and leave when they are done.

use super::model::{Cache, Model, Step};
use blockflash_bench::Result;
use blockflash_ops::{Graph, Stream};
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

/// A sequence: its prompt, and then what was generated.
#[derive(Clone, Debug)]
pub struct Sequence {
    pub tokens: Vec<u32>,
    pub prompt: usize,
    /// Its length at the end.
    pub end: usize,
    /// The pages that hold its keys.
    pages: Vec<u32>,
}

impl Sequence {
    pub fn new(prompt: Vec<u32>, end: usize) -> Self {
        Self { prompt: prompt.len(), tokens: prompt, end, pages: Vec::new() }
    }

    fn is_done(&self) -> bool {
        self.tokens.len() >= self.end
    }
}

/// Steps of one kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub steps: usize,
    pub tokens: usize,
    pub seconds: f64,
}

/// Tensors for steps of so many sequences, and on a GPU the graph that computes them.
struct Bucket {
    step: Step,
    graph: Option<Graph>,
}

pub struct Engine<'a> {
    model: &'a Model,
    stream: &'a Stream,
    caches: Vec<Cache>,
    /// By the number of sequences.
    buckets: BTreeMap<usize, Bucket>,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    pub done: Vec<Sequence>,
    free_pages: Vec<u32>,
    pub prefill: Tally,
    /// By the number of sequences that a bucket holds.
    pub decode: BTreeMap<usize, Tally>,
}

impl<'a> Engine<'a> {
    /// An engine with a bucket for each power of 2 up to `most` sequences.
    ///
    /// # Errors
    /// Too little memory, or a device that has no such kernels.
    pub fn new(
        model: &'a Model,
        most: usize,
        waiting: Vec<Sequence>,
        stream: &'a Stream,
    ) -> Result<Self> {
        let mut engine = Self {
            model,
            stream,
            caches: model.caches(stream)?,
            buckets: BTreeMap::new(),
            waiting: waiting.into(),
            running: Vec::new(),
            done: Vec::new(),
            free_pages: (0..model.sizes.pages as u32).rev().collect(),
            prefill: Tally::default(),
            decode: BTreeMap::new(),
        };
        let mut batch = 1;
        loop {
            let mut step = model.step(batch, 1, stream)?;
            // The first run loads kernels. No row has a sequence yet, so no cache changes.
            model.forward(&mut step, &mut engine.caches, stream)?;
            let graph = match stream.device().is_cpu() {
                true => None,
                false => Some(
                    stream
                        .capture(|stream| model.forward(&mut step, &mut engine.caches, stream))?,
                ),
            };
            engine.buckets.insert(batch, Bucket { step, graph });
            if batch >= most {
                return Ok(engine);
            }
            batch *= 2;
        }
    }

    /// Generates until nobody is left. Reports how many sequences wait, run and are done.
    ///
    /// # Errors
    /// A device that fails.
    pub fn run(&mut self, report: impl Fn([usize; 3])) -> Result<()> {
        while !(self.waiting.is_empty() && self.running.is_empty()) {
            self.admit()?;
            if !self.running.is_empty() {
                self.decode()?;
            }
            let (stay, done) = self.running.drain(..).partition(|sequence| !sequence.is_done());
            self.running = stay;
            for mut sequence in done {
                self.free_pages.append(&mut sequence.pages);
                self.done.push(sequence);
            }
            report([self.waiting.len(), self.running.len(), self.done.len()]);
        }
        Ok(())
    }

    /// Starts sequences as long as there is a row and there are pages for all of their tokens.
    fn admit(&mut self) -> Result<()> {
        let most = self.buckets.keys().next_back().copied().unwrap_or(0);
        while self.running.len() < most {
            let Some(next) = self.waiting.front() else { break };
            let needed = next.end.div_ceil(self.model.sizes.page_size);
            let Some(kept) = self.free_pages.len().checked_sub(needed) else { break };
            let Some(mut sequence) = self.waiting.pop_front() else { break };
            sequence.pages = self.free_pages.split_off(kept);
            self.start(&mut sequence)?;
            self.running.push(sequence);
        }
        Ok(())
    }

    /// Computes the prompt of a sequence, and its first token.
    fn start(&mut self, sequence: &mut Sequence) -> Result<()> {
        let (model, stream, length) = (self.model, self.stream, sequence.tokens.len());
        let start = Instant::now();
        let mut step = model.step(1, length, stream)?;
        let table = self.table_of(sequence);
        step.fill(model, [&sequence.tokens, &table, &[length as u32]], stream)?;
        model.forward(&mut step, &mut self.caches, stream)?;
        sequence.tokens.extend(step.next_tokens(stream)?.last());
        self.prefill.add(length, start);
        Ok(())
    }

    /// One more token for every sequence.
    fn decode(&mut self) -> Result<()> {
        let start = Instant::now();
        let mut buckets = self.buckets.range(self.running.len()..);
        let Some(batch) = buckets.next().map(|(&batch, _)| batch) else { return Ok(()) };
        let (mut tokens, mut tables, mut lengths) = (vec![0; batch], Vec::new(), vec![0; batch]);
        for (row, sequence) in self.running.iter().enumerate() {
            tokens[row] = sequence.tokens.last().copied().unwrap_or(0);
            lengths[row] = sequence.tokens.len() as u32;
            tables.extend(self.table_of(sequence));
        }
        tables.resize(batch * self.model.sizes.max_pages, 0);
        let Some(Bucket { step, graph }) = self.buckets.get_mut(&batch) else { return Ok(()) };
        step.fill(self.model, [&tokens, &tables, &lengths], self.stream)?;
        match graph {
            Some(graph) => graph.launch(self.stream)?,
            None => self.model.forward(step, &mut self.caches, self.stream)?,
        }
        let next = step.next_tokens(self.stream)?;
        for (sequence, token) in self.running.iter_mut().zip(next) {
            sequence.tokens.push(token);
        }
        self.decode.entry(batch).or_default().add(self.running.len(), start);
        Ok(())
    }

    /// The row of the block table of a sequence; entries behind its last page are not used.
    fn table_of(&self, sequence: &Sequence) -> Vec<u32> {
        let mut row = sequence.pages.clone();
        row.resize(self.model.sizes.max_pages, 0);
        row
    }
}

impl Tally {
    fn add(&mut self, tokens: usize, start: Instant) {
        self.steps += 1;
        self.tokens += tokens;
        self.seconds += start.elapsed().as_secs_f64();
    }
}
