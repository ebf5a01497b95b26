//! Importance files: how much each input of a matrix matters, as mean squares of activations seen while running.
//! Owns the file format (below); never collects anything itself.
//! Surprising fact: an expert that saw no token has an all-zero vector, which counts as "no importance known".
//!
//! Format: safetensors; one F32 tensor for each GGUF tensor name, shape `[in]`, or `[experts, in]` for routed experts;
//! every value finite and not negative. `__metadata__` has `format` = `ds4-importance-1` and free text of the collector.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::json;

use super::error::ConvertError;
use super::part::TensorPlan;
use super::shard::Shard;
use crate::storage::part_file;

const FORMAT: &str = "ds4-importance-1";

/// Vectors of one tensor, one behind the other.
#[derive(Clone, Debug, PartialEq)]
struct Vectors {
    /// 1, or the number of experts.
    count: usize,
    values: Vec<f32>,
}

impl Vectors {
    fn get(&self, i: usize) -> &[f32] {
        let len = self.values.len() / self.count;
        &self.values[i * len..(i + 1) * len]
    }
}

/// A loaded importance file.
#[derive(Clone, Debug)]
pub struct Importance {
    path: PathBuf,
    tensors: HashMap<String, Vectors>,
}

impl Importance {
    /// Loads and checks a file.
    ///
    /// # Errors
    /// `Importance`, `Header` or `Io`.
    pub fn open(path: &Path) -> Result<Self, ConvertError> {
        let fail = |problem: String| ConvertError::Importance { path: path.to_owned(), problem };
        let shard = Shard::open(path)?;
        match shard.metadata.get("format").map(String::as_str) {
            Some(FORMAT) => {}
            other => return Err(fail(format!("format is {}, expected {FORMAT}", other.unwrap_or("absent")))),
        }
        let mut tensors = HashMap::new();
        for (name, entry) in &shard.tensors {
            let count = match *entry.shape.as_slice() {
                [n] if n > 0 => 1,
                [experts, n] if experts > 0 && n > 0 => experts as usize,
                _ => return Err(fail(format!("{name} has shape {:?}, expected [in] or [experts, in]", entry.shape))),
            };
            if entry.dtype != Dtype::F32 {
                return Err(fail(format!("{name} is {}, expected F32", entry.dtype)));
            }
            let mut raw = vec![0u8; entry.bytes as usize];
            entry.file.read(entry.offset, &mut raw)?;
            let values: Vec<f32> = raw.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            if let Some(i) = values.iter().position(|v| !v.is_finite() || *v < 0.0) {
                return Err(fail(format!("{name}: value {} at {i} is not a mean of squares", values[i])));
            }
            tensors.insert(name.clone(), Vectors { count, values });
        }
        Ok(Self { path: path.to_owned(), tensors })
    }

    /// The file it came from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether there is a vector for this tensor.
    pub(super) fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// The vector for one part of a tensor, if something is known about it.
    pub(super) fn of_part(&self, tensor: &str, part: usize) -> Option<&[f32]> {
        let vector = self.tensors.get(tensor)?.get(part);
        vector.iter().any(|v| *v > 0.0).then_some(vector)
    }

    /// Refuses a file made for another model.
    pub(super) fn check(&self, plans: &[TensorPlan]) -> Result<(), ConvertError> {
        let fail = |problem: String| Err(ConvertError::Importance { path: self.path.clone(), problem });
        let plans: HashMap<&str, &TensorPlan> = plans.iter().map(|p| (p.name.as_str(), p)).collect();
        let mut names: Vec<&String> = self.tensors.keys().collect();
        names.sort();
        for name in names {
            let Some(plan) = plans.get(name.as_str()) else {
                return fail(format!("{name} is no tensor of this model; use the file made for it"));
            };
            let found = &self.tensors[name];
            let (count, columns) = (plan.parts.len(), plan.columns() as usize);
            if (found.count, found.values.len()) != (count, count * columns) {
                let shape = [found.count, found.values.len() / found.count];
                return fail(format!("{name} has shape {shape:?}, the tensor needs [{count}, {columns}]"));
            }
        }
        if self.tensors.is_empty() { fail("it has no tensors".into()) } else { Ok(()) }
    }
}

/// Writes an importance file: for each GGUF tensor name its shape (`[in]` or `[experts, in]`) and values, and notes of
/// the collector (model, text, tokens). The same input gives the same bytes; a failure leaves what was at `path`.
///
/// # Errors
/// `Importance` when shape and values disagree, `Io`.
pub fn write_importance(
    path: &Path,
    tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    notes: &[(&str, String)],
) -> Result<(), ConvertError> {
    let header = header(path, tensors, notes)?;
    let io = |source| ConvertError::Io { path: path.to_owned(), doing: "cannot write", source };
    let mut out = BufWriter::new(part_file::begin(path).map_err(io)?);
    let write = |out: &mut BufWriter<_>| -> std::io::Result<()> {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        let mut values = tensors.values().flat_map(|(_, values)| values);
        values.try_for_each(|v| out.write_all(&v.to_le_bytes()))
    };
    write(&mut out).map_err(io)?;
    let part = out.into_inner().map_err(|e| io(e.into_error()))?;
    part.persist(path).map_err(|e| io(e.error))?;
    Ok(())
}

/// The JSON head, padded to whole words. Written here because the crate's own keeps notes in random order.
fn header(
    path: &Path,
    tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    notes: &[(&str, String)],
) -> Result<Vec<u8>, ConvertError> {
    let mut metadata = serde_json::Map::new();
    metadata.insert("format".into(), FORMAT.into());
    metadata.extend(notes.iter().map(|(key, text)| ((*key).to_owned(), text.clone().into())));
    let mut head = serde_json::Map::new();
    head.insert("__metadata__".into(), metadata.into());
    let mut offset = 0;
    for (name, (shape, values)) in tensors {
        if shape.iter().product::<usize>() != values.len() {
            let problem = format!("{name} has shape {shape:?} but {} values", values.len());
            return Err(ConvertError::Importance { path: path.to_owned(), problem });
        }
        let end = offset + 4 * values.len();
        head.insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}));
        offset = end;
    }
    let mut bytes = serde_json::Value::from(head).to_string().into_bytes();
    bytes.resize(bytes.len().next_multiple_of(8), b' ');
    Ok(bytes)
}
