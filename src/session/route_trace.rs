//! The file of `--trace-routes`: which experts every position chose at every layer, one JSON object a line.
//! Never holds more than one pass. Surprising fact: a failed pass leaves no lines, so a trace replays exactly what the state saw.
//!
//! First line: `{"format":"ds4-routes","version":1,"model":..,"layers":..,"experts":..,"top_k":..}`; then per position
//! `{"pos":..,"token":..,"phase":"prefill"|"decode","routes":[[ids of layer 0, best first],..]}`.

use std::io::{self, BufWriter, Write};

use serde::Serialize;

use crate::models::probe::{Point, Probe};
use crate::units::TokenId;

#[derive(Serialize)]
struct Header<'a> {
    format: &'static str,
    version: u32,
    model: &'a str,
    layers: usize,
    experts: usize,
    top_k: usize,
}

#[derive(Serialize)]
struct Line<'a> {
    pos: usize,
    token: TokenId,
    phase: &'static str,
    routes: Vec<&'a [i32]>,
}

/// Records the routes of one run.
pub struct RouteRecorder<W: Write> {
    out: BufWriter<W>,
    layers: usize,
    top_k: usize,
    first_pos: usize,
    tokens: Vec<TokenId>,
    /// `[layers, tokens, top_k]` of the pass under way.
    ids: Vec<i32>,
    seen_layers: usize,
    failure: Option<io::Error>,
}

impl<W: Write> RouteRecorder<W> {
    /// Starts a trace into `out` for a model with `(layers, experts, top_k)`.
    ///
    /// # Errors
    /// When `out` cannot be written to.
    pub fn new(out: W, model: &str, (layers, experts, top_k): (usize, usize, usize)) -> io::Result<Self> {
        let mut out = BufWriter::new(out);
        let header = Header { format: "ds4-routes", version: 1, model, layers, experts, top_k };
        serde_json::to_writer(&mut out, &header)?;
        out.write_all(b"\n")?;
        let (tokens, ids) = (Vec::new(), Vec::new());
        Ok(Self { out, layers, top_k, first_pos: 0, tokens, ids, seen_layers: 0, failure: None })
    }

    /// A pass over `tokens` from `position` on begins; the one before is written.
    pub fn pass(&mut self, position: usize, tokens: &[TokenId]) {
        self.flush_pass();
        self.first_pos = position;
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        self.ids.clear();
        self.ids.resize(self.layers * tokens.len() * self.top_k, -1);
        self.seen_layers = 0;
    }

    /// Writes what is left and gives the writer back.
    ///
    /// # Errors
    /// The first failure to write.
    pub fn finish(mut self) -> io::Result<W> {
        self.flush_pass();
        self.failure.map_or(Ok(()), Err)?;
        self.out.into_inner().map_err(io::IntoInnerError::into_error)
    }

    fn flush_pass(&mut self) {
        let rows = self.tokens.len();
        if self.failure.is_none() && rows > 0 && self.seen_layers == self.layers {
            self.failure = self.write_pass(rows).err();
        }
        self.tokens.clear();
    }

    fn write_pass(&mut self, rows: usize) -> io::Result<()> {
        let phase = if rows == 1 { "decode" } else { "prefill" };
        for (row, &token) in self.tokens.iter().enumerate() {
            let routes = (0..self.layers).map(|l| &self.ids[(l * rows + row) * self.top_k..][..self.top_k]).collect();
            serde_json::to_writer(&mut self.out, &Line { pos: self.first_pos + row, token, phase, routes })?;
            self.out.write_all(b"\n")?;
        }
        Ok(())
    }
}

impl<W: Write + Send> Probe for RouteRecorder<W> {
    fn wants(&self, point: Point) -> bool {
        point == Point::RouterIds
    }

    fn ids(&mut self, _point: Point, layer: usize, first_pos: usize, width: usize, ids: &[i32]) {
        let rows = self.tokens.len();
        let at = (layer * rows + first_pos - self.first_pos) * self.top_k;
        self.ids[at..at + ids.len()].copy_from_slice(ids);
        debug_assert_eq!(width, self.top_k);
        // The last row of a layer closes it: a pass may come in parts.
        if first_pos - self.first_pos + ids.len() / width == rows {
            self.seen_layers += 1;
        }
    }
}
