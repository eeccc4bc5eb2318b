//! The view of a report on the records: runs of suites, their cases, and the fastest
//! implementation.

use crate::case::{Case, DecodeShape};
use crate::record::{OURS, Record};
use crate::timing::Cache;
pub(super) use crate::timing::geometric_mean as mean;
use blockflash_sys::DType;
use std::collections::HashMap;

/// Content of one table: a suite on one GPU, measured in one run or in several runs of one commit
/// that complete each other.
#[derive(Debug)]
pub(super) struct Run<'r> {
    /// Never empty, in the order of measurement, without ceilings.
    pub(super) records: Vec<&'r Record>,
    /// Records of this run whose operation is `ceiling`.
    pub(super) ceilings: Vec<&'r Record>,
    /// An older run of the suite with more cases or competitors, which this one hides: its first
    /// record and its size.
    pub(super) fuller: Option<(&'r Record, [usize; 2])>,
}

/// All records of one case.
#[derive(Debug)]
pub(super) struct Row<'r> {
    /// Any record of the case, for its shape.
    pub(super) any: &'r Record,
    /// `None` for an id that this program does not know: it is in tables but not in charts.
    pub(super) case: Option<Case>,
    /// Our records: one, or one for each kernel that was forced by name.
    pub(super) ours: Vec<&'r Record>,
    /// Records of competitors and of references, which compute something else.
    pub(super) peers: Vec<&'r Record>,
    /// For attention with a block mask: our record of the same shape without the mask, from the
    /// same run.
    pub(super) dense: Option<&'r Record>,
}

/// Operation of records that hold measured ceilings.
pub(super) const CEILING: &str = "ceiling";

/// The newest run of each suite on each GPU. Cases that it lacks are taken from older runs of the
/// same commit. They are in the order in which the records have each of them first, so that runs
/// which measure a part again leave it as it is.
pub(super) fn newest(records: &[Record]) -> Vec<Run<'_>> {
    let mut runs: Vec<Run<'_>> = Vec::new();
    for mut run in all(records) {
        match runs.iter_mut().find(|other| other.key() == run.key()) {
            None => runs.push(run),
            Some(newest) => {
                // At equal dates the run that stands later in the file is newer.
                if run.date() >= newest.date() {
                    std::mem::swap(newest, &mut run);
                }
                newest.complete(&run);
            }
        }
    }
    runs.sort_by_key(|run| run.key());
    let mut order = HashMap::new();
    for (at, record) in records.iter().enumerate() {
        order.entry((&record.gpu, &record.suite, &record.case)).or_insert(at);
    }
    for run in &mut runs {
        run.records.sort_by_key(|record| order[&(&record.gpu, &record.suite, &record.case)]);
    }
    runs
}

/// All runs, in the order of the records.
pub(super) fn all(records: &[Record]) -> Vec<Run<'_>> {
    let key = |record: &'_ Record| (record.run.clone(), record.suite.clone(), record.gpu.clone());
    let runs = grouped(records.iter().filter(|record| record.op != CEILING), |r| key(r));
    let of_run = |(run, _, gpu): &(String, String, String)| {
        let same = |r: &&Record| r.op == CEILING && (&r.run, &r.gpu) == (run, gpu);
        records.iter().filter(same).collect()
    };
    let run = |(key, records)| Run { ceilings: of_run(&key), records, fuller: None };
    runs.into_iter().map(run).collect()
}

impl<'r> Run<'r> {
    pub(super) fn first(&self) -> &'r Record {
        self.records[0]
    }

    /// GPU and suite, which identify a table.
    pub(super) fn key(&self) -> (&'r str, &'r str) {
        (&self.first().gpu, &self.first().suite)
    }

    /// The commit of the run, after other commits with the same images that complete it.
    pub(super) fn commits(&self) -> String {
        let commits = grouped(self.records.iter(), |record| record.commit.as_str());
        // Several would not fit into a line of a chart. A commit with changes keeps its mark.
        let short = |commit: &str| match commit.get(..7) {
            Some(start) if !commit.contains('-') => start.to_owned(),
            _ => commit.to_owned(),
        };
        match &commits[..] {
            [(only, _)] => (*only).to_owned(),
            many => {
                let short: Vec<_> = many.iter().map(|(commit, _)| short(commit)).collect();
                let (last, before) = short.split_last().expect("a run has records");
                format!("{} and {last}", before.join(", "))
            }
        }
    }

    pub(super) fn date(&self) -> &'r str {
        self.records.iter().map(|record| record.date.as_str()).max().unwrap_or_default()
    }

    pub(super) fn rows(&self) -> Vec<Row<'r>> {
        rows(&self.records)
    }

    /// Numbers of cases and of competitors.
    pub(super) fn size(&self) -> [usize; 2] {
        let timed = |record: &&Record| record.us.is_some() && !record.reference;
        [self.rows().len(), peers(self.records.iter().copied().filter(timed)).len()]
    }

    /// Units per second of a ceiling.
    pub(super) fn rate(&self, name: &str) -> Option<f64> {
        self.ceilings.iter().find(|record| record.case == name)?.rate
    }

    /// FLOP/s of the faster matrix instruction that takes this type.
    pub(super) fn matmul(&self, dtype: DType) -> Option<f64> {
        let rates = ["mma", "wgmma"].map(|name| self.rate(&format!("{name}_{dtype}")));
        rates.into_iter().flatten().reduce(f64::max)
    }

    /// Puts cases that only the older run has in front, if it has the same commit or the same
    /// images, and remembers what it hides.
    fn complete(&mut self, older: &Run<'r>) {
        // The first record may come from an earlier completion by another commit.
        let images = |record: &'r Record| {
            (record.same_as.as_ref().unwrap_or(&record.commit), &record.driver)
        };
        let own = images(self.first());
        let known = self.rows();
        let missing =
            older.records.iter().copied().filter(|&record| {
                images(record) == own && !known.iter().any(|row| row.is_of(record))
            });
        self.records = missing.chain(self.records.iter().copied()).collect();
        let size = self.size();
        // A run that the older run hides is also hidden by this one.
        let hidden = [Some((older.first(), older.size())), older.fuller, self.fuller];
        let fuller = |(_, other): &(_, [usize; 2])| other[0] > size[0] || other[1] > size[1];
        self.fuller = hidden.into_iter().flatten().filter(fuller).max_by_key(|(_, size)| *size);
    }
}

/// Groups the records of a run by case. Cold and warm caches are different cases.
pub(super) fn rows<'r>(records: &[&'r Record]) -> Vec<Row<'r>> {
    let key = |record: &&'r Record| (&record.op, &record.case, &record.cache);
    let row = |(_, records): (_, Vec<&'r Record>)| {
        let any = records[0];
        let case = any.case.parse().ok().filter(|case: &Case| case.op() == any.op);
        let (ours, peers) = records.into_iter().partition(|r| r.implementation == OURS);
        Row { any, case, ours, peers, dense: None }
    };
    let mut rows: Vec<_> = grouped(records.iter().copied(), key).into_iter().map(row).collect();
    let dense: Vec<_> = rows.iter().map(|row| row.dense_counterpart(&rows)).collect();
    rows.iter_mut().zip(dense).for_each(|(row, dense)| row.dense = dense);
    rows
}

/// Groups the cases by heading, in the order of measurement.
pub(super) fn groups<'a, 'r>(rows: &'a [Row<'r>]) -> Vec<(String, Vec<&'a Row<'r>>)> {
    grouped(rows, |row| row.heading())
}

/// Groups by key, in the order of the first item of each.
pub(super) fn grouped<T, K: PartialEq>(
    items: impl IntoIterator<Item = T>,
    key: impl Fn(&T) -> K,
) -> Vec<(K, Vec<T>)> {
    let mut groups: Vec<(K, Vec<T>)> = Vec::new();
    for item in items {
        let key = key(&item);
        match groups.iter_mut().find(|(other, _)| *other == key) {
            Some((_, items)) => items.push(item),
            None => groups.push((key, vec![item])),
        }
    }
    groups
}

impl<'r> Row<'r> {
    fn is_of(&self, record: &Record) -> bool {
        let any = self.any;
        (&any.op, &any.case, &any.cache) == (&record.op, &record.case, &record.cache)
    }

    /// Whether the L2 cache is overwritten before each launch.
    pub(super) fn is_cold(&self) -> bool {
        self.any.cache == Cache::Cold.name()
    }

    pub(super) fn case(&self) -> Option<&Case> {
        self.case.as_ref()
    }

    pub(super) fn cold(&self) -> &'static str {
        if self.is_cold() { ", cold caches" } else { "" }
    }

    /// The case id, with a note if caches were cold, or warm where launches take copies in turn as
    /// a rule.
    pub(super) fn name(&self) -> String {
        let note = match (self.any.cache.as_str(), self.decode()) {
            ("cold", _) => " (cold)",
            ("warm", Some(_)) => " (warm)",
            _ => "",
        };
        format!("{}{note}", self.any.case)
    }

    /// The properties that change the character of a case, but neither length nor density.
    pub(super) fn heading(&self) -> String {
        let Some(case) = &self.case else { return format!("{}{}", self.any.op, self.cold()) };
        let dtype = match case.dtype() {
            DType::F16 | DType::BF16 => String::new(), // they run at the same speed
            other => format!(", {other}"),
        };
        format!("{}{dtype}{}", case.group(), self.cold())
    }

    /// The shape of attention to a cache.
    pub(super) fn decode(&self) -> Option<&DecodeShape> {
        match self.case.as_ref()? {
            Case::AttentionDecode(shape) => Some(shape),
            _ => None,
        }
    }

    /// Our fastest kernel.
    pub(super) fn best(&self) -> Option<&'r Record> {
        fastest(self.ours.iter().copied())
    }

    /// Our fastest kernel for the same shape without a block mask.
    fn dense_counterpart(&self, rows: &[Row<'r>]) -> Option<&'r Record> {
        let shape = self.case.as_ref()?.attention()?;
        shape.lists?;
        let dense = Some(shape.without_lists().into());
        let same = |row: &&Row<'_>| row.is_cold() == self.is_cold() && row.case == dense;
        rows.iter().find(same)?.best()
    }

    /// Our TFLOP/s over visited pairs, relative to our TFLOP/s without a block mask.
    pub(super) fn part_of_dense(&self, ours: &Record) -> Option<f64> {
        Some(ours.tflops.filter(|_| ours.us.is_some())? / self.dense?.tflops?)
    }

    pub(super) fn competitors(&self) -> impl Iterator<Item = &'r Record> {
        self.peers.iter().copied().filter(|peer| !peer.reference)
    }

    /// The fastest competitor.
    pub(super) fn best_competitor(&self) -> Option<&'r Record> {
        fastest(self.competitors())
    }

    /// The fastest competitor that gives the same bits at each launch, where competitors differ in
    /// that.
    pub(super) fn best_deterministic(&self) -> Option<&'r Record> {
        fastest(self.competitors().filter(|record| record.deterministic))
    }

    /// References that were measured, such as dense products.
    pub(super) fn references(&self) -> impl Iterator<Item = &'r Record> {
        self.peers.iter().copied().filter(|peer| peer.reference && peer.us.is_some())
    }

    pub(super) fn peer(&self, name: &str) -> Option<&'r Record> {
        self.peers.iter().copied().find(|peer| peer.implementation == name)
    }

    /// Our fastest kernel, or a peer.
    pub(super) fn record(&self, name: &str) -> Option<&'r Record> {
        if name == OURS { self.best() } else { self.peer(name) }
    }

    /// Speed-up of our fastest kernel over another implementation.
    pub(super) fn over(&self, other: Option<&Record>) -> Option<f64> {
        Some(other?.us? / self.best()?.us?)
    }

    /// Speed-up over the fastest competitor.
    pub(super) fn ratio(&self) -> Option<f64> {
        self.over(self.best_competitor())
    }
}

/// The record with the shortest time; records without a time are skipped.
pub(crate) fn fastest<'r>(records: impl Iterator<Item = &'r Record>) -> Option<&'r Record> {
    let timed = records.filter_map(|record| Some((record.us?, record)));
    timed.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, record)| record)
}

/// Names of competitors and references in the order of measuring.
pub(super) fn peers<'r>(records: impl Iterator<Item = &'r Record>) -> Vec<&'r str> {
    let others = records.filter(|record| record.implementation != OURS);
    let names = grouped(others, |record| record.implementation.as_str());
    names.into_iter().map(|(name, _)| name).collect()
}

/// Smallest and largest value; `None` if there are no values.
pub(super) fn range(values: impl IntoIterator<Item = f64>) -> Option<(f64, f64)> {
    let pairs = values.into_iter().map(|value| (value, value));
    pairs.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
}
