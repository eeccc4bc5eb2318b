//! Scores of blocks of keys for each query, and the choice of the largest of them: the index of
//! [`IndexAttention`](crate::IndexAttention).

mod cpu;
mod plan;
mod rows;
mod scores;
mod select;
mod steps;
mod top_k;

pub use plan::{IndexScoresLaunch, TopKLaunch, plan_scores, plan_top_k};
pub use rows::IndexRows;
pub use scores::{BlockReduction, IndexScores, IndexScoresProblem};
pub use top_k::{TopK, TopKProblem};

pub(crate) use select::{support_of_scores, support_of_top_k};

use crate::operation::Prepared;

/// See [`Operation::prepare`](crate::Operation::prepare).
pub type PreparedIndexScores = Prepared<IndexScoresProblem>;

/// See [`Operation::prepare`](crate::Operation::prepare).
pub type PreparedTopK = Prepared<TopKProblem>;

#[cfg(test)]
mod tests;
