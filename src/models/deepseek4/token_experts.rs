//! Experts that follow from the token id (spec 3.9): a table row for each token.
//! Never copies the table. Surprising fact: the experts of a row are distinct in every file that is accepted, since an expert that a token
//! used twice would be computed once.

use crate::backend::SharedBytes;
use crate::models::weights::WeightsError;
use crate::units::TokenId;

/// The table of one layer: `[vocab, k]` 32-bit ids.
pub struct TokenExperts {
    bytes: SharedBytes,
    k: usize,
}

impl TokenExperts {
    /// The table `name`, whose shape has been checked; every id must be below `experts`.
    pub fn new(name: &str, bytes: SharedBytes, k: usize, experts: usize) -> Result<Self, WeightsError> {
        let this = Self { bytes, k };
        let mut ids = Vec::with_capacity(k);
        for row in 0..this.bytes.as_slice().len() / (4 * k) {
            ids.clear();
            this.extend(row as TokenId, &mut ids);
            let refuse = |what: String| Err(WeightsError::Table { name: name.into(), row, what });
            if let Some(id) = ids.iter().find(|id| !(0..experts as i32).contains(*id)) {
                return refuse(format!("expert {id} is not below {experts}"));
            }
            if (1..k).any(|at| ids[..at].contains(&ids[at])) {
                return refuse(format!("an expert is named twice in {ids:?}"));
            }
        }
        Ok(this)
    }

    /// Appends the experts of `token`, which is below the vocabulary.
    pub fn extend(&self, token: TokenId, ids: &mut Vec<i32>) {
        let row = &self.bytes.as_slice()[token as usize * self.k * 4..][..self.k * 4];
        ids.extend(row.as_chunks::<4>().0.iter().map(|id| i32::from_le_bytes(*id)));
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
        TokenExperts::new("t", bytes.into(), k, 8)
    }

    #[test]
    fn rows_by_token() {
        let found = table(&[0, 7, 3, 4, 6, 5], 2).unwrap();
        assert_eq!(found.of(&[2, 0]), [6, 5, 0, 7]);
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
