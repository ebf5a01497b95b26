//! N-gram rows, read ahead of the layers that add them (spec 4.6): those that a caller announces, and those of a sweep.
//! Never reads a row that no layer needs. Surprising fact: a sweep of one chunk asks for all tables at once, in one deep batch; a wider one
//! asks piece by piece, one piece ahead, so that its memory does not grow with its rows.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::architecture::V41;
use super::config::{Config, EngramConfig};
use super::pass::Pass;
use crate::backend::Backend;
use crate::models::blocks::architecture::{Feed, Here};
use crate::models::blocks::suffix::{Piece, Suffix};
use crate::models::supply::{RowSupply, RowTicket};
use crate::models::{ModelConfig, ModelError, RunnerOptions};
use crate::units::TokenId;

/// The tables of a model, and who reads them.
#[derive(Clone, Copy)]
struct Tables<'a> {
    engram: &'a EngramConfig,
    supply: &'a dyn RowSupply,
}

impl Tables<'_> {
    /// Starts the reads for `tokens`, which follow `tail` at `first_pos`.
    fn submit(self, (first_pos, tail): (usize, &[TokenId]), tokens: &[TokenId]) -> Result<Option<Pending>, ModelError> {
        if tokens.is_empty() {
            return Ok(None);
        }
        let numbers = self.engram.rows(tail, tokens);
        let ticket = self.supply.submit(&numbers)?;
        Ok(Some(Pending { first_pos, tokens: tokens.to_vec(), numbers, ticket }))
    }
}

/// Rows that are asked for together.
struct Batch {
    tables: Range<usize>,
    rows: Range<usize>,
}

/// A batch on its way.
struct UnderWay {
    batch: Batch,
    /// `[table][rows * columns]`, empty for tables that the batch leaves out.
    numbers: Vec<Vec<u64>>,
    ticket: Box<dyn RowTicket>,
    /// Table whose bytes are in the host buffer.
    loaded: Option<usize>,
}

/// The rows of one sweep.
struct SweepFeed {
    /// Tokens before the sweep that its first rows look back on, then its own.
    text: Vec<TokenId>,
    before: usize,
    planned: VecDeque<Batch>,
    under_way: VecDeque<UnderWay>,
}

impl SweepFeed {
    /// The rows that `suffix` leaves for `tokens` behind `tail`; `pending` are rows under way for exactly these tokens.
    fn start(
        tables: Tables<'_>,
        (tail, tokens): (&[TokenId], &[TokenId]),
        (suffix, chunk): (&Suffix, usize),
        pending: Option<Pending>,
    ) -> Result<Self, ModelError> {
        let text = [tail, tokens].concat();
        let mut planned = VecDeque::new();
        if tokens.len() <= chunk {
            planned.push_back(Batch { tables: 0..tables.engram.layers.len(), rows: 0..tokens.len() });
        } else {
            for (table, layer) in tables.engram.layers.iter().enumerate() {
                let pieces = suffix.pieces(*layer, chunk);
                planned.extend(pieces.map(|p| Batch { tables: table..table + 1, rows: p.first..p.end }));
            }
        }
        let mut feed = Self { text, before: tail.len(), planned, under_way: VecDeque::new() };
        match pending {
            Some(Pending { numbers, ticket, .. }) if tokens.len() <= chunk => {
                let batch = feed.planned.pop_front().expect("one batch was just planned");
                feed.under_way.push_back(UnderWay { batch, numbers, ticket, loaded: None });
            }
            _ => feed.submit_next(tables)?,
        }
        Ok(feed)
    }

    fn submit_next(&mut self, tables: Tables<'_>) -> Result<(), ModelError> {
        let Some(batch) = self.planned.pop_front() else { return Ok(()) };
        let (first, end) = (self.before + batch.rows.start, self.before + batch.rows.end);
        let mut numbers = tables.engram.rows(&self.text[..first], &self.text[first..end]);
        for (table, numbers) in numbers.iter_mut().enumerate().filter(|(t, _)| !batch.tables.contains(t)) {
            debug_assert!(table < tables.engram.layers.len());
            *numbers = Vec::new();
        }
        let ticket = tables.supply.submit(&numbers)?;
        self.under_way.push_back(UnderWay { batch, numbers, ticket, loaded: None });
        Ok(())
    }

    /// Asks for one batch more, unless `ahead` of them are under way.
    fn ask_more(&mut self, tables: Tables<'_>, ahead: usize) -> Result<(), ModelError> {
        if self.under_way.len() < ahead { self.submit_next(tables) } else { Ok(()) }
    }

    /// Waits for the rows of `piece` of `table`; pieces come in the order of the plan. Returns their numbers and their place in `bytes`.
    fn wait(
        &mut self,
        tables: Tables<'_>,
        table: usize,
        piece: Piece,
        (ahead, bytes): (usize, &mut Vec<u8>),
    ) -> Result<(&[u64], Range<usize>), ModelError> {
        let is_past = |u: &UnderWay| u.batch.rows.end <= piece.first || u.batch.tables.end <= table;
        while self.under_way.front().is_some_and(is_past) {
            self.under_way.pop_front();
        }
        if self.under_way.is_empty() {
            self.submit_next(tables)?;
        }
        let row_bytes = tables.engram.row_bytes;
        let front = self.under_way.front_mut().expect("every piece of every table was planned");
        if front.loaded != Some(table) {
            bytes.resize(front.numbers[table].len() * row_bytes, 0);
            front.ticket.wait(table, bytes)?;
            front.loaded = Some(table);
            while self.under_way.len() <= ahead && !self.planned.is_empty() {
                self.submit_next(tables)?;
            }
        }
        let columns = tables.engram.columns();
        let front = self.under_way.front().expect("it was just waited for");
        let (from, to) = (piece.first - front.batch.rows.start, piece.end - front.batch.rows.start);
        let numbers = &front.numbers[table][from * columns..to * columns];
        Ok((numbers, from * columns * row_bytes..to * columns * row_bytes))
    }

    /// Whether everything has been waited for.
    fn is_done(&self, engram: &EngramConfig) -> bool {
        let last = engram.layers.len() - 1;
        self.planned.is_empty() && self.under_way.iter().all(|u| u.loaded == Some(last))
    }

    /// Once all rows of this sweep, which began at `first_pos`, are there: asks for those of the next one, if it is one chunk wide.
    fn ask_ahead(
        &self,
        tables: Tables<'_>,
        first_pos: usize,
        ahead: &[TokenId],
        chunk: usize,
    ) -> Result<Option<Pending>, ModelError> {
        if ahead.len() > chunk || !self.is_done(tables.engram) {
            return Ok(None);
        }
        tables.submit((first_pos + self.text.len() - self.before, &self.text), ahead)
    }
}

/// Rows that are being read for the tokens at `first_pos`, all tables of them.
struct Pending {
    first_pos: usize,
    tokens: Vec<TokenId>,
    /// `[table][tokens * columns]`.
    numbers: Vec<Vec<u64>>,
    ticket: Box<dyn RowTicket>,
}

/// The n-gram rows of a sequence.
pub struct RowFeed {
    supply: Option<Arc<dyn RowSupply>>,
    pending: Option<Pending>,
    /// Of the sweep under way.
    sweep: Option<SweepFeed>,
    /// `[rows, columns, row_bytes]` of one table.
    row_bytes: Vec<u8>,
    bytes: u64,
}

impl RowFeed {
    /// Host memory, with the row numbers of what is read ahead, of which there is a chunk of all tables at a time.
    pub fn bytes_for(c: &Config, options: &RunnerOptions) -> u64 {
        let numbers = options.chunk * c.rows_per_token() * size_of::<u64>();
        (Self::row_bytes_max(c, options) + numbers) as u64
    }

    fn row_bytes_max(c: &Config, options: &RunnerOptions) -> usize {
        options.chunk * c.engram.as_ref().map_or(0, |e| e.columns() * e.row_bytes)
    }

    fn tables<'a>(&'a self, c: &'a Config) -> Option<Tables<'a>> {
        Some(Tables { engram: c.engram.as_ref()?, supply: self.supply.as_deref()? })
    }
}

impl<B: Backend> Feed<B, V41> for RowFeed {
    fn new(c: &Config, options: &RunnerOptions, rows: Option<Arc<dyn RowSupply>>) -> Result<Self, ModelError> {
        if let Some(engram) = &c.engram {
            let found = rows.as_ref().ok_or(ModelError::NoRows)?.row_bytes();
            if found != engram.row_bytes {
                return Err(ModelError::RowBytes { found, expected: engram.row_bytes });
            }
        }
        Ok(Self {
            supply: rows,
            pending: None,
            sweep: None,
            row_bytes: Vec::with_capacity(Self::row_bytes_max(c, options)),
            bytes: Self::bytes_for(c, options),
        })
    }

    fn prefetch(&mut self, here: Here<'_, B, V41>, tokens: &[TokenId]) -> Result<(), ModelError> {
        let tokens = &tokens[..tokens.len().min(here.options.chunk)];
        self.pending = match self.tables(&here.model.config) {
            Some(tables) => tables.submit((here.state.len, &here.state.tail), tokens)?,
            None => None,
        };
        Ok(())
    }

    fn forget(&mut self) {
        self.pending = None;
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn begin(&mut self, here: Here<'_, B, V41>, tokens: &[TokenId], suffix: &Suffix) -> Result<(), ModelError> {
        let state = here.state;
        let pending = self.pending.take().filter(|p| p.first_pos == state.len && p.tokens == tokens);
        self.sweep = match self.tables(&here.model.config) {
            Some(tables) => {
                Some(SweepFeed::start(tables, (&state.tail, tokens), (suffix, here.options.chunk), pending)?)
            }
            None => None,
        };
        Ok(())
    }

    fn add(&mut self, pass: &mut Pass<'_, B>, layer: usize, piece: Piece) -> Result<(), ModelError> {
        let c = pass.ctx.config;
        let (Some(engram), Some(supply)) = (&c.engram, self.supply.as_deref()) else { return Ok(()) };
        let tables = Tables { engram, supply };
        let sweep = self.sweep.as_mut().expect("begun with the sweep");
        // A device may be given the next pieces at once. Memory for two batches of all tables is planned then.
        let ahead = if B::IS_QUEUED { 2 * engram.layers.len() - 1 } else { 1 };
        // What a batch costs the host is hidden while the device has a layer to work on.
        let Some(table) = c.layers[layer].table else { return sweep.ask_more(tables, ahead) };
        let (rows, range) = sweep.wait(tables, table, piece, (ahead, &mut self.row_bytes))?;
        pass.engram(layer, rows, &self.row_bytes[range])
    }

    fn abandon(&mut self) {
        self.sweep = None;
    }

    fn end(&mut self, here: Here<'_, B, V41>, after: &[TokenId]) -> Result<(), ModelError> {
        let (sweep, options) = (self.sweep.take(), here.options);
        if let (Some(sweep), Some(tables)) = (sweep, self.tables(&here.model.config)) {
            let ahead = &after[..after.len().min(options.sweep_rows())];
            self.pending = sweep.ask_ahead(tables, here.state.len, ahead, options.chunk)?;
        }
        Ok(())
    }
}
