//! Resident tensors of a file as a model asks for them.
//! Only translates names and shares bytes; checks are the model's, reads are storage's.
//! Surprising fact: nothing is copied, a matrix on the CPU is a view of the bytes that were read.

use std::sync::Arc;

use crate::backend::SharedBytes;
use crate::models::weights::{TensorShape, WeightSource};
use crate::storage::gguf::Directory;
use crate::storage::weights::ResidentWeights;

/// The directory of a file and those of its tensors that were loaded.
pub struct FileWeights<'a> {
    directory: &'a Directory,
    resident: Arc<ResidentWeights>,
}

impl<'a> FileWeights<'a> {
    /// Tensors of `directory`, with the bytes of `resident`.
    pub fn new(directory: &'a Directory, resident: Arc<ResidentWeights>) -> Self {
        Self { directory, resident }
    }
}

/// One loaded tensor, with its hold on the memory that it lies in.
struct Loaded {
    resident: Arc<ResidentWeights>,
    index: usize,
}

impl AsRef<[u8]> for Loaded {
    fn as_ref(&self) -> &[u8] {
        self.resident.tensor(self.index)
    }
}

impl WeightSource for FileWeights<'_> {
    fn shape(&self, name: &str) -> Option<TensorShape> {
        self.directory.tensor(name).map(|t| TensorShape { ty: t.ty, dims: t.dims.clone() })
    }

    fn bytes(&self, name: &str) -> Option<SharedBytes> {
        let index = self.resident.index(name)?;
        let len = self.resident.tensor(index).len();
        SharedBytes::new(Arc::new(Loaded { resident: Arc::clone(&self.resident), index }), 0, len)
    }
}
