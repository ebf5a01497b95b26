//! What the rows of a sweep have to wait with besides their streams (spec 3.13, 7.4): collapse weights and selections.
//! Owns the buffers of all rows; never computes. Surprising fact: selections travel with the rows, since layers may use the one of an earlier
//! layer.

use super::config::Config;
use super::pass::Pass;
use super::workspace::mask_words;
use crate::backend::{Backend, BackendError};
use crate::models::RunnerOptions;
use crate::models::blocks::architecture::Wait;
use crate::models::blocks::buffers;
use crate::models::blocks::sweep::Rows;

/// Sizes that the buffers follow.
pub struct CarrySizes<'a> {
    c: &'a Config,
    rows: usize,
    words: usize,
}

impl<'a> CarrySizes<'a> {
    /// For the widest sweep of `options`.
    pub fn new(c: &'a Config, options: &RunnerOptions) -> Self {
        Self { c, rows: options.sweep_rows(), words: mask_words(c, options) }
    }
}

buffers! {
    /// Rows of a sweep.
    Carry, s: CarrySizes<'_>;
    bufs {
        /// `[rows, streams]`: collapse weights for the next sublayer.
        carried: s.rows * s.c.streams,
        /// `[rows, streams]`: collapse weights made by the expert sublayer under way.
        pre: s.rows * s.c.streams,
    }
    ids {
        /// `[rows, index_top_k]`: latest selection.
        selected: s.rows * s.c.index_top_k,
        /// `[rows, words]`: candidate blocks.
        candidates: s.rows * s.words,
    }
    parts {}
    fields {}
}

impl<B: Backend> Pass<'_, B> {
    /// Takes from the pass what its rows need after `wait`.
    pub fn leave(&mut self, rows: &Rows<'_, B>, wait: Wait) -> Result<(), BackendError> {
        let (c, w, own) = (self.ctx.config, &*self.work, &mut *self.own);
        match wait {
            Wait::Streams => rows.save(&own.carried, &mut own.carry.carried, c.streams),
            Wait::Mix => rows.save(&w.pre, &mut own.carry.pre, c.streams),
            Wait::Attention(layer) if c.layers[layer].selects_by.is_some() => {
                rows.save_ids(&w.selected, &mut own.carry.selected, c.index_top_k)?;
                rows.save_ids(&own.candidates, &mut own.carry.candidates, own.words)
            }
            Wait::Attention(_) => Ok(()),
        }
    }

    /// Gives the pass what its rows left before `wait`.
    pub fn resume(&mut self, rows: &Rows<'_, B>, wait: Wait) -> Result<(), BackendError> {
        let (c, w, own) = (self.ctx.config, &mut *self.work, &mut *self.own);
        match wait {
            Wait::Streams => rows.load(&own.carry.carried, &mut own.carried, c.streams),
            Wait::Mix => rows.load(&own.carry.pre, &mut w.pre, c.streams),
            Wait::Attention(layer) => {
                let plan = c.layers[layer];
                if plan.owner.is_none() || (plan.selects_by.is_some() && !plan.masked) {
                    return Ok(());
                }
                rows.load_ids(&own.carry.selected, &mut w.selected, c.index_top_k)?;
                rows.load_ids(&own.carry.candidates, &mut own.candidates, own.words)
            }
        }
    }
}
