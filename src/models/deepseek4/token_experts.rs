//! Experts that follow from the token id (spec 3.9): a table row for each token.
//! Never keeps the file's bytes: those of a model on a GPU leave the host. Surprising fact: the experts of a row are distinct in every file
//! that is accepted, since an expert that a token used twice would be computed once.

use crate::models::weights::WeightsError;
use crate::units::TokenId;

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
