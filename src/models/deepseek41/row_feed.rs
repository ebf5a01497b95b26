//! N-gram rows of one sweep, read ahead of the layers that add them (spec 4.6).
//! Never reads a row that no layer needs. Surprising fact: a sweep of one chunk asks for all tables at once, in one deep batch; a wider one
//! asks piece by piece, one piece ahead, so that its memory does not grow with its rows.

use std::collections::VecDeque;
use std::ops::Range;

use super::config::EngramConfig;
use super::runner::{PendingRows, submit_rows};
use crate::models::ModelError;
use crate::models::blocks::suffix::{Piece, Suffix};
use crate::models::supply::{RowSupply, RowTicket};
use crate::units::TokenId;

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
pub struct RowFeed<'a> {
    engram: &'a EngramConfig,
    supply: &'a dyn RowSupply,
    /// Tokens before the sweep that its first rows look back on, then its own.
    text: Vec<TokenId>,
    before: usize,
    planned: VecDeque<Batch>,
    under_way: VecDeque<UnderWay>,
}

impl<'a> RowFeed<'a> {
    /// The rows that `suffix` leaves for `tokens` behind `tail`; `pending` are rows under way for exactly these tokens.
    pub fn start(
        (engram, supply): (&'a EngramConfig, &'a dyn RowSupply),
        (tail, tokens): (&[TokenId], &[TokenId]),
        (suffix, chunk): (&Suffix, usize),
        pending: Option<PendingRows>,
    ) -> Result<Self, ModelError> {
        let text = [tail, tokens].concat();
        let mut planned = VecDeque::new();
        if tokens.len() <= chunk {
            planned.push_back(Batch { tables: 0..engram.layers.len(), rows: 0..tokens.len() });
        } else {
            for (table, layer) in engram.layers.iter().enumerate() {
                let pieces = suffix.pieces(*layer, chunk);
                planned.extend(pieces.map(|p| Batch { tables: table..table + 1, rows: p.first..p.end }));
            }
        }
        let mut feed = Self { engram, supply, text, before: tail.len(), planned, under_way: VecDeque::new() };
        match pending {
            Some(PendingRows { rows: numbers, ticket, .. }) if tokens.len() <= chunk => {
                let batch = feed.planned.pop_front().expect("one batch was just planned");
                feed.under_way.push_back(UnderWay { batch, numbers, ticket, loaded: None });
            }
            _ => feed.submit_next()?,
        }
        Ok(feed)
    }

    fn submit_next(&mut self) -> Result<(), ModelError> {
        let Some(batch) = self.planned.pop_front() else { return Ok(()) };
        let (first, end) = (self.before + batch.rows.start, self.before + batch.rows.end);
        let mut numbers = self.engram.rows(&self.text[..first], &self.text[first..end]);
        for (table, numbers) in numbers.iter_mut().enumerate().filter(|(t, _)| !batch.tables.contains(t)) {
            debug_assert!(table < self.engram.layers.len());
            *numbers = Vec::new();
        }
        let ticket = self.supply.submit(&numbers)?;
        self.under_way.push_back(UnderWay { batch, numbers, ticket, loaded: None });
        Ok(())
    }

    /// Waits for the rows of `piece` of `table`; pieces come in the order of the plan. Returns their numbers and their place in `bytes`.
    pub fn wait(
        &mut self,
        table: usize,
        piece: Piece,
        bytes: &mut Vec<u8>,
    ) -> Result<(&[u64], Range<usize>), ModelError> {
        let is_past = |u: &UnderWay| u.batch.rows.end <= piece.first || u.batch.tables.end <= table;
        while self.under_way.front().is_some_and(is_past) {
            self.under_way.pop_front();
        }
        if self.under_way.is_empty() {
            self.submit_next()?;
        }
        let row_bytes = self.engram.row_bytes;
        let front = self.under_way.front_mut().expect("every piece of every table was planned");
        if front.loaded != Some(table) {
            bytes.resize(front.numbers[table].len() * row_bytes, 0);
            front.ticket.wait(table, bytes)?;
            front.loaded = Some(table);
            if self.under_way.len() == 1 {
                self.submit_next()?;
            }
        }
        let columns = self.engram.columns();
        let front = self.under_way.front().expect("it was just waited for");
        let (from, to) = (piece.first - front.batch.rows.start, piece.end - front.batch.rows.start);
        let numbers = &front.numbers[table][from * columns..to * columns];
        Ok((numbers, from * columns * row_bytes..to * columns * row_bytes))
    }

    /// Whether everything has been waited for.
    fn is_done(&self) -> bool {
        let last = self.engram.layers.len() - 1;
        self.planned.is_empty() && self.under_way.iter().all(|u| u.loaded == Some(last))
    }

    /// Once all rows of this sweep are there: asks for those of the next one, if it is one chunk wide.
    pub fn ask_ahead(
        &self,
        first_pos: usize,
        ahead: &[TokenId],
        chunk: usize,
    ) -> Result<Option<PendingRows>, ModelError> {
        if ahead.len() > chunk || !self.is_done() {
            return Ok(None);
        }
        submit_rows(Some(self.engram), Some(self.supply), (first_pos, &self.text), ahead)
    }
}
