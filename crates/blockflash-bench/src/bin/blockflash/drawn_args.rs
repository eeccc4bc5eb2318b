//! Options of the suite `drawn`, whose shapes are drawn.

use crate::failure::{Result, bail};
use blockflash_bench::suite::{DRAWN, Limits, Operation, Suite};

/// What is drawn.
#[derive(clap::Args)]
pub struct DrawnArgs {
    /// Of the suite drawn: decode, forward, backward, block-sparse, bsr or packed, or several with
    /// commas between [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    operation: Vec<Operation>,
    /// Shapes that are drawn of each operation [default: 30]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    cases: Option<u16>,
    /// Draw no shape with more MiB of inputs and outputs [default: 2048]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..))]
    most_mib: Option<u32>,
    /// Draw no shape with more 10⁹ floating-point operations [default: 8000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    most_gflop: Option<u32>,
}

impl DrawnArgs {
    /// Refuses options that would do nothing.
    pub fn refuse(&self) -> Result<()> {
        let given = [
            ("--operation", !self.operation.is_empty()),
            ("--cases", self.cases.is_some()),
            ("--most-mib", self.most_mib.is_some()),
            ("--most-gflop", self.most_gflop.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((name, _)) => bail!("{name} is for the suite {DRAWN}: blockflash bench {DRAWN}"),
            None => Ok(()),
        }
    }

    /// A suite of each operation.
    pub fn suites(&self, seed: Option<u64>) -> Result<Vec<Suite>> {
        let Some(seed) = seed else {
            bail!("bench {DRAWN} needs --seed: a record takes one that was used for nothing else");
        };
        let usual = Limits::default();
        let limits = Limits {
            mib: self.most_mib.unwrap_or(usual.mib),
            gflop: self.most_gflop.unwrap_or(usual.gflop),
        };
        let cases = self.cases.unwrap_or(30).into();
        let mut wanted = Operation::ALL.to_vec();
        wanted.retain(|operation| self.operation.is_empty() || self.operation.contains(operation));
        let draw = |operation| Ok(Suite::drawn(operation, seed, cases, limits)?);
        wanted.into_iter().map(draw).collect()
    }
}
