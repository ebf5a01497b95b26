//! A checkpoint folder: config.json, one or many safetensors files, and the plan of GGUF tensors they make.
//! Owns the pairing of checkpoint tensors with GGUF names; never decodes a value.
//! Surprising fact: a tensor left unpaired inside the model is an error, outside of it (draft stages, vision) a count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::{Map, Value};

use super::error::ConvertError;
use super::names::{Arch, Name, Schedule, TensorClass, Where};
use super::part::{Part, Slice, TensorPlan};
use super::shard::{Entry, Shard};
use crate::quant::QuantType;

/// Largest JSON file read: a tokenizer of 129k tokens takes 8 MB.
const JSON_BYTES_MAX: u64 = 256 << 20;

/// A JSON file whose content is an object.
pub(super) struct JsonFile {
    pub(super) text: String,
    pub(super) object: Map<String, Value>,
}

/// Reads a JSON object, or `None` when the file is absent.
pub(super) fn read_json(path: &Path) -> Result<Option<JsonFile>, ConvertError> {
    let io = |source| ConvertError::Io { path: path.to_owned(), doing: "cannot read", source };
    let json = |problem: String| ConvertError::Json { path: path.to_owned(), problem };
    let too_long = || format!("is larger than any such file; the limit is {JSON_BYTES_MAX} bytes");
    match path.metadata() {
        // Opening a pipe would wait for a writer, and a device has no end.
        Ok(found) if !found.is_file() => return Err(json("is no regular file".into())),
        Ok(found) if found.len() > JSON_BYTES_MAX => return Err(json(too_long())),
        Ok(_) => {}
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io(e)),
    }
    // What comes is counted, whatever length is stated: a file can grow, and some file systems state none.
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(JSON_BYTES_MAX + 1).read_to_string(&mut text));
    read.map_err(io)?;
    if text.len() as u64 > JSON_BYTES_MAX {
        return Err(json(too_long()));
    }
    let object = serde_json::from_str(&text).map_err(|e| json(e.to_string()))?;
    Ok(Some(JsonFile { text, object }))
}

/// Typed access to config.json; the text model's part of it where there is one.
#[derive(Debug)]
pub(super) struct Config {
    /// The file as it is.
    pub(super) text: String,
    root: Map<String, Value>,
    arch: Arch,
}

impl Config {
    pub(super) fn error(key: &str, problem: impl Into<String>) -> ConvertError {
        ConvertError::Config { key: key.into(), problem: problem.into() }
    }

    /// The architecture that the folder is of.
    pub(super) fn arch(&self) -> Arch {
        self.arch
    }

    /// A value of `text_config`, else of the whole; null counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        let part = self.root.get("text_config").and_then(Value::as_object);
        let found = part.and_then(|p| p.get(key)).or_else(|| self.root.get(key));
        found.filter(|v| !v.is_null())
    }

    fn require(&self, key: &str) -> Result<&Value, ConvertError> {
        self.get(key).ok_or_else(|| Self::error(key, "is missing"))
    }

    /// A whole number; `10000.0` counts as one.
    pub(super) fn u32(&self, key: &str) -> Result<u32, ConvertError> {
        let value = self.require(key)?;
        let whole =
            value.as_u64().or_else(|| value.as_f64().filter(|f| f.fract() == 0.0 && *f >= 0.0).map(|f| f as u64));
        let fitting = whole.and_then(|v| u32::try_from(v).ok());
        fitting.ok_or_else(|| Self::error(key, format!("is {value}, expected a whole number below 2^32")))
    }

    pub(super) fn f32(&self, key: &str) -> Result<f32, ConvertError> {
        let value = self.require(key)?;
        let found = value.as_f64().map(|v| v as f32).filter(|v| v.is_finite());
        found.ok_or_else(|| Self::error(key, format!("is {value}, expected a number")))
    }

    pub(super) fn str(&self, key: &str) -> Result<&str, ConvertError> {
        let value = self.require(key)?;
        value.as_str().ok_or_else(|| Self::error(key, format!("is {value}, expected a string")))
    }

    pub(super) fn bool(&self, key: &str) -> Result<bool, ConvertError> {
        let value = self.require(key)?;
        value.as_bool().ok_or_else(|| Self::error(key, format!("is {value}, expected true or false")))
    }

    /// An array of whole numbers; an absent key is an error.
    pub(super) fn u32_array(&self, key: &str) -> Result<Vec<u32>, ConvertError> {
        let value = self.require(key)?;
        let number = |v: &Value| v.as_u64().and_then(|v| u32::try_from(v).ok());
        let found = value.as_array().and_then(|a| a.iter().map(number).collect());
        found.ok_or_else(|| Self::error(key, "must be an array of whole numbers below 2^32"))
    }

    /// A number inside an object.
    pub(super) fn nested_f32(&self, object: &str, key: &str) -> Result<f32, ConvertError> {
        let name = format!("{object}.{key}");
        let value = self.require(object)?.get(key).ok_or_else(|| Self::error(&name, "is missing"))?;
        value.as_f64().map(|v| v as f32).ok_or_else(|| Self::error(&name, format!("is {value}, expected a number")))
    }

    /// Refuses anything but `expected` where the file format has no place for another value.
    pub(super) fn must_be(&self, key: &str, expected: &Value) -> Result<(), ConvertError> {
        let equal = |v: &Value| v == expected || (v.is_number() && v.as_f64() == expected.as_f64());
        match self.get(key) {
            Some(v) if !equal(v) => {
                Err(Self::error(key, format!("is {v}; only {expected} can be stored in a {} file", self.arch.name())))
            }
            _ => Ok(()),
        }
    }

    /// Compress ratios as they are: those of draft stages follow the model's own layers.
    pub(super) fn all_ratios(&self) -> Result<Vec<u32>, ConvertError> {
        let layers = self.u32("num_hidden_layers")? as usize;
        let ratios = self.u32_array("compress_ratios")?;
        if ratios.len() < layers {
            let problem = format!("has {} entries for {layers} layers", ratios.len());
            return Err(Self::error("compress_ratios", problem));
        }
        Ok(ratios)
    }

    /// Compress ratios of the model's own layers.
    pub(super) fn compress_ratios(&self) -> Result<Vec<u32>, ConvertError> {
        let mut ratios = self.all_ratios()?;
        ratios.truncate(self.u32("num_hidden_layers")? as usize);
        Ok(ratios)
    }

    /// Layers with n-gram tables; none when the key is absent.
    pub(super) fn engram_layers(&self) -> Result<Vec<u32>, ConvertError> {
        if self.get("engram_layer_ids").is_none() { Ok(Vec::new()) } else { self.u32_array("engram_layer_ids") }
    }

    /// Which layers have which parts (spec 1.2).
    fn schedule(&self) -> Result<Schedule, ConvertError> {
        let ratios = self.compress_ratios()?;
        Ok(match self.arch {
            Arch::DeepSeek41 => Schedule {
                ratios,
                kv_sources: self.u32_array("kv_source_layer_ids")?,
                index_sources: self.u32_array("index_source_layer_ids")?,
                engram: self.engram_layers()?,
                hashed: 0,
            },
            Arch::DeepSeek4 => Schedule::of_ratios(ratios, self.u32("num_hash_layers")?),
        })
    }

    /// Rows and columns of an FP8 scale tile.
    fn tile(&self) -> Result<[u64; 2], ConvertError> {
        const KEY: &str = "quantization_config.weight_block_size";
        let value = self.root.get("quantization_config").and_then(|q| q.get("weight_block_size"));
        let sides: Option<Vec<u64>> =
            value.and_then(Value::as_array).and_then(|a| a.iter().map(Value::as_u64).collect());
        match sides.as_deref() {
            Some(&[rows, columns]) if rows > 0 && columns > 0 => Ok([rows, columns]),
            _ => Err(Self::error(KEY, "must be two positive numbers, since the checkpoint has FP8 tensors")),
        }
    }
}

/// GGUF tensors in file order, and how many checkpoint tensors lie outside the text model.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) tensors: Vec<TensorPlan>,
    pub(super) left_out: usize,
}

/// An opened checkpoint folder.
#[derive(Debug)]
pub(super) struct Checkpoint {
    pub(super) folder: PathBuf,
    pub(super) arch: Arch,
    pub(super) config: Config,
    tensors: BTreeMap<String, Entry>,
}

impl Checkpoint {
    pub(super) fn open(folder: &Path) -> Result<Self, ConvertError> {
        let path = folder.join("config.json");
        let Some(JsonFile { text, object: root }) = read_json(&path)? else {
            return Err(ConvertError::Json { path, problem: "is missing".into() });
        };
        let model_type = root.get("model_type").and_then(Value::as_str).unwrap_or("absent");
        // "deepseek_v41" begins with "deepseek_v4", and a later one may, too.
        let is_of = |arch: &Arch| {
            let rest = model_type.strip_prefix(arch.model_type());
            rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
        };
        let Some(arch) = Arch::ALL.into_iter().find(is_of) else {
            let known = Arch::ALL.map(Arch::model_type).join(" and ");
            return Err(Config::error("model_type", format!("is {model_type}; {known} can be converted")));
        };
        let config = Config { text, root, arch };
        Ok(Self { folder: folder.to_owned(), arch, config, tensors: open_shards(folder)? })
    }

    /// Pairs every GGUF tensor with its source.
    pub(super) fn plan(&self) -> Result<Plan, ConvertError> {
        let mut used = BTreeSet::new();
        let mut tensors = Vec::new();
        for name in self.arch.global() {
            tensors.push(self.tensor(name, name.gguf.into(), name.checkpoint, &mut used)?);
        }
        let layers = self.config.u32("num_hidden_layers")?;
        let schedule = self.config.schedule()?;
        let mut tables = Vec::new();
        for layer in 0..layers {
            for name in self.arch.layer() {
                let source = format!("layers.{layer}.{}", name.checkpoint);
                let wanted = match name.layers {
                    Where::Present => self.tensors.contains_key(&source),
                    rule => schedule.wants(layer, rule),
                };
                if !wanted {
                    continue;
                }
                let plan = self.tensor(name, format!("blk.{layer}.{}", name.gguf), &source, &mut used)?;
                // Tables go last, so that everything a process keeps in memory is one range of the file.
                if name.class == TensorClass::Rows { tables.push(plan) } else { tensors.push(plan) }
            }
        }
        tensors.append(&mut tables);
        Ok(Plan { tensors, left_out: self.left_out(layers, &used)? })
    }

    fn left_out(&self, layers: u32, used: &BTreeSet<String>) -> Result<usize, ConvertError> {
        let unused: Vec<&String> = self.tensors.keys().filter(|name| !used.contains(*name)).collect();
        let inside = |name: &str| match name.strip_prefix("layers.").and_then(|n| n.split_once('.')) {
            Some((layer, part)) => layer.parse::<u32>().is_ok_and(|l| l < layers) && !self.arch.is_unused(part),
            None => ["embed.", "norm.", "head.", "hc_head_"].iter().any(|p| name.starts_with(p)),
        };
        let stray: Vec<&&String> = unused.iter().filter(|name| inside(name)).collect();
        match stray.first() {
            Some(name) => Err(ConvertError::UnexpectedTensor { tensor: name.to_string(), others: stray.len() - 1 }),
            None => Ok(unused.len()),
        }
    }

    fn entry(&self, name: &str, used: &mut BTreeSet<String>) -> Result<&Entry, ConvertError> {
        let found = self.tensors.get(name).ok_or_else(|| ConvertError::MissingTensor { tensor: name.into() })?;
        used.insert(name.into());
        Ok(found)
    }

    fn tensor(
        &self,
        name: &Name,
        gguf: String,
        source: &str,
        used: &mut BTreeSet<String>,
    ) -> Result<TensorPlan, ConvertError> {
        if !source.contains('#') {
            let (part, dims) = self.part(source, name.class, used)?;
            return Ok(TensorPlan { name: gguf, class: name.class, dims, parts: vec![part] });
        }
        let experts = self.config.u32("n_routed_experts")?;
        // Not reserved: the number is believed only as far as tensors are found.
        let mut parts = Vec::new();
        let mut dims: Option<Vec<u64>> = None;
        for expert in 0..experts {
            let source = source.replace('#', &expert.to_string());
            let (part, found) = self.part(&source, name.class, used)?;
            let expected = dims.get_or_insert_with(|| found.clone());
            let same_form = parts.first().is_none_or(|first: &Part| first.native() == part.native());
            if *expected != found || !same_form {
                let expected = format!("that of expert 0, {expected:?} in the same format");
                return Err(ConvertError::Shape { tensor: source, found, expected });
            }
            parts.push(part);
        }
        let mut dims = dims.ok_or_else(|| Config::error("n_routed_experts", "is 0"))?;
        dims.push(u64::from(experts));
        Ok(TensorPlan { name: gguf, class: name.class, dims, parts })
    }

    /// The source of one matrix or vector and its dimensions, fastest first.
    fn part(
        &self,
        name: &str,
        class: TensorClass,
        used: &mut BTreeSet<String>,
    ) -> Result<(Part, Vec<u64>), ConvertError> {
        let weight = self.entry(name, used)?.clone();
        let shape = |found: &[u64], expected: String| {
            Err(ConvertError::Shape { tensor: name.into(), found: found.to_vec(), expected })
        };
        let (rows, stored) = match *weight.shape.as_slice() {
            [n] => (1, n),
            [rows, columns] => (rows, columns),
            _ => return shape(&weight.shape, "one or two dimensions".into()),
        };
        if rows == 0 || stored == 0 {
            return shape(&weight.shape, "no empty dimension".into());
        }
        let dims = |columns| if weight.shape.len() == 1 { vec![columns] } else { vec![columns, rows] };
        if class == TensorClass::Ids {
            let part = self.ids(name, &weight)?;
            return Ok((part, dims(stored)));
        }
        let float = match weight.dtype {
            Dtype::F32 => Some(QuantType::F32),
            Dtype::F16 => Some(QuantType::F16),
            Dtype::BF16 => Some(QuantType::BF16),
            _ => None,
        };
        if let Some(ty) = float.filter(|_| class != TensorClass::Rows) {
            return Ok((Part::Blocks { ty, at: Slice::of(&weight) }, dims(stored)));
        }
        let scale_name = name.strip_suffix(".weight").map(|stem| format!("{stem}.scale"));
        let Some(scale_name) = scale_name.filter(|_| weight.shape.len() == 2) else {
            return Err(wrong_dtype(name, &weight, "F32, F16 or BF16"));
        };
        let scale = self.entry(&scale_name, used)?.clone();
        if scale.dtype != Dtype::F8_E8M0 {
            return Err(wrong_dtype(&scale_name, &scale, "F8_E8M0"));
        }
        let (columns, tile) = match (weight.dtype, class) {
            (Dtype::F8_E4M3, TensorClass::Rows) => (stored, [1, 32]),
            (Dtype::F8_E4M3, _) => (stored, self.config.tile()?),
            (Dtype::I8 | Dtype::U8, TensorClass::GateUp | TensorClass::Down) => (stored * 2, [1, 32]),
            _ => return Err(wrong_dtype(name, &weight, "F8_E4M3 or, for routed experts, packed FP4 (I8)")),
        };
        let expected = [rows.div_ceil(tile[0]), columns.div_ceil(tile[1])];
        if scale.shape != expected {
            let expected = format!("{expected:?} for a weight of {:?}", weight.shape);
            return Err(ConvertError::Shape { tensor: scale_name, found: scale.shape, expected });
        }
        if tile == [1, 32] && !columns.is_multiple_of(32) {
            return shape(&weight.shape, "rows of a multiple of 32 values".into());
        }
        let (codes, scales) = (Slice::of(&weight), Slice::of(&scale));
        Ok(match (weight.dtype, class) {
            (_, TensorClass::Rows) => {
                (Part::TableRows { codes, scales, width: columns }, vec![columns + columns / 32, rows])
            }
            (Dtype::F8_E4M3, _) => (Part::Fp8 { codes, scales, tile }, dims(columns)),
            _ => (Part::Fp4 { codes, scales }, dims(columns)),
        })
    }

    /// A table of experts by token.
    fn ids(&self, name: &str, table: &Entry) -> Result<Part, ConvertError> {
        let expected = [self.config.u32("vocab_size")?, self.config.u32("num_experts_per_tok")?].map(u64::from);
        if table.shape != expected {
            let expected = format!("{expected:?}: a row of experts for every token");
            return Err(ConvertError::Shape { tensor: name.into(), found: table.shape.clone(), expected });
        }
        let bytes_each = match table.dtype {
            Dtype::I64 => 8,
            Dtype::I32 => 4,
            _ => return Err(wrong_dtype(name, table, "I64 or I32")),
        };
        Ok(Part::Ids { at: Slice::of(table), bytes_each, below: self.config.u32("n_routed_experts")? })
    }
}

fn wrong_dtype(name: &str, entry: &Entry, expected: &'static str) -> ConvertError {
    ConvertError::Dtype { tensor: name.into(), found: entry.dtype.to_string(), expected }
}

fn open_shards(folder: &Path) -> Result<BTreeMap<String, Entry>, ConvertError> {
    let path = folder.join("model.safetensors.index.json");
    let Some(JsonFile { object: index, .. }) = read_json(&path)? else {
        let single = folder.join("model.safetensors");
        if !single.exists() {
            return Err(ConvertError::NoCheckpoint { path: folder.to_owned() });
        }
        return Ok(Shard::open(&single)?.tensors);
    };
    let json = |problem: String| ConvertError::Json { path: path.clone(), problem };
    let map = index.get("weight_map").and_then(Value::as_object).ok_or_else(|| json("weight_map is missing".into()))?;
    let mut shards = BTreeMap::<&str, Shard>::new();
    let mut tensors = BTreeMap::new();
    for (tensor, file) in map {
        let Some(file) = file.as_str().filter(|f| !f.contains('/') && !f.contains("..")) else {
            return Err(json(format!("{tensor}: {file} is no file name in this folder")));
        };
        if !shards.contains_key(file) {
            shards.insert(file, Shard::open(&folder.join(file))?);
        }
        let Some(entry) = shards[file].tensors.get(tensor) else {
            return Err(json(format!("{tensor} is not in {file}")));
        };
        tensors.insert(tensor.clone(), entry.clone());
    }
    Ok(tensors)
}
