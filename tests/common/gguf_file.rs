//! A checkpoint folder converted to a GGUF file, read back whole.
//! Never keeps the file: it is gone once it is in memory. Surprising fact: this is the converter's own output, so model and
//! converter are checked against the same golden values.

use std::ops::ControlFlow;
use std::path::Path;

use ds4::backend::SharedBytes;
use ds4::engine::metadata::FileMetadata;
use ds4::models::weights::{TensorShape, WeightSource};
use ds4::storage::convert::{ALIGNMENT, BaseRecipe, Options, Recipe, convert};
use ds4::storage::gguf::GgufFile;

/// Directory and bytes of a converted file.
pub struct Converted {
    file: GgufFile,
    bytes: std::sync::Arc<Vec<u8>>,
}

impl Converted {
    /// Lossless conversion of `dir`.
    pub fn native(dir: &Path) -> Self {
        Self::with(dir, &[])
    }

    /// Lossless, except for the classes that `settings` name.
    pub fn with(dir: &Path, settings: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("model.gguf");
        let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
        let recipe = Recipe::base(BaseRecipe::Native).with(&settings).unwrap();
        let options = Options { recipe, importance: None, output: &output, force: false, alignment: ALIGNMENT };
        convert(dir, &options, &mut |_, _| ControlFlow::Continue(())).unwrap();
        let bytes = std::sync::Arc::new(std::fs::read(&output).unwrap());
        Self { file: GgufFile::open(&output).unwrap(), bytes }
    }

    /// A file as it is.
    pub fn open(path: &Path) -> Self {
        let bytes = std::sync::Arc::new(std::fs::read(path).unwrap());
        Self { file: GgufFile::open(path).unwrap(), bytes }
    }

    /// The metadata as models see it.
    pub fn metadata(&self) -> FileMetadata<'_> {
        FileMetadata(self.file.metadata())
    }
}

impl WeightSource for Converted {
    fn shape(&self, name: &str) -> Option<TensorShape> {
        self.file.tensor(name).map(|t| TensorShape { ty: t.ty, dims: t.dims.clone() })
    }

    fn bytes(&self, name: &str) -> Option<SharedBytes> {
        let tensor = self.file.tensor(name)?;
        SharedBytes::new(self.bytes.clone(), tensor.offset as usize, tensor.bytes as usize)
    }
}
