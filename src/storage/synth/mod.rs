//! Synthetic model files: every tensor of the published V4.1 or V4 layout with random, well-scaled values, at any scale.
//! Owns the plan of such a file and its writing; never quantises a value: random blocks are valid blocks, so the drive is the limit.
//! Surprising fact: with aliased layers a file describes more weights than it holds: several expert tensors name the same range.

mod blocks;
mod deepseek4;
mod deepseek41;
mod dims;
mod geometry;
mod routing;
mod vocabulary;

use std::collections::HashMap;
use std::fmt;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;
use thiserror::Error;

pub use dims::{Dims, Shape};
pub use routing::Routing;

use super::convert::{ConvertError, Recipe, Summary, TensorClass, Watch};
use super::gguf::{Directory, GgufError, GgufOutput, GgufWriter, Metadata, SHARED_RANGES, TensorSpec};
use super::layout::{Layout, LayoutError};
use crate::quant::QuantType;
use blocks::{Fill, Stream};
use geometry::Geometry;

/// What a synthetic file is to be.
#[derive(Clone, Debug)]
pub struct SynthOptions {
    pub dims: Dims,
    pub recipe: Recipe,
    /// Layers that have experts of their own; the others share their ranges in turn.
    pub alias: Option<u32>,
    pub routing: Routing,
    pub seed: u64,
    /// `general.alignment`.
    pub alignment: u32,
}

/// Why no file was made.
#[derive(Debug, Error)]
pub enum SynthError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error(transparent)]
    Recipe(#[from] ConvertError),
    #[error("{name}={value}: {reason}")]
    Dim { name: String, value: String, reason: String },
    #[error("a vocabulary of {found} is too small: bytes and special tokens alone take {needed}")]
    Vocabulary { found: u32, needed: u32 },
    #[error("--alias {alias}: must be between 1 and the {layers} layers of the model")]
    Alias { alias: u32, layers: u32 },
    #[error("--routing {given}: write uniform or zipf:S with S between 0 and 8")]
    Routing { given: String },
    #[error("stopped; nothing was written")]
    Stopped,
}

/// A tensor and what goes into it.
struct Planned {
    spec: TensorSpec,
    fill: Fill,
}

/// A file that is thought out and not yet written.
pub struct SynthPlan {
    metadata: Metadata,
    tensors: Vec<Planned>,
    shared: Vec<Option<usize>>,
    writer: GgufWriter,
    seed: u64,
}

impl fmt::Debug for SynthPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SynthPlan").field("tensors", &self.tensors.len()).field("seed", &self.seed).finish()
    }
}

impl SynthPlan {
    /// Plans the file of `options`.
    ///
    /// # Errors
    /// Sizes that contradict each other, types that do not fit the row lengths.
    pub fn new(options: &SynthOptions) -> Result<Self, SynthError> {
        let geometry = Geometry::new(&options.dims)?;
        let layers = geometry.layers();
        if let Some(alias) = options.alias.filter(|a| !(1..=layers).contains(a)) {
            return Err(SynthError::Alias { alias, layers });
        }
        let arch = options.dims.arch().name();
        let mut metadata = Metadata::new();
        metadata.insert("general.architecture", arch);
        metadata.insert("general.name", format!("synthetic, {layers} layers"));
        metadata.insert("general.alignment", options.alignment);
        if options.alias.is_some() {
            metadata.insert(SHARED_RANGES, true);
        }
        metadata.insert("ds4.synthetic", true);
        metadata.insert("ds4.synthetic.seed", options.seed);
        metadata.insert("ds4.synthetic.routing", options.routing.to_string());
        geometry.describe(&mut metadata);
        metadata.insert(format!("{arch}.quantization"), options.recipe.describe());
        metadata.insert(format!("{arch}.calibration"), "none");
        vocabulary::add(&mut metadata, options.dims.arch(), geometry.vocab())?;

        let (experts, k) = (geometry.experts() as usize, geometry.experts_per_token() as usize);
        let biases: Arc<[f32]> = options.routing.biases(experts, k).into();
        let mut tensors = Vec::new();
        for tensor in geometry.tensors() {
            let columns = tensor.dims[0];
            let ty = options.recipe.choose(&tensor.name, tensor.class, columns, native(tensor.class))?;
            let fill = Fill::of(&tensor, &biases, options.seed);
            tensors.push(Planned { spec: TensorSpec { name: tensor.name, ty, dims: tensor.dims }, fill });
        }
        let shared = share(&tensors, options.alias);
        let specs: Vec<TensorSpec> = tensors.iter().map(|t| t.spec.clone()).collect();
        let writer = GgufWriter::with_shared(&metadata, &specs, &shared)?;
        Layout::from_gguf(writer.directory())?;
        Ok(Self { metadata, tensors, shared, writer, seed: options.seed })
    }

    /// The keys of the file, for whoever wants to check them before the work.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// What a reader of the file will see.
    pub fn directory(&self) -> &Directory {
        self.writer.directory()
    }

    /// Writes the file; `watch` is told bytes done and bytes in all.
    ///
    /// # Errors
    /// An existing file without `force`, a full drive, `Stopped`. The target is untouched then.
    pub fn write(self, path: &Path, force: bool, watch: &mut Watch) -> Result<Summary, SynthError> {
        let bytes = self.writer.directory().file_len();
        let mut output = self.writer.create(path, force)?;
        let mut done = 0;
        let mut summary = Summary { bytes, ..Summary::default() };
        for (planned, shared) in self.tensors.iter().zip(&self.shared) {
            summary.tensors += 1;
            if shared.is_some() {
                continue;
            }
            output.begin(&planned.spec.name)?;
            write_tensor(&mut output, planned, self.seed, &mut |more| {
                done += more;
                watch(done, bytes)
            })?;
        }
        output.finish()?;
        Ok(summary)
    }
}

/// The type that a checkpoint holds a class in.
fn native(class: TensorClass) -> QuantType {
    match class {
        TensorClass::GateUp | TensorClass::Down => QuantType::MXFP4,
        TensorClass::Fixed => QuantType::F32,
        TensorClass::Rows => QuantType::I8,
        TensorClass::Ids => QuantType::I32,
        _ => QuantType::BF16,
    }
}

/// By tensor, the earlier one whose range it takes: experts of layer `l` those of layer `l mod alias`.
fn share(tensors: &[Planned], alias: Option<u32>) -> Vec<Option<usize>> {
    let Some(alias) = alias else { return vec![None; tensors.len()] };
    let places: HashMap<&str, usize> = tensors.iter().enumerate().map(|(i, t)| (t.spec.name.as_str(), i)).collect();
    let earlier = |planned: &Planned| {
        let name = &planned.spec.name;
        let (layer, stem) = name.strip_prefix("blk.")?.split_once('.')?;
        let layer: u32 = layer.parse().ok()?;
        if !stem.contains("_exps.") || layer < alias {
            return None;
        }
        places.get(format!("blk.{}.{stem}", layer % alias).as_str()).copied()
    };
    tensors.iter().map(earlier).collect()
}

/// Bytes that are made while the ones before them are written.
const PIECE_BYTES: usize = 16 << 20;
/// Bytes of one random stream, about: the unit of parallel work.
const GROUP_BYTES: usize = 64 << 10;

/// Fills one tensor; the bytes depend on seed, name and position only.
fn write_tensor(
    output: &mut GgufOutput,
    planned: &Planned,
    seed: u64,
    watch: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<(), SynthError> {
    let spec = &planned.spec;
    let row_bytes = spec.ty.row_bytes(spec.dims[0]).expect("the recipe chose a type that fits") as usize;
    let rows: u64 = spec.dims[1..].iter().product();
    let group_rows = (GROUP_BYTES / row_bytes).max(1);
    let group_bytes = group_rows * row_bytes;
    let piece_rows = (PIECE_BYTES / group_bytes).max(1) * group_rows;
    let mut buffers = [Vec::new(), Vec::new()];
    let mut next_row = 0u64;
    loop {
        let (filling, full) = {
            let [a, b] = &mut buffers;
            (a, b)
        };
        let take = (rows - next_row).min(piece_rows as u64) as usize;
        let first_group = next_row / group_rows as u64;
        filling.resize(take * row_bytes, 0);
        let fill = || {
            filling.par_chunks_mut(group_bytes).enumerate().for_each(|(i, bytes)| {
                let group = first_group + i as u64;
                let mut stream = Stream::new(seed, &spec.name, group);
                planned.fill.write(spec.ty, group * group_rows as u64, row_bytes, &mut stream, bytes);
            });
        };
        let ((), written) = rayon::join(fill, || output.append(full));
        written?;
        if watch(full.len() as u64).is_break() {
            return Err(SynthError::Stopped);
        }
        if take == 0 {
            return Ok(());
        }
        next_row += take as u64;
        buffers.swap(0, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::convert::{ALIGNMENT, Arch, BaseRecipe};

    /// Spec deepseek-v4, 2.3 and 2.4: but for what is F32 here (positions of groups, routers) and F16 there.
    #[test]
    fn the_full_shape_of_v4_has_the_published_bytes() {
        let options = SynthOptions {
            dims: Dims::of(Arch::DeepSeek4, Shape::Full),
            recipe: Recipe::base(BaseRecipe::Q2),
            alias: None,
            routing: Routing::Uniform,
            seed: 1,
            alignment: ALIGNMENT,
        };
        let plan = SynthPlan::new(&options).unwrap();
        let layout = Layout::from_gguf(plan.directory()).unwrap();
        assert_eq!(layout.expert_bytes_total().0, 77_913_391_104);
        assert_eq!(layout.experts[0].expert_bytes().0, 7_077_888);
        let routers = 43 * 4096 * 256;
        let positions = 21 * 4 * (1024 + 256) + 20 * 128 * 512;
        assert_eq!(layout.resident_bytes.0, 8_801_384_796 + 2 * (routers + positions));
    }

    /// Spec 2.4 and 1.1.
    #[test]
    fn the_full_shape_has_the_published_bytes() {
        for alias in [None, Some(3)] {
            let options = SynthOptions {
                dims: Dims::of(Arch::DeepSeek41, Shape::Full),
                recipe: Recipe::base(BaseRecipe::Q2),
                alias,
                routing: Routing::Uniform,
                seed: 1,
                alignment: ALIGNMENT,
            };
            let plan = SynthPlan::new(&options).unwrap();
            let layout = Layout::from_gguf(plan.directory()).unwrap();
            assert_eq!(layout.expert_bytes_total().0, 152_882_380_800);
            assert_eq!(layout.experts[0].expert_bytes().0, 9_953_280);
            assert_eq!(layout.resident_bytes.0, 10_060_841_408);
            assert_eq!(layout.table_bytes_total().0, 264 * (384_006_168 + 384_016_682));
            // What is shared is not stored again.
            let shared = alias.map_or(0, |own| (40 - u64::from(own)) * 3_822_059_520);
            let stored =
                layout.expert_bytes_total().0 + layout.resident_bytes.0 + layout.table_bytes_total().0 - shared;
            let padding = plan.directory().file_len() - plan.directory().data_start() - stored;
            assert!(padding < plan.directory().tensors().len() as u64 * u64::from(ALIGNMENT), "{padding}");
        }
    }
}
