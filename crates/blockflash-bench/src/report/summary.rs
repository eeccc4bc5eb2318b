//! A suite in a few lines: the distance to the best rival, by groups of cases and by rival.

use super::break_even::part;
use super::cells::{Cells, DETERMINISTIC_RATIO, NONE, number};
use super::notes::counted;
use super::rate::{rate, unit};
use super::run::{Row, geometric_mean, groups, peer_names, range};
use crate::record::Record;

/// Summarizes the whole suite in a sentence.
pub(crate) fn sentence(rows: &[Row<'_>]) -> String {
    let ratios: Vec<_> = rows.iter().filter_map(Row::ratio).collect();
    let ours = rows.iter().filter(|row| row.best().is_some()).count();
    let mut text = counted(rows.len(), "case");
    match ours {
        0 => text += ", none with a result of blockflash",
        some if some < rows.len() => text += &format!(", {some} with a result of blockflash"),
        _ => {}
    }
    if let (Some(mean), Some((least, most))) =
        (geometric_mean(&ratios), range(ratios.iter().copied()))
    {
        text += &match ratios.len() {
            1 => format!(": {mean:.2} × the best rival"),
            _ => format!(
                ": {mean:.2} × the best rival as geometric mean, {least:.2} to {most:.2}, faster \
                 than every rival in {}",
                ratios.iter().filter(|&&ratio| ratio > 1.0).count()
            ),
        };
    }
    let ratios: Vec<_> = rows.iter().filter_map(Row::deterministic_ratio).collect();
    if let Some(mean) = geometric_mean(&ratios) {
        let spread = spread(&ratios);
        text += &format!("; {mean:.2} × the best deterministic rival, {spread}");
    }
    text + "."
}

/// One line per group, and one for all cases.
pub(crate) fn by_group(rows: &[Row<'_>]) -> Cells {
    let groups = groups(rows);
    let rivals = rows.iter().any(|row| row.best_rival().is_some());
    let ceilings = rows.iter().filter_map(Row::best).any(|ours| ours.ceiling.is_some());
    let unit = unit(rows.iter().map(|row| row.any));
    let [ours, best] = ["blockflash", "best rival"].map(|name| format!("{name} {unit}"));
    let mut header = vec!["group", "cases", &ours];
    if rivals {
        header.extend([&best, "× best rival", "least to most"]);
    }
    let deterministic = rows.iter().any(|row| row.deterministic_ratio().is_some());
    if deterministic {
        header.extend([DETERMINISTIC_RATIO, "least to most"]);
    }
    let dense = rows.iter().any(|row| row.dense.is_some());
    header.extend(dense.then_some("of dense"));
    // Marks whose rates are compared with ours.
    let marks = peer_names(
        rows.iter().flat_map(|row| row.marks().filter(|mark| part(row, mark).is_some())),
    );
    let of_marks: Vec<_> = marks.iter().map(|mark| format!("of `{mark}`")).collect();
    header.extend(of_marks.iter().map(String::as_str));
    header.extend(ceilings.then_some("ceiling"));
    let line = |label: &str, rows: &[&Row<'_>]| {
        let ours: Vec<_> = rows.iter().filter_map(|row| row.best()).collect();
        let mut line = vec![label.to_owned(), rows.len().to_string(), speeds(ours.iter().copied())];
        if rivals {
            line.push(speeds(rows.iter().filter_map(|row| row.best_rival())));
            line.extend(mean_and_spread(rows.iter().filter_map(|row| row.ratio())));
        }
        if deterministic {
            line.extend(mean_and_spread(rows.iter().filter_map(|row| row.deterministic_ratio())));
        }
        let parts: Vec<_> = rows.iter().filter_map(|row| row.part_of_dense(row.best()?)).collect();
        line.extend(dense.then(|| spread(&parts)));
        line.extend(marks.iter().map(|mark| spread(&parts_of(rows, mark))));
        line.extend(ceilings.then(|| binding(&ours)));
        line
    };
    let mut lines: Vec<_> = groups.iter().map(|(label, rows)| line(label, rows)).collect();
    if groups.len() > 1 {
        lines.push(line("all", &rows.iter().collect::<Vec<_>>()));
    }
    Cells { header: header.into_iter().map(str::to_owned).collect(), rows: lines }
}

/// Our rates relative to a dense product, in cases where it was measured.
fn parts_of(rows: &[&Row<'_>], mark: &str) -> Vec<f64> {
    rows.iter().filter_map(|row| part(row, row.peer(mark)?)).collect()
}

/// One line per rival, with ratios over the cases that both have measured.
pub(crate) fn by_rival(rows: &[Row<'_>]) -> Cells {
    let unit = unit(rows.iter().map(|row| row.any));
    let header = ["rival", "cases", unit, "× rival", "least to most", "blockflash faster in"];
    let line = |name: &str| {
        let timed: Vec<_> = rows
            .iter()
            .filter_map(|row| Some((row, row.peer(name).filter(|peer| peer.us.is_some())?)))
            .collect();
        let ratio = |(row, peer): &(&Row<'_>, &Record)| Some(peer.us? / row.best()?.us?);
        let ratios: Vec<_> = timed.iter().filter_map(ratio).collect();
        let faster = ratios.iter().filter(|&&ratio| ratio > 1.0).count();
        let mean = geometric_mean(&ratios);
        (!timed.is_empty()).then(|| {
            vec![
                format!("`{name}`"),
                timed.len().to_string(),
                speeds(timed.iter().map(|(_, peer)| *peer)),
                mean.map_or(NONE.to_owned(), |mean| format!("**{mean:.2}**")),
                spread(&ratios),
                mean.map_or(NONE.to_owned(), |_| faster.to_string()),
            ]
        })
    };
    let names = peer_names(rows.iter().flat_map(Row::rivals));
    Cells {
        header: header.map(str::to_owned).to_vec(),
        rows: names.into_iter().filter_map(line).collect(),
    }
}

/// `303–627`.
fn speeds<'r>(records: impl Iterator<Item = &'r Record>) -> String {
    match range(records.filter_map(rate)) {
        None => NONE.to_owned(),
        Some((least, most)) if number(least) == number(most) => number(most),
        Some((least, most)) => format!("{}–{}", number(least), number(most)),
    }
}

/// `**1.03**`, and `0.98–1.10`.
fn mean_and_spread(ratios: impl Iterator<Item = f64>) -> [String; 2] {
    let ratios: Vec<_> = ratios.collect();
    let mean = geometric_mean(&ratios).map_or(NONE.to_owned(), |mean| format!("**{mean:.2}**"));
    [mean, spread(&ratios)]
}

fn spread(ratios: &[f64]) -> String {
    range(ratios.iter().copied())
        .map_or(NONE.to_owned(), |(least, most)| format!("{least:.2}–{most:.2}"))
}

/// `matmul 0.42–0.61, l2 0.50`: each ceiling that binds somewhere, the most frequent first.
fn binding(ours: &[&Record]) -> String {
    let mut kinds: Vec<(&str, Vec<f64>)> = Vec::new();
    for record in ours {
        let (Some(ceiling), Some(fraction)) = (record.ceiling.as_deref(), record.ceiling_fraction)
        else {
            continue;
        };
        match kinds.iter_mut().find(|(kind, _)| *kind == ceiling) {
            Some((_, fractions)) => fractions.push(fraction),
            None => kinds.push((ceiling, vec![fraction])),
        }
    }
    kinds.sort_by_key(|(_, fractions)| std::cmp::Reverse(fractions.len()));
    let text = |(kind, fractions): &(&str, Vec<f64>)| match range(fractions.iter().copied()) {
        Some((least, most)) if most - least >= 0.005 => format!("{kind} {least:.2}–{most:.2}"),
        range => format!("{kind} {:.2}", range.map_or(0.0, |(least, _)| least)),
    };
    match kinds.is_empty() {
        true => NONE.to_owned(),
        false => kinds.iter().map(text).collect::<Vec<_>>().join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::super::run::rows;
    use super::super::sample::{grid, record, suite};
    use super::*;
    use crate::record::OURS;

    #[test]
    fn a_sentence_counts_what_is_missing() {
        let of = |records: &[Record]| sentence(&rows(&records.iter().collect::<Vec<_>>()));
        assert_eq!(of(&suite()), "2 cases, 1 with a result of blockflash: 1.50 × the best rival.");
        assert_eq!(of(&[record("a", OURS, None)]), "1 case, none with a result of blockflash.");
        let twice =
            [suite(), vec![record("c", OURS, Some(2.0)), record("c", "x", Some(1.5))]].concat();
        let text = ": 1.06 × the best rival as geometric mean, 0.75 to 1.50, faster than every \
                    rival in 1.";
        assert!(of(&twice).ends_with(text), "{}", of(&twice));
    }

    #[test]
    fn deterministic_rivals_are_compared_apart() {
        let repeats = Record { deterministic: true, ..record("a", "y", Some(4.0)) };
        let records = [record("a", OURS, Some(2.0)), record("a", "x", Some(1.0)), repeats];
        let rows = rows(&records.iter().collect::<Vec<_>>());
        let expected = "1 case: 0.50 × the best rival; 2.00 × the best deterministic rival, \
                        2.00–2.00.";
        assert_eq!(sentence(&rows), expected);
        let groups = by_group(&rows);
        assert_eq!(groups.header[6..], ["× best deterministic", "least to most"]);
        assert_eq!(groups.rows[0][4..], ["**0.50**", "0.50–0.50", "**2.00**", "2.00–2.00"]);
    }

    #[test]
    fn groups_and_rivals_have_means_and_ranges() {
        let records = grid();
        let attention: Vec<_> =
            records.iter().filter(|record| record.op == "attention_fwd").collect();
        let rows = rows(&attention);
        let groups = by_group(&rows);
        assert_eq!(groups.rows.len(), 5);
        assert_eq!(
            groups.rows[0],
            ["head_dim 64, full", "3", "500", "556", "**0.90**", "0.90–0.90", "matmul 0.50"]
        );
        assert_eq!((groups.rows[4][0].as_str(), groups.rows[4][1].as_str()), ("all", "12"));
        let rivals = by_rival(&rows);
        assert_eq!(rivals.rows.len(), 2, "a mark is no rival");
        assert_eq!(
            rivals.rows[1],
            ["`torch_sdpa_cudnn`", "12", "417", "**1.20**", "1.20–1.20", "12"]
        );
    }

    #[test]
    fn dense_products_have_a_column_each_which_old_records_leave_empty() {
        let case = |block| format!("m1024_n8_k1024_b{block}_d0.25_uniform_f16");
        let mark = |block, name: &str, us| Record {
            reference: true,
            ..record(&case(block), name, Some(us))
        };
        let records = [
            record(&case(64), OURS, Some(50.0)),
            mark(64, "torch_matmul_dense", 100.0),
            mark(64, "torch_matmul_random", 110.0),
            record(&case(32), OURS, Some(100.0)),
            mark(32, "torch_matmul_dense", 100.0),
        ];
        let groups = |records: &[Record]| by_group(&rows(&records.iter().collect::<Vec<_>>()));
        let cells = groups(&records);
        assert_eq!(cells.header[3..], ["of `torch_matmul_dense`", "of `torch_matmul_random`"]);
        assert_eq!(cells.rows[0][3..], ["0.50–0.50", "0.55–0.55"]);
        assert_eq!(cells.rows[1][3..], ["0.25–0.25", "—"]);
        assert_eq!(groups(&records[3..]).header[3..], ["of `torch_matmul_dense`"]);
    }

    #[test]
    fn a_group_without_ours_shows_the_rivals() {
        let records = [record("a", OURS, None), record("a", "x", Some(2.0))];
        let rows = rows(&records.iter().collect::<Vec<_>>());
        assert_eq!(by_group(&rows).rows, [["bsr_matmul", "1", "—", "50.0", "—", "—"]]);
        assert_eq!(by_rival(&rows).rows, [["`x`", "1", "50.0", "—", "—", "—"]]);
    }

    #[test]
    fn ceilings_are_listed_by_how_often_they_bind() {
        let limited = |ceiling: &str, fraction| Record {
            ceiling: Some(ceiling.into()),
            ceiling_fraction: Some(fraction),
            ..Record::default()
        };
        let records = [limited("l2", 0.5), limited("matmul", 0.4), limited("matmul", 0.6)];
        assert_eq!(binding(&records.iter().collect::<Vec<_>>()), "matmul 0.40–0.60, l2 0.50");
    }
}
