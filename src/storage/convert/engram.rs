//! Constants of the n-gram tables: read from engram.json, or derived from config and tokenizer (spec 4.1, 4.2).
//! Owns derivation and checks; never touches table rows.
//! Surprising fact: the number of normalised tokens sets the bound of the multipliers, so one wrong key spoils all rows.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tokenizers::normalizers::StripAccents;
use tokenizers::{NormalizedString, Normalizer, Tokenizer};

use super::checkpoint::{Config, read_json};
use super::error::ConvertError;
use super::pcg64::Pcg64;

/// Largest table row count that primes are drawn for: 16,000,000 x 24 is the published one.
const BASE_MAX: u32 = 1 << 30;

/// Everything the row hash needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EngramConstants {
    pub(super) layers: Vec<u32>,
    /// Rows of each table.
    pub(super) rows: Vec<u64>,
    pub(super) heads: u32,
    /// Values in one row.
    pub(super) width: u32,
    /// Longest n-gram; the shortest is 2.
    pub(super) ngram_max: u32,
    /// [vocabulary]
    pub(super) token_map: Vec<u32>,
    /// Entries of the token map lie below.
    pub(super) compressed_vocab: u32,
    /// Compressed id of the pad token.
    pub(super) pad_id: u32,
    /// [layers, n-gram sizes, heads]
    pub(super) primes: Vec<u64>,
    /// [layers, look-backs]
    pub(super) multipliers: Vec<u64>,
}

/// The part of the constants that config.json states.
struct Geometry {
    layers: Vec<u32>,
    heads: u32,
    ngram_max: u32,
    vocab: u32,
    pad_token: u32,
}

impl EngramConstants {
    /// Constants of a checkpoint folder; `None` for a model without tables.
    pub(super) fn of_checkpoint(config: &Config, folder: &Path) -> Result<Option<Self>, ConvertError> {
        let layers = config.engram_layers()?;
        if layers.is_empty() {
            return Ok(None);
        }
        let geometry = Geometry {
            layers,
            heads: config.u32("engram_n_heads")?,
            ngram_max: config.u32("engram_max_ngram_size")?,
            vocab: config.u32("vocab_size")?,
            pad_token: config.u32("engram_pad_token_id")?,
        };
        let path = folder.join("engram.json");
        let from_file = read_json(&path)?;
        let (path, derived) = match from_file {
            Some(json) => {
                (path.clone(), parse(&json.object).map_err(|problem| ConvertError::Engram { path, problem })?)
            }
            None => {
                let path = folder.join("tokenizer.json");
                (path.clone(), derive(config, &geometry, &path)?)
            }
        };
        let constants = Self {
            rows: config.u32_array("engram_num_embeddings")?.into_iter().map(u64::from).collect(),
            heads: geometry.heads,
            width: config.u32("engram_head_dim")?,
            ngram_max: geometry.ngram_max,
            compressed_vocab: config.u32("engram_compressed_vocab_size")?,
            pad_id: derived.pad_id,
            token_map: derived.token_map,
            primes: derived.primes,
            multipliers: derived.multipliers,
            layers: geometry.layers,
        };
        constants.check(geometry.vocab).map_err(|problem| ConvertError::Engram { path, problem })?;
        Ok(Some(constants))
    }

    /// The checks of spec 4.2.
    fn check(&self, vocab: u32) -> Result<(), String> {
        let layers = self.layers.len();
        if self.token_map.len() != vocab as usize {
            return Err(format!("the token map has {} entries for {vocab} tokens", self.token_map.len()));
        }
        let (found, expected) = (self.token_map.iter().max().map_or(0, |m| m + 1), self.compressed_vocab);
        if found != expected {
            return Err(format!(
                "{found} normalised tokens, but config.json says {expected}; is it the right tokenizer?"
            ));
        }
        if self.pad_id >= self.compressed_vocab {
            return Err(format!("pad id {} is no normalised token", self.pad_id));
        }
        if !(2..=16).contains(&self.ngram_max) || self.heads == 0 || self.heads > 4096 {
            return Err(format!("{}-grams with {} heads are not possible", self.ngram_max, self.heads));
        }
        if self.width == 0 || !self.width.is_multiple_of(32) {
            return Err(format!("rows of {} values are no whole groups of 32", self.width));
        }
        let columns = (self.ngram_max as usize - 1) * self.heads as usize;
        if self.primes.len() != layers * columns || self.rows.len() != layers {
            let (primes, rows) = (self.primes.len(), self.rows.len());
            return Err(format!("{primes} primes and {rows} row counts for {layers} layers of {columns} columns"));
        }
        for ((layer, rows), primes) in self.layers.iter().zip(&self.rows).zip(self.primes.chunks_exact(columns)) {
            let sum: u64 = primes.iter().fold(0, |a, p| a.saturating_add(*p));
            if sum != *rows || primes.contains(&0) {
                return Err(format!("the primes of layer {layer} sum to {sum}, the table has {rows} rows"));
            }
        }
        if self.multipliers.len() != layers * self.ngram_max as usize {
            return Err(format!("{} multipliers for {layers} layers of {}", self.multipliers.len(), self.ngram_max));
        }
        let limit = i64::MAX as u64 / u64::from(self.compressed_vocab);
        match self.multipliers.iter().find(|m| *m % 2 == 0 || **m > limit) {
            Some(m) => Err(format!("multiplier {m} is even or above {limit}")),
            None => Ok(()),
        }
    }
}

/// What engram.json holds, or what is derived in its stead.
struct Derived {
    token_map: Vec<u32>,
    pad_id: u32,
    primes: Vec<u64>,
    multipliers: Vec<u64>,
}

fn parse(json: &Map<String, Value>) -> Result<Derived, String> {
    let flat = |key: &str| {
        let mut out = Vec::new();
        let value = json.get(key).ok_or_else(|| format!("{key} is missing"))?;
        flatten(value, &mut out).ok_or_else(|| format!("{key} must hold whole numbers only"))?;
        Ok::<_, String>(out)
    };
    let narrow = |v: u64| u32::try_from(v).map_err(|_| format!("token_map holds {v}"));
    // Two writers, two names.
    let pad = json.get("pad_compressed_id").or_else(|| json.get("pad_id")).and_then(Value::as_u64);
    let pad_id = pad.and_then(|v| u32::try_from(v).ok()).ok_or("pad_compressed_id (or pad_id) is missing")?;
    let token_map = flat("token_map")?.into_iter().map(narrow).collect::<Result<_, _>>()?;
    Ok(Derived { token_map, pad_id, primes: flat("primes")?, multipliers: flat("multipliers")? })
}

/// Appends the numbers of nested arrays.
fn flatten(value: &Value, out: &mut Vec<u64>) -> Option<()> {
    match value {
        Value::Array(items) => items.iter().try_for_each(|v| flatten(v, out)),
        number => {
            out.push(number.as_u64()?);
            Some(())
        }
    }
}

fn derive(config: &Config, geometry: &Geometry, tokenizer: &Path) -> Result<Derived, ConvertError> {
    let fail = |problem: String| ConvertError::Engram { path: PathBuf::from(tokenizer), problem };
    if !tokenizer.exists() {
        return Err(fail(
            "is missing, and there is no engram.json: one of them is needed for the n-gram tables".into(),
        ));
    }
    let base = config.u32("engram_vocab_size")?;
    if base == 0 || base > BASE_MAX || !(2..=16).contains(&geometry.ngram_max) || geometry.heads > 4096 {
        let key = "engram_vocab_size, engram_n_heads or engram_max_ngram_size".into();
        return Err(ConvertError::Config { key, problem: "is out of range".into() });
    }
    let token_map = token_map(tokenizer, geometry.vocab).map_err(fail)?;
    let distinct = token_map.iter().max().map_or(1, |m| u64::from(*m) + 1);
    let pad = token_map.get(geometry.pad_token as usize).copied();
    let pad_id = pad.ok_or_else(|| fail(format!("pad token {} is not in the vocabulary", geometry.pad_token)))?;
    let columns = (geometry.ngram_max as usize - 1) * geometry.heads as usize;
    let primes = primes_from(u64::from(base)).take(columns * geometry.layers.len()).collect();
    let multipliers = multipliers(&geometry.layers, geometry.ngram_max, distinct);
    Ok(Derived { token_map, pad_id, primes, multipliers })
}

/// Odd factors of the hash, `[layers, look-backs]`, for a vocabulary of `distinct` normalised tokens.
pub(in crate::storage) fn multipliers(layers: &[u32], ngram_max: u32, distinct: u64) -> Vec<u64> {
    let bound = (i64::MAX as u64 / distinct) / 2;
    let of_layer = |layer: &u32| {
        let mut rng = Pcg64::seeded(10_007 * u64::from(*layer));
        (0..ngram_max).map(|_| rng.below(bound) * 2 + 1).collect::<Vec<u64>>()
    };
    layers.iter().flat_map(of_layer).collect()
}

/// Primes not below `base`, ascending. The rule restarts at `base` for every n-gram size and skips used primes, which
/// is the same sequence.
pub(in crate::storage) fn primes_from(base: u64) -> impl Iterator<Item = u64> {
    let is_prime = |n: &u64| *n >= 2 && (2..).take_while(|d| d * d <= *n).all(|d| !n.is_multiple_of(d));
    (base..).filter(is_prime)
}

/// Compressed id of every token: equal normalised texts share one, numbered in first-seen order (spec 4.1).
fn token_map(path: &Path, vocab: u32) -> Result<Vec<u32>, String> {
    let tokenizer = Tokenizer::from_file(path).map_err(|e| e.to_string())?;
    let mut seen = HashMap::new();
    let mut map = Vec::with_capacity(vocab as usize);
    for id in 0..vocab {
        let text = tokenizer.decode(&[id], false).map_err(|e| format!("token {id}: {e}"))?;
        let key = if text.contains('\u{fffd}') {
            tokenizer.id_to_token(id).unwrap_or_default()
        } else {
            let normal = normalise(&text)?;
            if normal.is_empty() { text } else { normal }
        };
        let next = seen.len() as u32;
        map.push(*seen.entry(key).or_insert(next));
    }
    Ok(map)
}

fn normalise(text: &str) -> Result<String, String> {
    let mut n = NormalizedString::from(text);
    n.nfkc().nfd();
    StripAccents.normalize(&mut n).map_err(|e| e.to_string())?;
    n.lowercase();
    let mut out = String::with_capacity(n.get().len());
    for c in n.get().chars() {
        if !matches!(c, ' ' | '\t' | '\r' | '\n') {
            out.push(c);
        } else if !out.ends_with(' ') {
            out.push(' ');
        }
    }
    // One space stands for itself; every other text loses its outer space.
    Ok(if out == " " { out } else { out.trim().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn primes_of_the_published_tables() {
        // Spec 4.2.
        let found: Vec<u64> = primes_from(16_000_000).take(24).map(|p| p - 16_000_000).collect();
        let expected = [
            57, 79, 81, 97, 121, 129, 133, 183, 189, 207, 211, 253, 277, 289, 307, 321, 339, 381, 393, 399, 403, 409,
            447, 463,
        ];
        assert_eq!(found, expected);
        assert_eq!(primes_from(16_000_000).take(24).sum::<u64>(), 384_006_168);
    }

    #[test]
    fn normalisation_by_example() {
        let check = |text: &str, expected: &str| assert_eq!(normalise(text).unwrap(), expected, "{text:?}");
        check("Hello", "hello");
        check("  \u{c9}t\u{e9} ", "ete");
        check(" ", " ");
        check("\n\t \r", " ");
        check("a \t\n b", "a b");
        check("\u{ff21}\u{fb01}", "afi");
        check("\u{301}", "");
    }
}
