//! Tables for a terminal: columns under each other, numbers to the right, no frame. Owns the look and nothing else.
//! Never shortens a cell. Surprising fact: lines carry no trailing spaces, so that they can be pasted and compared.

use comfy_table::{CellAlignment, ContentArrangement, Table as Layout, presets};

/// Rows of text cells under a head.
pub struct Table {
    layout: Layout,
    columns: usize,
}

impl Table {
    /// An empty table. A head that begins with `<` stands over text; the others stand over numbers.
    pub fn new(head: &[&str]) -> Self {
        let mut layout = Layout::new();
        layout.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        layout.set_header(head.iter().map(|h| h.trim_start_matches('<')));
        for (at, head) in head.iter().enumerate() {
            let column = layout.column_mut(at).expect("the head has this column");
            column.set_padding((if at == 0 { 0 } else { 2 }, 0));
            let side = if head.starts_with('<') { CellAlignment::Left } else { CellAlignment::Right };
            column.set_cell_alignment(side);
        }
        Self { layout, columns: head.len() }
    }

    /// Adds a row of as many cells as the head has.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        assert_eq!(cells.len(), self.columns, "a cell for every column");
        self.layout.add_row(cells);
    }

    /// The table, a newline after every line.
    pub fn text(&self) -> String {
        self.layout.lines().map(|line| format!("{}\n", line.trim_end())).collect()
    }
}

/// A count with its thousands set apart: `1,234,567`.
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `part` of `whole` in percent with one decimal; two where rounding would say 100.
pub fn percent(share: f64) -> String {
    // No minus before a zero.
    let percent = if (100.0 * share).abs() < 0.05 { 0.0 } else { 100.0 * share };
    if (99.95..100.0).contains(&percent) { format!("{:.2} %", percent.min(99.99)) } else { format!("{percent:.1} %") }
}

/// A number of about three digits.
pub fn short(number: f64) -> String {
    match number {
        0.0 => "0".into(),
        n if n.abs() >= 99.95 => format!("{n:.0}"),
        n if n.abs() >= 9.995 => format!("{n:.1}"),
        n if n.abs() >= 0.01 => format!("{n:.2}"),
        n => format!("{n:.1e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_stand_under_their_heads() {
        let mut table = Table::new(&["<policy", "misses", "hit rate"]);
        table.row(["lru", "10", "1.0 %"]);
        table.row(["adaptive", "7", "99.0 %"]);
        assert_eq!(
            table.text(),
            "policy    misses  hit rate\nlru           10     1.0 %\nadaptive       7    99.0 %\n"
        );
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!([0, 12, 999, 1000, 1_234_567].map(grouped), ["0", "12", "999", "1,000", "1,234,567"]);
        let percents = [-0.0004, 0.5, 0.9994, 0.99951, 0.999_999, 1.0].map(percent);
        assert_eq!(percents, ["0.0 %", "50.0 %", "99.9 %", "99.95 %", "99.99 %", "100.0 %"]);
        assert_eq!([0.0, 0.004, 1.234, 12.34, 123.4].map(short), ["0", "4.0e-3", "1.23", "12.3", "123"]);
    }
}
