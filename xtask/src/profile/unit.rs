//! Numbers as people read them.

/// How a number is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Seconds.
    Time,
    /// Per second, with this unit.
    Rate(&'static str),
    /// With decimal prefixes.
    Bytes,
    /// Per cent.
    Percent,
    /// Whole things.
    Count,
    /// A number as it is.
    Number,
}

/// A number as people read it.
pub fn shown(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Time => scaled(value * 1e6, &[("µs", 1.0), ("ms", 1e3), ("s", 1e6)]),
        Unit::Rate(unit) => {
            let names = ["", "k", "M", "G", "T", "P"].map(|prefix| format!("{prefix}{unit}"));
            let scales: Vec<(&str, f64)> = names.iter().map(String::as_str).zip(DECADES).collect();
            scaled(value, &scales)
        }
        Unit::Bytes => scaled(
            value,
            &["B", "kB", "MB", "GB", "TB"].into_iter().zip(DECADES).collect::<Vec<_>>(),
        ),
        Unit::Percent => format!("{value:.1} %"),
        Unit::Count => grouped(value),
        Unit::Number => significant(value),
    }
}

const DECADES: [f64; 6] = [1.0, 1e3, 1e6, 1e9, 1e12, 1e15];

/// In the largest unit that leaves at least one before the point.
fn scaled(value: f64, units: &[(&str, f64)]) -> String {
    let fits = units.iter().rev().find(|(_, scale)| value.abs() >= *scale);
    let (name, scale) = fits.or(units.first()).copied().unwrap_or(("", 1.0));
    format!("{} {name}", significant(value / scale))
}

/// About four digits.
fn significant(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 100.0 => format!("{value:.1}"),
        size if size >= 10.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Whole, in groups of three digits.
fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .filter_map(|group| std::str::from_utf8(group).ok())
        .collect();
    groups.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!(shown(512.34e-6, Unit::Time), "512.3 µs");
        assert_eq!(shown(1.5e-3, Unit::Time), "1.500 ms");
        assert_eq!(shown(0.0, Unit::Bytes), "0 B");
        assert_eq!(shown(402.8e6, Unit::Bytes), "402.8 MB");
        assert_eq!(shown(6.1e14, Unit::Rate("FLOP/s")), "610.0 TFLOP/s");
        assert_eq!(shown(295569767.0, Unit::Count), "295 569 767");
        assert_eq!(shown(54.1, Unit::Percent), "54.1 %");
    }
}
