//! From a published checkpoint, or from another GGUF file, to a GGUF file of a chosen recipe; and their comparison.
//! Owns names, recipes and exactness checks; never holds more than one piece of one tensor, and never writes a file
//! that [`Layout`](super::layout::Layout) would refuse.
//! Surprising fact: rows are encoded independently, so any number of threads gives the same bytes.

mod checkpoint;
mod compare;
mod dialect;
pub(super) mod dialect4;
pub(super) mod engram;
mod error;
mod importance;
pub(super) mod names;
mod part;
mod pcg64;
mod pipeline;
mod recipe;
mod shard;
mod vocabulary;

use std::path::Path;

pub use compare::{Comparison, MetadataDifference, TensorDifference, compare};
pub use error::ConvertError;
pub use importance::{Importance, write_importance};
pub use names::{Arch, TensorClass};
pub use pipeline::{Summary, Watch};
pub use recipe::{BaseRecipe, Recipe, Target};

use super::gguf::GgufFile;
use checkpoint::Checkpoint;

/// Alignment of tensor data in V4.1 files (spec 1.3): a multiple of every page size in use.
pub const ALIGNMENT: u32 = 16_384;

/// What `convert` and `quantize` need besides their input.
#[derive(Debug)]
pub struct Options<'a> {
    pub recipe: Recipe,
    pub importance: Option<&'a Importance>,
    pub output: &'a Path,
    /// Replace an existing output.
    pub force: bool,
    /// `general.alignment` of the output.
    pub alignment: u32,
}

/// Converts the checkpoint folder `input`.
///
/// # Errors
/// A [`ConvertError`] that names file, tensor or key. The output path is untouched then.
pub fn convert(input: &Path, options: &Options, watch: &mut Watch) -> Result<Summary, ConvertError> {
    let checkpoint = Checkpoint::open(input)?;
    let plan = checkpoint.plan()?;
    let metadata = dialect::metadata(&checkpoint, options)?;
    let mut summary = pipeline::write(metadata, plan.tensors, options, watch)?;
    summary.left_out = plan.left_out;
    Ok(summary)
}

/// Re-encodes a GGUF file by a recipe; metadata is kept except the provenance keys.
///
/// # Errors
/// As [`convert`].
pub fn quantize(input: &GgufFile, options: &Options, watch: &mut Watch) -> Result<Summary, ConvertError> {
    super::layout::Layout::from_gguf(input)?;
    let arch = Arch::of_gguf(input.metadata()).expect("the layout knows the same architectures");
    let tensors = part::tensors_of_gguf(input, arch)?;
    let mut metadata = input.metadata().clone();
    metadata.insert("general.alignment", options.alignment);
    dialect::set_provenance(&mut metadata, arch, options);
    pipeline::write(metadata, tensors, options, watch)
}
