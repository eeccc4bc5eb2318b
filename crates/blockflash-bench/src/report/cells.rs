//! Tables of a report, column by column, and their numbers.

use super::runs::mean;

/// Cells of a table, all rows as long as the header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cells {
    /// Names of the columns.
    pub header: Vec<String>,
    /// Lines in the order of measurement; the last one is a mean if there are several ratios.
    pub rows: Vec<Vec<String>>,
}

/// Placeholder for a missing number.
pub(super) const NONE: &str = "—";

/// Three or four significant digits.
pub(super) fn number(value: f64) -> String {
    let decimals = match value {
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        _ => 4,
    };
    format!("{value:.decimals$}")
}

pub(super) fn two(value: f64) -> String {
    format!("{value:.2}")
}

/// A table with a line for each item, made column by column.
pub(super) struct Table<'a, T> {
    items: &'a [T],
    pub(super) cells: Cells,
}

impl<'a, T> Table<'a, T> {
    pub(super) fn of(items: &'a [T]) -> Self {
        Self { items, cells: Cells { header: Vec::new(), rows: vec![Vec::new(); items.len()] } }
    }

    /// Adds a column; one that would be empty is left out.
    pub(super) fn column(
        mut self,
        name: impl Into<String>,
        cell: impl Fn(&T) -> Option<String>,
    ) -> Self {
        let column: Vec<_> = self.items.iter().map(cell).collect();
        if column.iter().any(Option::is_some) {
            self.cells.header.push(name.into());
            let texts = column.into_iter().map(|text| text.unwrap_or(NONE.to_owned()));
            self.cells.rows.iter_mut().zip(texts).for_each(|(row, text)| row.push(text));
        }
        self
    }
}

impl Cells {
    /// Adds a line of geometric means, if there are several values.
    pub(super) fn with_means(mut self, means: &[(&str, Vec<f64>)]) -> Self {
        if means.first().is_some_and(|(_, values)| values.len() > 1) {
            let cell = |name: &String| match means.iter().find(|(other, _)| other == name) {
                Some((_, values)) => mean(values).map_or(NONE.to_owned(), two),
                None => String::new(),
            };
            let mut line: Vec<_> = self.header.iter().map(cell).collect();
            line[0] = "geometric mean".to_owned();
            self.rows.push(line);
        }
        self
    }
}
