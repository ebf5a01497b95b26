//! What tells one model file from another: a hash of its header and of what is streamed from it. Owns the recipe.
//! Never reads tensor data. Surprising fact: a copy has the same identity, and so has a file whose weights alone were changed in place.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};

use xxhash_rust::xxh3::Xxh3;

use super::gguf::GgufFile;
use super::layout::LayerExperts;
use crate::storage::reader::FileIdentity;

/// The identity that traces and hotlists carry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModelIdentity(pub [u8; 32]);

impl ModelIdentity {
    /// The identity of `file`: architecture, experts by layer with their bytes, `top_k`, length, and every byte before the tensor data.
    ///
    /// # Errors
    /// When the header cannot be read again, or is another file's by now.
    pub fn of(file: &GgufFile, arch: &str, layers: &[LayerExperts], top_k: u64) -> io::Result<Self> {
        let again = File::open(file.path())?;
        let same = file.identity().compare(&FileIdentity::of(&again)?);
        same.map_err(|change| io::Error::other(format!("{}: {change}", file.path().display())))?;
        // Two 128-bit hashes of other seeds: long enough that no two files of anyone's collection meet.
        let mut halves = [Xxh3::with_seed(0x4453_3449), Xxh3::with_seed(0x4458_5048)];
        let mut add = |bytes: &[u8]| halves.iter_mut().for_each(|half| half.update(bytes));
        add(arch.as_bytes());
        add(&[0]);
        for number in [file.file_len(), file.data_start(), top_k, layers.len() as u64] {
            add(&number.to_le_bytes());
        }
        for l in layers {
            for number in [u64::from(l.layer.0), u64::from(l.experts), l.expert_bytes().0] {
                add(&number.to_le_bytes());
            }
        }
        let mut header = again.take(file.data_start());
        let mut buffer = vec![0; 1 << 18];
        loop {
            match header.read(&mut buffer)? {
                0 => break,
                count => add(&buffer[..count]),
            }
        }
        let mut identity = [0; 32];
        for (half, to) in halves.iter().zip(identity.chunks_exact_mut(16)) {
            to.copy_from_slice(&half.digest128().to_be_bytes());
        }
        Ok(Self(identity))
    }
}

/// Hexadecimal digits, two a byte.
impl fmt::Display for ModelIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
