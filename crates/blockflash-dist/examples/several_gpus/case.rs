//! Cases, and their names.

use blockflash_dist::Pass;
use std::fmt;
use std::str::FromStr;

/// Causal attention in bf16 over one sequence, head_dim 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub pass: Pass,
    pub seqlen: usize,
    pub heads_q: usize,
    pub heads_kv: usize,
    /// Blocks of 128 keys with the best scores that each block of 128 queries visits, of a
    /// document.
    pub top_k: Option<usize>,
}

pub const HEAD_DIM: usize = 128;
pub const BLOCK: usize = 128;

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { pass, seqlen, heads_q, heads_kv, top_k } = *self;
        let pass = if pass == Pass::Backward { "bwd_" } else { "" };
        write!(f, "{pass}s{seqlen}_h{heads_q}")?;
        if heads_kv != heads_q {
            write!(f, "kv{heads_kv}")?;
        }
        top_k.map_or(Ok(()), |blocks| write!(f, "_top{blocks}"))
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Case, String> {
        let parsed = || -> Option<Case> {
            let (pass, rest) = match text.strip_prefix("bwd_") {
                Some(rest) => (Pass::Backward, rest),
                None => (Pass::Forward, text),
            };
            let mut parts = rest.split('_');
            let seqlen = parts.next()?.strip_prefix('s')?.parse().ok()?;
            let heads = parts.next()?.strip_prefix('h')?;
            let (heads_q, heads_kv) = heads.split_once("kv").unwrap_or((heads, heads));
            let [heads_q, heads_kv] = [heads_q.parse().ok()?, heads_kv.parse().ok()?];
            let top_k = match parts.next() {
                Some(part) => Some(part.strip_prefix("top")?.parse().ok()?),
                None => None,
            };
            let complete = parts.next().is_none() && (top_k.is_none() || pass == Pass::Forward);
            complete.then_some(Case { pass, seqlen, heads_q, heads_kv, top_k })
        };
        parsed().ok_or_else(|| format!("{text} is no case such as s131072_h32kv8"))
    }
}
