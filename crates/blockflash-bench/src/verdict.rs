//! What `blockflash tune` finds out about a case: whether the selected kernel is the fastest.

use crate::record::Record;
use crate::timing::geometric_mean;

/// A kernel with its time.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    /// Name of the kernel, without the prefix that all have.
    pub kernel: String,
    /// Microseconds of a launch.
    pub us: f64,
}

/// The selected and the fastest kernel of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Id of the case.
    pub case: String,
    /// Number of kernels that were measured.
    pub kernels: usize,
    /// The one that the library selects; `None` if it has no time.
    pub selected: Option<Timed>,
    /// The fastest one.
    pub fastest: Timed,
}

impl Verdict {
    /// From the records of one case; `None` if no kernel has a time.
    pub fn of(records: &[Record]) -> Option<Self> {
        let timed = |record: &Record| {
            let symbol = record.symbol.as_deref()?;
            let kernel = symbol.strip_prefix("blockflash_").unwrap_or(symbol).to_owned();
            Some(Timed { kernel, us: record.us.filter(|_| record.verified)? })
        };
        let selected =
            records.iter().find(|record| record.tuning.as_ref().is_some_and(|t| t.selected));
        let all: Vec<Timed> = records.iter().filter_map(timed).collect();
        Some(Self {
            case: records.first()?.case.clone(),
            kernels: all.len(),
            selected: selected.and_then(timed),
            fastest: all.into_iter().min_by(|a, b| a.us.total_cmp(&b.us))?,
        })
    }

    /// Time of the selected kernel over that of the fastest one.
    pub fn loss(&self) -> Option<f64> {
        Some(self.selected.as_ref()?.us / self.fastest.us)
    }
}

/// The geometric mean of the losses; `None` without any.
pub fn mean_loss(verdicts: &[Verdict]) -> Option<f64> {
    geometric_mean(&verdicts.iter().filter_map(Verdict::loss).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockflash_ops::bsr_matmul::BsrProblem;
    use blockflash_ops::tuning::{Likeness, Measured, Tuning};
    use blockflash_sys::DType;

    fn record(symbol: &str, us: Option<f64>, selected: bool) -> Record {
        let problem = Likeness::of_bsr_matmul(&BsrProblem::new(DType::F16, [64; 3], 16, 4));
        let image = format!("{symbol}.sm_89.cubin");
        let tuning = Some(Measured { image, multiprocessors: 58, selected, problem });
        let (symbol, verified) = (Some(symbol.to_owned()), us.is_some());
        let (case, gpu) = ("a".to_owned(), "NVIDIA L4".to_owned());
        Record { case, gpu, symbol, us, verified, tuning, ..Record::default() }
    }

    #[test]
    fn the_selected_kernel_is_compared_with_the_fastest() {
        let wide = record("blockflash_wide", Some(30.0), true);
        let narrow = record("blockflash_narrow", Some(20.0), false);
        let wrong = record("blockflash_wrong", None, true);
        let verdict =
            Verdict::of(&[wide.clone(), narrow.clone(), record("x", None, false)]).unwrap();
        assert_eq!((verdict.case.as_str(), verdict.kernels), ("a", 2));
        assert_eq!(verdict.fastest, Timed { kernel: "narrow".into(), us: 20.0 });
        assert_eq!(verdict.loss(), Some(1.5));
        let best = Verdict::of(&[wide]).unwrap();
        assert_eq!(best.loss(), Some(1.0));
        assert!((mean_loss(&[verdict, best]).unwrap() - 1.5f64.sqrt()).abs() < 1e-12);
        assert_eq!((Verdict::of(&[]), Verdict::of(std::slice::from_ref(&wrong))), (None, None));
        let failed = Verdict::of(&[wrong, narrow]).unwrap();
        assert_eq!((failed.loss(), mean_loss(&[failed])), (None, None));
    }

    /// What is written is what selection reads.
    #[test]
    fn records_are_read_by_selection() {
        let records = [record("blockflash_x", Some(2.0), true), record("y", None, false)];
        let lines = records.map(|record| serde_json::to_string(&record).unwrap());
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), lines.join("\n")).unwrap();
        let tuning = Tuning::read(file.path()).unwrap();
        assert_eq!((tuning.unknown_kernels(), tuning.failed()), (1, 1));
    }
}
