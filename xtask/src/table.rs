//! Tables of plain text.

/// Rows under a header: the first column to the left, the others to the right; no space at the end
/// of a line.
pub fn text(header: &[String], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let all = std::iter::once(header).chain(rows.iter().map(Vec::as_slice));
        let cells = all.filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |row: &[String]| {
        let mut line = String::new();
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            if column == 0 {
                line += &format!("{cell:<width$}");
            } else {
                line += &format!("  {cell:>width$}");
            }
        }
        format!("{}\n", line.trim_end())
    };
    std::iter::once(line(header)).chain(rows.iter().map(|row| line(row))).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn columns_are_aligned() {
        let cells = |row: [&str; 3]| row.map(String::from).to_vec();
        let rows = [cells(["long name", "1", ""]), cells(["µ", "1000", "é"])];
        let expected = "name          a  b\nlong name     1\nµ          1000  é\n";
        assert_eq!(super::text(&cells(["name", "a", "b"]), &rows), expected);
    }
}
