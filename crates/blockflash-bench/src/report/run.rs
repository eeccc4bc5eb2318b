//! The view of a report on the records: runs of suites, their cases, and the fastest
//! implementation.

use super::shape;
use crate::case::{Case, DecodeShape};
use crate::record::{OURS, Record};
use blockflash_sys::DType;
use std::collections::HashMap;

/// Content of one table: a suite on one GPU, measured in one run or in several runs of one commit
/// that complete each other.
#[derive(Debug)]
pub(crate) struct Run<'r> {
    /// Never empty, in the order of measurement, without ceilings.
    pub(crate) records: Vec<&'r Record>,
    /// Measured ceilings of the GPU in this run.
    pub(crate) rates: Rates<'r>,
    /// An older run of the suite with more cases or rivals, if there is one.
    pub(crate) fuller: Option<Fuller<'r>>,
}

/// Size of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size {
    pub(crate) cases: usize,
    pub(crate) rivals: usize,
}

/// A larger run that the newest run hides from the report.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fuller<'r> {
    pub(crate) record: &'r Record,
    pub(crate) size: Size,
}

/// All records of one case.
#[derive(Debug)]
pub(crate) struct Row<'r> {
    /// Any record of the case, for its shape.
    pub(crate) any: &'r Record,
    /// Our records: one, or one for each kernel that was forced by name.
    pub(crate) ours: Vec<&'r Record>,
    /// Records of rivals and marks.
    pub(crate) peers: Vec<&'r Record>,
    /// For attention with a block mask: our record of the same shape without the mask, from the
    /// same run.
    pub(crate) dense: Option<&'r Record>,
}

/// Records of one run whose operation is `ceiling`.
#[derive(Debug, Default)]
pub(crate) struct Rates<'r>(pub(crate) Vec<&'r Record>);

/// Operation of records that hold measured ceilings.
pub(crate) const CEILING: &str = "ceiling";

/// The newest run of each suite on each GPU. Cases that it lacks are taken from older runs of the
/// same commit. They are in the order in which the records have each of them first, so that runs
/// which measure a part again leave it as it is.
pub(crate) fn newest(records: &[Record]) -> Vec<Run<'_>> {
    let mut runs: Vec<Run<'_>> = Vec::new();
    for mut run in runs_of(records) {
        match runs.iter_mut().find(|other| other.key() == run.key()) {
            None => runs.push(run),
            Some(newest) => {
                // At equal dates the run that stands later in the file is newer.
                if run.date() >= newest.date() {
                    std::mem::swap(newest, &mut run);
                }
                newest.complete(&run);
                newest.hides(&run);
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
pub(crate) fn runs_of(records: &[Record]) -> Vec<Run<'_>> {
    let mut runs: Vec<Run<'_>> = Vec::new();
    for record in records.iter().filter(|record| record.op != CEILING) {
        let same = |run: &&mut Run<'_>| {
            let first = run.first();
            (&first.run, &first.suite, &first.gpu) == (&record.run, &record.suite, &record.gpu)
        };
        match runs.iter_mut().find(same) {
            Some(run) => run.records.push(record),
            None => {
                let of_run = |other: &&Record| {
                    other.op == CEILING && other.run == record.run && other.gpu == record.gpu
                };
                let rates = Rates(records.iter().filter(of_run).collect());
                runs.push(Run { records: vec![record], rates, fuller: None });
            }
        }
    }
    runs
}

impl<'r> Run<'r> {
    pub(crate) fn first(&self) -> &'r Record {
        self.records[0]
    }

    /// GPU and suite, which identify a table.
    pub(crate) fn key(&self) -> (&'r str, &'r str) {
        (&self.first().gpu, &self.first().suite)
    }

    /// The commit of the run, after other commits with the same images that complete it.
    pub(crate) fn commits(&self) -> String {
        let mut commits: Vec<&str> = Vec::new();
        for record in &self.records {
            if !commits.contains(&record.commit.as_str()) {
                commits.push(&record.commit);
            }
        }
        // Several would not fit into a line of a plot. A commit with changes keeps its mark.
        let short = |commit: &&str| match commit.get(..7) {
            Some(start) if !commit.contains('-') => start.to_owned(),
            _ => (*commit).to_owned(),
        };
        match commits.split_last() {
            Some((last, before @ [_, ..])) => {
                let before: Vec<_> = before.iter().map(short).collect();
                format!("{} and {}", before.join(", "), short(last))
            }
            _ => commits.concat(),
        }
    }

    pub(crate) fn date(&self) -> &'r str {
        self.records.iter().map(|record| record.date.as_str()).max().unwrap_or_default()
    }

    pub(crate) fn rows(&self) -> Vec<Row<'r>> {
        rows(&self.records)
    }

    pub(crate) fn size(&self) -> Size {
        let rivals =
            self.records.iter().copied().filter(|record| record.us.is_some() && !record.reference);
        Size { cases: self.rows().len(), rivals: peer_names(rivals).len() }
    }

    /// Puts cases that only the older run has in front, if it has the same commit or the same
    /// images.
    fn complete(&mut self, older: &Run<'r>) {
        // The first record may come from an earlier completion by another commit.
        let images = |record: &'r Record| {
            (record.same_as.as_ref().unwrap_or(&record.commit), &record.driver)
        };
        let own = images(self.first());
        let same = |record: &'r Record| images(record) == own;
        let known = self.rows();
        let is_known = |record: &Record| known.iter().any(|row| row.is_of(record));
        let missing =
            older.records.iter().copied().filter(|record| same(record) && !is_known(record));
        self.records = missing.chain(self.records.iter().copied()).collect();
    }

    fn hides(&mut self, older: &Run<'r>) {
        let size = self.size();
        // A run that the older run hides is also hidden by this one.
        let itself = Fuller { record: older.first(), size: older.size() };
        let hidden = [Some(itself), older.fuller, self.fuller].into_iter().flatten();
        self.fuller = hidden
            .filter(|fuller| fuller.size.cases > size.cases || fuller.size.rivals > size.rivals)
            .max_by_key(|fuller| fuller.size);
    }
}

/// Groups the records of a run by case. Cold and warm caches are different cases.
pub(crate) fn rows<'r>(records: &[&'r Record]) -> Vec<Row<'r>> {
    let mut rows: Vec<Row<'r>> = Vec::new();
    for &record in records {
        let at = rows.iter().position(|row| row.is_of(record)).unwrap_or_else(|| {
            rows.push(Row { any: record, ours: Vec::new(), peers: Vec::new(), dense: None });
            rows.len() - 1
        });
        match record.implementation == OURS {
            true => rows[at].ours.push(record),
            false => rows[at].peers.push(record),
        }
    }
    let dense: Vec<_> = rows.iter().map(|row| row.dense_counterpart(&rows)).collect();
    rows.iter_mut().zip(dense).for_each(|(row, dense)| row.dense = dense);
    rows
}

/// Groups the cases by heading, in the order of measurement.
pub(crate) fn groups<'a, 'r>(rows: &'a [Row<'r>]) -> Vec<(String, Vec<&'a Row<'r>>)> {
    let mut groups: Vec<(String, Vec<&Row<'_>>)> = Vec::new();
    for row in rows {
        let label = shape::group(row.any);
        match groups.iter_mut().find(|(other, _)| *other == label) {
            Some((_, rows)) => rows.push(row),
            None => groups.push((label, vec![row])),
        }
    }
    groups
}

impl<'r> Row<'r> {
    fn is_of(&self, record: &Record) -> bool {
        (&self.any.op, &self.any.case) == (&record.op, &record.case)
            && self.any.cache == record.cache
    }

    /// The case id, with a note if caches were cold, or warm where launches take copies in turn as
    /// a rule.
    pub(crate) fn name(&self) -> String {
        let note = match (self.any.cache.as_str(), self.decode()) {
            ("cold", _) => " (cold)",
            ("warm", Some(_)) => " (warm)",
            _ => "",
        };
        format!("{}{note}", self.any.case)
    }

    pub(crate) fn case(&self) -> Option<Case> {
        shape::case(self.any)
    }

    /// The shape of attention to a cache.
    pub(crate) fn decode(&self) -> Option<DecodeShape> {
        match self.case()? {
            Case::AttentionDecode(shape) => Some(shape),
            _ => None,
        }
    }

    /// Our fastest kernel.
    pub(crate) fn best(&self) -> Option<&'r Record> {
        fastest(self.ours.iter().copied())
    }

    /// Our fastest kernel for the same shape without a block mask.
    fn dense_counterpart(&self, rows: &[Row<'r>]) -> Option<&'r Record> {
        let case = self.case()?;
        let (shape, pass) = case.block_sparse_attention()?;
        let dense = Some((&shape.dense(), pass));
        let same = |row: &&Row<'_>| {
            row.case().is_some_and(|case| case.dense_attention() == dense)
                && shape::is_cold(row.any) == shape::is_cold(self.any)
        };
        rows.iter().find(same)?.best()
    }

    /// Our TFLOP/s over visited pairs, relative to our TFLOP/s without a block mask.
    pub(crate) fn part_of_dense(&self, ours: &Record) -> Option<f64> {
        Some(ours.tflops.filter(|_| ours.us.is_some())? / self.dense?.tflops?)
    }

    /// The fastest rival. Marks compute something else and are no rivals.
    pub(crate) fn best_rival(&self) -> Option<&'r Record> {
        fastest(self.rivals())
    }

    /// The fastest rival that gives the same bits at each launch, where rivals differ in that.
    pub(crate) fn best_deterministic(&self) -> Option<&'r Record> {
        fastest(self.rivals().filter(|rival| rival.deterministic))
    }

    pub(crate) fn rivals(&self) -> impl Iterator<Item = &'r Record> {
        self.peers.iter().copied().filter(|peer| !peer.reference)
    }

    /// Marks that were measured, such as dense products.
    pub(crate) fn marks(&self) -> impl Iterator<Item = &'r Record> {
        self.peers.iter().copied().filter(|peer| peer.reference && peer.us.is_some())
    }

    pub(crate) fn peer(&self, name: &str) -> Option<&'r Record> {
        self.peers.iter().copied().find(|peer| peer.implementation == name)
    }

    /// Speed-up of our fastest kernel over the fastest rival.
    pub(crate) fn ratio(&self) -> Option<f64> {
        self.ratio_to(self.best_rival())
    }

    /// Speed-up of our fastest kernel over the fastest deterministic rival.
    pub(crate) fn deterministic_ratio(&self) -> Option<f64> {
        self.ratio_to(self.best_deterministic())
    }

    fn ratio_to(&self, rival: Option<&Record>) -> Option<f64> {
        Some(rival?.us? / self.best()?.us?)
    }
}

/// The record with the shortest time; records without a time are skipped.
pub(crate) fn fastest<'r>(records: impl Iterator<Item = &'r Record>) -> Option<&'r Record> {
    let timed = records.filter_map(|record| Some((record.us?, record)));
    timed.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, record)| record)
}

/// Names of rivals and marks in the order of measuring.
pub(crate) fn peer_names<'r>(rows: impl Iterator<Item = &'r Record>) -> Vec<&'r str> {
    let mut names: Vec<&str> = Vec::new();
    for record in rows.filter(|record| record.implementation != OURS) {
        if !names.contains(&record.implementation.as_str()) {
            names.push(&record.implementation);
        }
    }
    names
}

/// Geometric mean; `None` if there are no values.
pub(crate) fn geometric_mean(values: &[f64]) -> Option<f64> {
    let sum: f64 = values.iter().map(|value| value.ln()).sum();
    (!values.is_empty()).then(|| (sum / values.len() as f64).exp())
}

/// Smallest and largest value; `None` if there are no values.
pub(crate) fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |range, value| {
        let (least, most) = range.unwrap_or((value, value));
        Some((least.min(value), most.max(value)))
    })
}

impl Rates<'_> {
    /// Rate of a ceiling in units per second.
    pub(crate) fn rate(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|record| record.case == name)?.rate
    }

    /// FLOP/s of the faster matrix instruction that takes this type.
    pub(crate) fn matmul(&self, dtype: DType) -> Option<f64> {
        let rates = ["mma", "wgmma"].map(|name| self.rate(&format!("{name}_{dtype}")));
        rates.into_iter().flatten().reduce(f64::max)
    }

    /// B/s from L2 with the faster kind of copy.
    pub(crate) fn l2(&self) -> Option<f64> {
        ["l2_read", "l2_bulk"].map(|name| self.rate(name)).into_iter().flatten().reduce(f64::max)
    }
}

#[cfg(test)]
mod tests;
