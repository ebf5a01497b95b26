//! The file of `--dump-logits`: a safetensors file with `logits` and `tokens`, written as positions are computed.
//! Never holds more than one row, and never leaves a half file under the final name.
//! Surprising fact: the header stands first but is written last, into room that was left for it.

use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use crate::cli::whole_file::WholeFile;
use crate::units::TokenId;

/// Room for the header: two tensors with short names and numbers of at most 20 digits.
const HEADER_BYTES: usize = 512;

/// A growing table of logits.
pub struct LogitsFile {
    out: BufWriter<WholeFile>,
    vocab: usize,
    rows: usize,
}

impl LogitsFile {
    /// Starts a file that will be called `path`.
    ///
    /// # Errors
    /// When its folder cannot be written to.
    pub fn create(path: &Path, vocab: usize) -> io::Result<Self> {
        let mut out = BufWriter::with_capacity(1 << 20, WholeFile::create(path)?);
        out.write_all(&[b' '; 8 + HEADER_BYTES])?;
        Ok(Self { out, vocab, rows: 0 })
    }

    /// Adds the row of the next position.
    ///
    /// # Errors
    /// A full disk.
    pub fn push(&mut self, logits: &[f32]) -> io::Result<()> {
        assert_eq!(logits.len(), self.vocab, "a row of logits");
        self.rows += 1;
        for value in logits {
            self.out.write_all(&value.to_le_bytes())?;
        }
        Ok(())
    }

    /// Rows so far.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Ends the file; `tokens` are those of the rows.
    ///
    /// # Errors
    /// A full disk, or a name that cannot be taken.
    pub fn finish(mut self, tokens: &[TokenId]) -> io::Result<()> {
        assert_eq!(tokens.len(), self.rows, "one row a token");
        for &token in tokens {
            self.out.write_all(&(token as i32).to_le_bytes())?;
        }
        let logits_end = self.rows * self.vocab * 4;
        let header = serde_json::json!({
            "logits": {"dtype": "F32", "shape": [self.rows, self.vocab], "data_offsets": [0, logits_end]},
            "tokens": {"dtype": "I32", "shape": [self.rows], "data_offsets": [logits_end, logits_end + self.rows * 4]},
        });
        // Padding a header with spaces is part of the format.
        let header = format!("{:<HEADER_BYTES$}", header.to_string());
        self.out.seek(SeekFrom::Start(0))?;
        self.out.write_all(&(HEADER_BYTES as u64).to_le_bytes())?;
        self.out.write_all(header.as_bytes())?;
        self.out.into_inner().map_err(io::IntoInnerError::into_error)?.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    #[test]
    fn the_file_reads_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("logits.safetensors");
        let mut file = LogitsFile::create(&path, 3).unwrap();
        file.push(&[1.0, -2.5, 0.0]).unwrap();
        file.push(&[4.0, 5.0, f32::MIN_POSITIVE]).unwrap();
        assert!(!path.exists(), "no half file");
        file.finish(&[7, 9]).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let logits = tensors.tensor("logits").unwrap();
        assert_eq!(logits.shape(), [2, 3]);
        let values: Vec<f32> = logits.data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(values, [1.0, -2.5, 0.0, 4.0, 5.0, f32::MIN_POSITIVE]);
        assert_eq!(tensors.tensor("tokens").unwrap().data(), [7, 0, 0, 0, 9, 0, 0, 0]);
    }

    #[test]
    fn an_abandoned_file_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = LogitsFile::create(&folder.path().join("x"), 1).unwrap();
        file.push(&[1.0]).unwrap();
        drop(file);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
