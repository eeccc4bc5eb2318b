//! Up to which density sparse weights are faster.

/// The density at which the speed-up falls to 1, between neighbouring points along a straight line in logarithms of both. `points` are
/// densities and speed-ups, densities ascending. `None` if the first is no faster; the last density if all are faster.
pub fn density(points: &[(f64, f64)]) -> Option<f64> {
    let &(mut below) = points.first().filter(|&&(_, speedup)| speedup > 1.0)?;
    for &(density, speedup) in &points[1..] {
        if speedup <= 1.0 {
            let part = below.1.ln() / (below.1.ln() - speedup.ln());
            return Some(below.0 * (density / below.0).powf(part));
        }
        below = (density, speedup);
    }
    Some(below.0)
}
