//! Where a graph gets its resident weights, and how it checks that they are all there.
//! Never learns the file format: the engine, or a test, implements `WeightSource`. Surprising fact: shapes are checked
//! for every tensor of the file, also for those that are never resident.

use crate::backend::{Backend, BackendError, SharedBytes};
use crate::quant::{QuantError, QuantType, dequantize_row};

/// Type and dimensions of a tensor; dimensions as in GGUF, innermost first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorShape {
    pub ty: QuantType,
    pub dims: Vec<u64>,
}

/// The tensors of one model file.
pub trait WeightSource {
    /// Shape of a tensor of the file, resident or not.
    fn shape(&self, name: &str) -> Option<TensorShape>;
    /// Bytes of a resident tensor.
    fn bytes(&self, name: &str) -> Option<SharedBytes>;
}

/// Where a tensor lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Residency {
    Resident,
    Streamed,
    DiskOnly,
}

/// Types that a tensor may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TypeClass {
    /// Small vectors and the router: F32, F16 or BF16.
    Plain,
    /// Matrices: any type that products are defined for.
    Matrix,
    /// Rows of raw bytes.
    Bytes,
    /// Rows of ids.
    Ids,
}

impl TypeClass {
    fn allows(self, ty: QuantType) -> bool {
        match self {
            Self::Plain => matches!(ty, QuantType::F32 | QuantType::F16 | QuantType::BF16),
            Self::Matrix => ty.is_numeric(),
            Self::Ids => ty == QuantType::I32,
            Self::Bytes => ty == QuantType::I8,
        }
    }

    fn names(self) -> &'static str {
        match self {
            Self::Plain => "F32, F16 or BF16",
            Self::Matrix => "a float or quantised type",
            Self::Bytes => "I8",
            Self::Ids => "I32",
        }
    }
}

/// One tensor that a model needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorSpec {
    pub name: String,
    /// Innermost first.
    pub dims: Vec<u64>,
    pub types: TypeClass,
    pub residency: Residency,
    /// May be absent.
    pub optional: bool,
}

/// Why the tensors of a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("the file has no tensor {name}; convert it again with ds4-gguf convert")]
    Missing { name: String },
    #[error("tensor {name} has dimensions {found:?}, expected {expected:?}; it does not fit the file's metadata")]
    Shape { name: String, found: Vec<u64>, expected: Vec<u64> },
    #[error("tensor {name} has type {found}, expected {expected}; convert it with ds4-gguf quantize")]
    Type { name: String, found: QuantType, expected: &'static str },
    #[error("tensor {name}, row {row}: {what}; the model file is damaged, check its hash")]
    Table { name: String, row: usize, what: String },
    #[error("tensor {name}: {source}")]
    Decode { name: String, source: QuantError },
    #[error("tensor {name}: {source}")]
    Backend { name: String, source: BackendError },
}

/// Checks presence, shape and type of every tensor in `specs`.
pub fn check(specs: &[TensorSpec], source: &dyn WeightSource) -> Result<(), WeightsError> {
    for spec in specs {
        let name = || spec.name.clone();
        match source.shape(&spec.name) {
            None if spec.optional => {}
            None => return Err(WeightsError::Missing { name: name() }),
            Some(shape) if shape.dims != spec.dims => {
                return Err(WeightsError::Shape { name: name(), found: shape.dims, expected: spec.dims.clone() });
            }
            Some(shape) if !spec.types.allows(shape.ty) => {
                return Err(WeightsError::Type { name: name(), found: shape.ty, expected: spec.types.names() });
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Moves checked tensors to a device.
pub struct Loader<'a, B: Backend> {
    backend: &'a B,
    source: &'a dyn WeightSource,
}

impl<'a, B: Backend> Loader<'a, B> {
    /// A loader of tensors that `check` has accepted.
    pub fn new(backend: &'a B, source: &'a dyn WeightSource) -> Self {
        Self { backend, source }
    }

    fn tensor(&self, name: &str) -> Result<(TensorShape, SharedBytes), WeightsError> {
        let missing = || WeightsError::Missing { name: name.into() };
        Ok((self.source.shape(name).ok_or_else(missing)?, self.source.bytes(name).ok_or_else(missing)?))
    }

    /// A matrix in its stored type.
    pub fn matrix(&self, name: &str) -> Result<B::Mat, WeightsError> {
        let (shape, bytes) = self.tensor(name)?;
        let cols = shape.dims.first().copied().unwrap_or(1) as usize;
        let rows = shape.dims.iter().skip(1).product::<u64>() as usize;
        let loaded = self.backend.load(shape.ty, rows, cols, bytes);
        loaded.map_err(|source| WeightsError::Backend { name: name.into(), source })
    }

    /// A small tensor as F32 values on the host.
    pub fn values(&self, name: &str) -> Result<Vec<f32>, WeightsError> {
        let (shape, bytes) = self.tensor(name)?;
        let mut values = vec![0.0f32; shape.dims.iter().product::<u64>() as usize];
        dequantize_row(shape.ty, bytes.as_slice(), &mut values)
            .map_err(|source| WeightsError::Decode { name: name.into(), source })?;
        Ok(values)
    }

    /// A small tensor as F32 values.
    pub fn vector(&self, name: &str) -> Result<B::Buf, WeightsError> {
        let values = self.values(name)?;
        self.put("weight vectors", &values).map_err(|source| WeightsError::Backend { name: name.into(), source })
    }

    /// `rows` x `cols` host values as a matrix.
    pub fn put_matrix(&self, rows: usize, cols: usize, values: &[f32]) -> Result<B::Mat, BackendError> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.backend.load(QuantType::F32, rows, cols, bytes.into())
    }

    /// The bytes of a table that stays on the host.
    pub fn table(&self, name: &str) -> Result<SharedBytes, WeightsError> {
        Ok(self.tensor(name)?.1)
    }

    /// Host values on the device.
    pub fn put(&self, what: &'static str, values: &[f32]) -> Result<B::Buf, BackendError> {
        let mut buf = self.backend.alloc(what, values.len())?;
        self.backend.upload(values, &mut buf, 0)?;
        Ok(buf)
    }
}
