//! Which rows of a sweep each layer has to compute (spec deepseek-v41, 3.13): behind the last layer that makes compressed rows, only those that can
//! still be seen. Pure arithmetic; never approximates. Surprising fact: a window of `w` rows makes each layer need `w - 1` more rows than
//! the one behind it, so the rows that are left out form a triangle.

use crate::models::state::ROLLBACK_ROWS;

/// Work of one layer, as first rows of a sweep; all end at its last row. Rising from field to field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerRows {
    /// From here on the attention input is computed, for compressed rows and index keys.
    pub inputs: usize,
    /// From here on window rows are computed.
    pub window: usize,
    /// From here on everything is computed.
    pub whole: usize,
}

impl LayerRows {
    /// A layer that computes all rows.
    const ALL: LayerRows = LayerRows { inputs: 0, window: 0, whole: 0 };
}

/// What a sweep leaves out.
pub struct Suffix {
    rows: usize,
    layers: Vec<LayerRows>,
    /// Rows at the end that can be taken back afterwards.
    reach: usize,
}

impl Suffix {
    /// All rows of all layers.
    pub fn none(layers: usize, rows: usize) -> Self {
        Self { rows, layers: vec![LayerRows::ALL; layers], reach: rows }
    }

    /// The rows of a sweep of `rows` that the last `seen` outputs and all later tokens depend on, also after up to [`ROLLBACK_ROWS`] of its
    /// rows were taken back, in a model of which these layers make compressed rows.
    pub fn exact(makes_rows: &[bool], window: usize, rows: usize, seen: usize) -> Self {
        Self::of(makes_rows, window, rows, (seen, ROLLBACK_ROWS))
    }

    fn of(makes_rows: &[bool], window: usize, rows: usize, (seen, back): (usize, usize)) -> Self {
        let mut layers = vec![LayerRows::ALL; makes_rows.len()];
        // Rows whose output somebody needs, counted from the end.
        let mut needed = seen;
        for (layer, makes_rows) in layers.iter_mut().zip(makes_rows).rev() {
            // Each of them looks back over the window, and so will the next tokens, from wherever they follow.
            let window = needed.max(back) + window - 1;
            let first = |count: usize| rows.saturating_sub(count);
            *layer = LayerRows { inputs: first(window), window: first(window), whole: first(needed) };
            if *makes_rows {
                // Compressed rows are needed for ever, so every layer up to here computes all rows.
                layer.inputs = 0;
                break;
            }
            needed = window;
        }
        Self { rows, layers, reach: seen.max(back).min(rows) }
    }

    /// Rows at the end of the sweep that can be taken back: what the tokens after the rest look back on was computed.
    pub fn reach(&self) -> usize {
        self.reach
    }

    /// The rows of `layer`.
    pub fn layer(&self, layer: usize) -> LayerRows {
        self.layers[layer]
    }

    /// Rows times layers that are left out.
    pub fn skipped(&self) -> u64 {
        self.layers.iter().map(|l| l.whole as u64).sum()
    }

    /// Cuts the rows of `layer` into pieces of at most `most` that are all of one kind.
    pub fn pieces(&self, layer: usize, most: usize) -> impl Iterator<Item = Piece> + use<> {
        let LayerRows { inputs, window, whole } = self.layers[layer];
        let rows = self.rows;
        let mut at = inputs;
        std::iter::from_fn(move || {
            let (kind, end) = match at {
                at if at >= rows => return None,
                at if at >= whole => (PieceKind::Whole, rows),
                at if at >= window => (PieceKind::Window, whole),
                _ => (PieceKind::Inputs, window),
            };
            let first = at;
            at = end.min(at + most);
            Some(Piece { first, end: at, kind })
        })
    }
}

/// What is computed of a piece's rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PieceKind {
    /// Attention input, compressed rows, index keys.
    Inputs,
    /// Window rows, too.
    Window,
    /// Everything.
    Whole,
}

/// Rows that go through a layer together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    pub first: usize,
    pub end: usize,
    pub kind: PieceKind,
}

impl Piece {
    /// Number of rows.
    pub fn rows(self) -> usize {
        self.end - self.first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec 3.13: 40 layers, the last compressed rows made by layer 20, a window of 128.
    fn published(rows: usize, seen: usize) -> Suffix {
        let makes_rows: Vec<bool> = (0..40).map(|layer| [2, 8, 14, 20].contains(&layer)).collect();
        Suffix::of(&makes_rows, 128, rows, (seen, 0))
    }

    #[test]
    fn numbers_of_the_spec() {
        let suffix = published(10_000, 1);
        let counts = |layer: usize| {
            let rows = suffix.layer(layer);
            [rows.inputs, rows.window, rows.whole].map(|first| 10_000 - first)
        };
        assert_eq!(counts(39), [128, 128, 1]);
        assert_eq!(counts(38), [255, 255, 128]);
        assert_eq!(counts(21), [2414, 2414, 2287]);
        assert_eq!(counts(20), [10_000, 2541, 2414]);
        assert_eq!(counts(19), [10_000; 3]);
        assert_eq!(suffix.skipped(), (20..40).map(|l| 10_000 - (1 + (39 - l) * 127)).sum::<u64>());
        // Nobody asks for logits: only what later tokens look back on.
        let none = published(10_000, 0);
        assert_eq!((none.layer(39).window, none.layer(39).whole), (10_000 - 127, 10_000));
        let all = published(10_000, 10_000);
        assert_eq!(all.skipped(), 0);
    }

    #[test]
    fn rows_that_may_be_taken_back_cost_window_rows_only() {
        let makes_rows: Vec<bool> = (0..40).map(|layer| [2, 8, 14, 20].contains(&layer)).collect();
        let suffix = Suffix::of(&makes_rows, 128, 10_000, (1, 8));
        let counts = |layer: usize| {
            let rows = suffix.layer(layer);
            [rows.inputs, rows.window, rows.whole].map(|first| 10_000 - first)
        };
        // The last layer computes one output, as before, and window rows for whoever follows 1 to 8 rows earlier.
        assert_eq!((counts(39), counts(38)), ([135, 135, 1], [262, 262, 135]));
        assert_eq!(suffix.reach(), 8);
        assert_eq!(Suffix::of(&makes_rows, 128, 5, (1, 8)).reach(), 5);
        assert_eq!(Suffix::of(&makes_rows, 128, 100, (100, 8)).reach(), 100);
    }

    #[test]
    fn pieces_cover_their_rows_once_and_are_of_one_kind() {
        for rows in [2, 127, 128, 129, 2413, 2414, 2415, 2541, 2542, 5000] {
            let suffix = published(rows, 1);
            for (layer, most) in [(0, 512), (20, 512), (20, 7), (30, 100), (39, 512)] {
                let LayerRows { inputs, window, whole } = suffix.layer(layer);
                let mut at = inputs;
                for piece in suffix.pieces(layer, most) {
                    assert_eq!(piece.first, at);
                    assert!((1..=most).contains(&piece.rows()));
                    let kind = match piece.first {
                        first if first >= whole => PieceKind::Whole,
                        first if first >= window => PieceKind::Window,
                        _ => PieceKind::Inputs,
                    };
                    assert_eq!(piece.kind, kind);
                    assert!(kind != PieceKind::Inputs || piece.end <= window);
                    assert!(kind == PieceKind::Whole || piece.end <= whole);
                    at = piece.end;
                }
                assert_eq!(at, rows, "{rows} rows, layer {layer}");
            }
        }
    }
}
