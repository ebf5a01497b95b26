//! Experts that follow from the token id (spec 3.9): a table row for each token, and the reads that can begin with it (2.6).
//! Never keeps the file's bytes: those of a model on a GPU leave the host. Surprising fact: the experts of a row are distinct in every file
//! that is accepted, since an expert that a token used twice would be computed once.

use std::sync::Arc;

use super::architecture::V4;
use super::config::Config;
use crate::backend::Backend;
use crate::models::blocks::architecture::{Feed, Here};
use crate::models::blocks::suffix::Suffix;
use crate::models::supply::RowSupply;
use crate::models::weights::WeightsError;
use crate::models::{ModelError, RunnerOptions};
use crate::units::{ExpertKey, TokenId};

/// The table of one layer.
pub struct TokenExperts {
    /// `[vocab, k]`.
    ids: Box<[u16]>,
    k: usize,
}

impl TokenExperts {
    /// The table `name` from the 32-bit ids of a file, whose shape has been checked; every id must be below `experts`.
    pub fn new(name: &str, bytes: &[u8], k: usize, experts: usize) -> Result<Self, WeightsError> {
        let mut all = Vec::with_capacity(bytes.len() / 4);
        for (row, bytes) in bytes.chunks_exact(4 * k).enumerate() {
            let ids: Vec<i32> = bytes.as_chunks::<4>().0.iter().map(|id| i32::from_le_bytes(*id)).collect();
            let refuse = |what: String| Err(WeightsError::Table { name: name.into(), row, what });
            if let Some(id) = ids.iter().find(|id| !(0..experts as i32).contains(*id)) {
                return refuse(format!("expert {id} is not below {experts}"));
            }
            if (1..k).any(|at| ids[..at].contains(&ids[at])) {
                return refuse(format!("an expert is named twice in {ids:?}"));
            }
            // Ids below the number of experts are 16 bits wide everywhere.
            all.extend(ids.iter().map(|id| *id as u16));
        }
        Ok(Self { ids: all.into(), k })
    }

    /// Bytes of a table for `vocab` tokens.
    pub fn bytes_for(vocab: usize, k: usize) -> u64 {
        (vocab * k * size_of::<u16>()) as u64
    }

    /// Appends the experts of `token`, which is below the vocabulary.
    pub fn extend(&self, token: TokenId, ids: &mut Vec<i32>) {
        ids.extend(self.ids[token as usize * self.k..][..self.k].iter().map(|id| i32::from(*id)));
    }

    /// The experts of each of `tokens`, one row after the other.
    pub fn of(&self, tokens: &[TokenId]) -> Vec<i32> {
        let mut ids = Vec::with_capacity(tokens.len() * self.k);
        tokens.iter().for_each(|token| self.extend(*token, &mut ids));
        ids
    }
}

/// Reads of experts that are known with the token (spec 2.6): the supply is told of them, once, ahead of the pass.
pub struct KnownExperts {
    /// Experts of the announced token.
    known: Vec<ExpertKey>,
    /// Position and id of the token whose experts the supply was told.
    announced: Option<(usize, TokenId)>,
    bytes: u64,
}

impl KnownExperts {
    /// Bytes of the tables: they belong to all sequences of a model, of which there is one in most runs.
    pub fn bytes_for(c: &Config) -> u64 {
        let tables = c.layers.iter().filter(|layer| layer.is_hashed).count() as u64;
        tables * TokenExperts::bytes_for(c.vocab, c.experts_per_token)
    }

    /// Tells the supply which experts `token` will use in layers with a table.
    fn announce<B: Backend>(&mut self, here: Here<'_, B, V4>, token: TokenId) {
        let next = Some((here.state.len, token));
        if self.announced == next {
            return;
        }
        self.announced = next;
        self.known.clear();
        for (layer, weights) in here.model.weights.layers.iter().enumerate() {
            if let Some(table) = &weights.token_experts {
                let key = |id: i32| ExpertKey::new(layer as u16, id as u16);
                self.known.extend(table.of(&[token]).into_iter().map(key));
            }
        }
        if !self.known.is_empty() {
            here.experts.announce(&self.known);
        }
    }
}

impl<B: Backend> Feed<B, V4> for KnownExperts {
    fn new(c: &Config, _options: &RunnerOptions, _rows: Option<Arc<dyn RowSupply>>) -> Result<Self, ModelError> {
        let known = Vec::with_capacity(c.layers.len() * c.experts_per_token);
        Ok(Self { known, announced: None, bytes: Self::bytes_for(c) })
    }

    /// Experts of more than one token may not fit the cache beside each other, and a sweep asks for each layer's in time.
    fn prefetch(&mut self, here: Here<'_, B, V4>, tokens: &[TokenId]) -> Result<(), ModelError> {
        if let &[token] = tokens {
            self.announce(here, token);
        }
        Ok(())
    }

    fn forget(&mut self) {
        self.announced = None;
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn begin(&mut self, here: Here<'_, B, V4>, tokens: &[TokenId], _suffix: &Suffix) -> Result<(), ModelError> {
        self.prefetch(here, tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(ids: &[i32], k: usize) -> Result<TokenExperts, WeightsError> {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        TokenExperts::new("t", &bytes, k, 8)
    }

    #[test]
    fn rows_by_token() {
        let found = table(&[0, 7, 3, 4, 6, 5], 2).unwrap();
        assert_eq!(found.of(&[2, 0]), [6, 5, 0, 7]);
        assert_eq!(size_of_val(&*found.ids) as u64, TokenExperts::bytes_for(3, 2));
    }

    #[test]
    fn damaged_tables_are_refused() {
        for (ids, what) in [
            ([0, 1, 8, 2], "row 1: expert 8 is not"),
            ([0, 1, -1, 2], "expert -1"),
            ([5, 5, 0, 1], "row 0: an expert is named twice"),
        ] {
            let error = table(&ids, 2).err().unwrap().to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
