//! N-gram memory (spec 4): hash of the last tokens to row numbers, decoding of rows, their gated addition.
//! Never replaces a damaged row by zeros: the step fails and names it. Surprising fact: rows depend on token ids alone,
//! so they are read long before the layer that needs them.

use super::config::EngramConfig;
use super::pass::Pass;
use crate::backend::{Backend, BackendError, ops};
use crate::models::ModelError;
use crate::models::probe::Point;
use crate::quant::minifloat::scaled_e4m3;
use crate::units::TokenId;

/// Smallest magnitude under the square root of the gate (spec 4.5).
const GATE_FLOOR: f32 = 1e-6;
/// Largest scale, 2^119, with which every code that is a number stays one.
const SCALE_SAFE: u8 = 246;

impl EngramConfig {
    /// Tokens before the current one that a hash depends on.
    pub fn look_back(&self) -> usize {
        self.order_max - 1
    }

    /// Appends the rows of table `table` for the newest token of `window` (oldest first, at most `order_max` tokens;
    /// fewer only at the start of the text), columns in order. Spec 4.3.
    pub fn hash(&self, table: usize, window: &[TokenId], rows: &mut Vec<u64>) {
        let compressed = |back: usize| {
            let token = window.len().checked_sub(back + 1).map(|at| window[at]);
            u64::from(token.map_or(self.pad, |token| self.token_map[token as usize]))
        };
        let (multipliers, primes) = (&self.multipliers[table], &self.primes[table]);
        // The loader has checked that no product exceeds 63 bits.
        let mut hash = compressed(0) * multipliers[0];
        for (back, multiplier) in multipliers.iter().enumerate().skip(1) {
            hash ^= compressed(back) * multiplier;
            for head in 0..self.heads {
                let column = (back - 1) * self.heads + head;
                rows.push(self.offsets[table][column] + hash % primes[column]);
            }
        }
    }

    /// Rows of all tables for `tokens`, which follow `tail` (oldest first): `[table][tokens * columns]`.
    pub fn rows(&self, tail: &[TokenId], tokens: &[TokenId]) -> Vec<Vec<u64>> {
        let mut text = tail[tail.len().saturating_sub(self.look_back())..].to_vec();
        let before = text.len();
        text.extend_from_slice(tokens);
        (0..self.layers.len())
            .map(|table| {
                let mut rows = Vec::with_capacity(tokens.len() * self.columns());
                for at in before..text.len() {
                    self.hash(table, &text[at.saturating_sub(self.look_back())..=at], &mut rows);
                }
                rows
            })
            .collect()
    }

    /// Values of one row (spec 4.4): codes, then a power-of-two scale for each 32 of them. `Err` says what is damaged.
    pub fn decode(&self, row: &[u8], out: &mut [f32]) -> Result<(), String> {
        let (codes, scales) = row.split_at(self.width);
        for (group, (codes, out)) in codes.chunks_exact(32).zip(out.chunks_exact_mut(32)).enumerate() {
            let scale = scales[group];
            if scale == u8::MAX {
                return Err(format!("the scale of values {}.. is not a number", 32 * group));
            }
            for (i, (code, out)) in codes.iter().zip(out).enumerate() {
                *out = scaled_e4m3(*code, scale);
                if !out.is_finite() {
                    return Err(format!("value {} (code {code:#04x}, scale {scale}) is not finite", 32 * group + i));
                }
            }
        }
        Ok(())
    }

    /// Whether all values of a row are numbers; `Err` says what is damaged.
    fn check(&self, row: &[u8]) -> Result<(), String> {
        let (codes, scales) = row.split_at(self.width);
        // The largest code, 448, times 2^119 is a number in BF16.
        let is_wide = scales.iter().fold(false, |wide, scale| wide | (*scale > SCALE_SAFE));
        let is_nan = codes.iter().fold(false, |nan, code| nan | (*code & 0x7f == 0x7f));
        if is_wide || is_nan { self.decode(row, &mut vec![0.0; self.width]) } else { Ok(()) }
    }
}

impl<B: Backend> Pass<'_, B> {
    /// Spec 4.5 before the attention of `layer`, with the bytes of the table's rows: `[rows, columns, row_bytes]`.
    pub fn engram(&mut self, layer: usize, rows: &[u64], bytes: &[u8]) -> Result<(), ModelError> {
        let (ctx, c) = (self.ctx, self.ctx.config);
        let engram = c.engram.as_ref().expect("a layer with a table has a configuration");
        let width = engram.columns() * engram.width;
        if let Some(probe) = self.probe.as_mut().filter(|p| p.wants(Point::EngramRows)) {
            let ids: Vec<i32> = rows.iter().map(|r| *r as i32).collect();
            probe.ids(Point::EngramRows, layer, ctx.first_pos, engram.columns(), &ids);
        }
        for (row, bytes) in rows.iter().zip(bytes.chunks_exact(engram.row_bytes)) {
            engram.check(bytes).map_err(|what| ModelError::RowData { layer, row: *row, what })?;
        }
        let own = &mut *self.own;
        match bytemuck::try_cast_slice(bytes) {
            Ok(words) => ctx.backend.upload_ids(words, &mut own.engram_words, 0)?,
            // Of another alignment, or no whole words.
            Err(_) => ctx.backend.upload_ids(&bytemuck::pod_collect_to_vec(bytes), &mut own.engram_words, 0)?,
        }
        let (rows, width_of_one) = (ctx.rows * engram.columns(), engram.width);
        let op = ops::DecodeRows { bytes: &own.engram_words, rows, width: width_of_one };
        ctx.backend.decode_rows(op, &mut own.engram_rows)?;
        self.show(Point::EngramEmbedding, layer, width, |_, own| &own.engram_rows)?;
        self.engram_gate(layer)?;
        Ok(self.show(Point::EngramGate, layer, c.streams, |_, own| &own.engram_gates)?)
    }

    /// Keys and value from the rows, then the gated addition to each stream.
    fn engram_gate(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, own) = (self.ctx, &mut *self.own);
        let weights = ctx.layer(layer).engram.as_ref().expect("loaded for layers with a table");
        ctx.matmul(&weights.keys_value, &own.engram_rows, &mut own.engram_kv)?;
        let op = ops::EngramGate {
            keys_value: &own.engram_kv,
            q_norm: &weights.q_norm,
            k_norm: &weights.k_norm,
            rows: ctx.rows,
            stream_count: ctx.config.streams,
            hidden: ctx.config.hidden,
            rms_eps: ctx.config.rms_eps,
            floor: GATE_FLOOR,
        };
        ctx.backend.engram_gate(op, &mut self.work.streams, &mut own.engram_gates)
    }
}
