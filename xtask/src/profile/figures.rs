//! The numbers of a page.

use super::{ceilings::Ceilings, launch::Launch, lines::PAGE, raw::Raw, unit::Unit};
use std::collections::BTreeMap;

/// Values by the key of their line.
pub type Figures = BTreeMap<String, f64>;

/// Where a number comes from.
pub enum From {
    /// The first of these metrics that the GPU has.
    Metric(&'static [&'static str]),
    /// The counted work and the numbers above it.
    Work(fn(&Launch, &Figures) -> Option<f64>),
    /// The ceilings, the counted work and the numbers above it.
    Limit(fn(&Ceilings, &Launch, &Figures) -> Option<f64>),
}

/// One line.
pub struct Line {
    /// Name in the JSON form.
    pub key: &'static str,
    /// Name for people.
    pub label: &'static str,
    /// How it is written.
    pub unit: Unit,
    /// Where it comes from.
    pub from: From,
}

/// All numbers that can be had.
pub fn figures(raw: &Raw, launch: &Launch, ceilings: &Ceilings) -> Figures {
    let mut figures = Figures::new();
    for line in lines() {
        if let From::Metric(names) = line.from {
            figures.extend(raw.first(names).map(|value| (line.key.to_string(), value)));
        }
    }
    derive(&mut figures, launch, ceilings);
    figures
}

/// Computes anew whatever is not measured, in the order of the page.
pub fn derive(figures: &mut Figures, launch: &Launch, ceilings: &Ceilings) {
    for line in lines() {
        let value = match line.from {
            From::Metric(_) => continue,
            From::Work(value) => value(launch, figures),
            From::Limit(value) => value(ceilings, launch, figures),
        };
        match value {
            Some(value) => figures.insert(line.key.to_string(), value),
            None => figures.remove(line.key),
        };
    }
}

fn lines() -> impl Iterator<Item = &'static Line> {
    PAGE.iter().flat_map(|(_, lines)| *lines)
}

#[cfg(test)]
mod tests {
    use super::super::raw;
    use super::*;

    #[test]
    fn numbers_are_derived_from_counts() {
        let raw = raw::parse(raw::tests::CSV, "blockflash_sample").unwrap();
        let launch = Launch { flops: 300e9, bytes: 125e6, l2_bytes: 1e9, ..Launch::default() };
        let ceilings = Ceilings { matmul: Some(800e12), hbm: Some(4e12), ..Ceilings::default() };
        let figures = figures(&raw, &launch, &ceilings);
        let expected = [
            ("flop_rate", 600e12),
            ("tensor_pipe", 54.1),
            ("l2_ratio", 2.0),
            ("hbm_ratio", 2.0),
            ("conflict_share", 0.5),
            ("per_hbm_byte", 1200.0),
            ("attainable", 800e12),
            ("attained", 75.0),
        ];
        for (key, expected) in expected {
            let value = figures[key];
            assert!((value / expected - 1.0).abs() < 1e-9, "{key}: {value}");
        }
        assert!(!figures.contains_key("l1") && !figures.contains_key("exp_rate"));
    }
}
