//! The parser of GGUF headers. Owns every check between bytes and a [`Directory`]; never seeks and never reads data.
//! Must never allocate for a length before comparing it with a limit and with the bytes that are left.
//! Surprising fact: memory still grows piecewise, because `file_len` may promise more than the reader delivers.

use std::collections::HashMap;
use std::io::{ErrorKind, Read};

use super::directory::{Directory, TensorInfo};
use super::error::GgufError;
use super::metadata::Metadata;
use super::value::{ARRAY_ID, Array, BOOL_ID, STRING_ID, Scalar, StringArray, Value};
use super::{DEFAULT_ALIGNMENT, MAGIC, SHARED_RANGES, limits};
use crate::quant::QuantType;

/// Bytes taken at a time while a long value grows.
const PIECE_BYTES: usize = 1 << 13;

/// Smallest possible entry: key length, one byte of key, type, one byte of value.
const ENTRY_BYTES_MIN: u64 = 8 + 1 + 4 + 1;
/// Smallest possible tensor: name length, one byte of name, dimension count, one dimension, type, offset.
const TENSOR_BYTES_MIN: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// Parses a header from the start of a file of `file_len` bytes.
///
/// # Errors
/// A [`GgufError`] that names the key, tensor or offset at fault.
pub fn parse<R: Read>(reader: R, file_len: u64) -> Result<Directory, GgufError> {
    let mut input = Input { reader, position: 0, file_len };
    let mut magic = [0u8; 4];
    input.bytes(&mut magic, "the magic")?;
    if magic != MAGIC {
        return Err(GgufError::Magic { found: magic });
    }
    let version: u32 = input.scalar("the version")?;
    match version {
        2 | 3 => {}
        v if matches!(v.swap_bytes(), 1..=0xff) => return Err(GgufError::BigEndian { version: v.swap_bytes() }),
        found => return Err(GgufError::Version { found }),
    }
    let tensor_count = input.count("tensors", limits::TENSORS_MAX, 0)?;
    let key_count = input.count("metadata keys", limits::KEYS_MAX, ENTRY_BYTES_MIN)?;
    let mut metadata = Metadata::new();
    for _ in 0..key_count {
        let key = input.name("metadata key", limits::KEY_BYTES_MAX)?;
        let type_id = input.scalar(&key)?;
        let value = input.value(&key, type_id)?;
        if !metadata.insert(key.clone(), value) {
            return Err(GgufError::DuplicateKey { key });
        }
    }
    let alignment = alignment(&metadata)?;
    input.fits("the tensor directory", tensor_count.saturating_mul(TENSOR_BYTES_MIN))?;
    let mut tensors = Vec::with_capacity(tensor_count.min(4096) as usize);
    for _ in 0..tensor_count {
        tensors.push(input.tensor()?);
    }
    // The header limit keeps this far from overflow. A file without tensors may end before the padding.
    let data_start = input.position.next_multiple_of(u64::from(alignment));
    for tensor in &mut tensors {
        place(tensor, data_start, alignment, file_len)?;
    }
    let index = unique_names(&tensors)?;
    refuse_overlap(&tensors, matches!(metadata.get(SHARED_RANGES), Some(Value::Bool(true))))?;
    Ok(Directory { version, alignment, metadata, tensors, index, data_start, file_len })
}

fn alignment(metadata: &Metadata) -> Result<u32, GgufError> {
    let Some(value) = metadata.get("general.alignment") else { return Ok(DEFAULT_ALIGNMENT) };
    match value.integer().and_then(|v| u32::try_from(v).ok()) {
        Some(v) if v.is_power_of_two() && v <= limits::ALIGNMENT_MAX => Ok(v),
        _ => {
            let found = value.integer().map_or_else(|| value.type_name().to_owned(), |v| v.to_string());
            Err(GgufError::Alignment { found, limit: limits::ALIGNMENT_MAX })
        }
    }
}

/// Turns the relative offset into an absolute one and checks it.
fn place(tensor: &mut TensorInfo, data_start: u64, alignment: u32, file_len: u64) -> Result<(), GgufError> {
    let name = || tensor.name.clone();
    if !tensor.offset.is_multiple_of(u64::from(alignment)) {
        return Err(GgufError::Misaligned { tensor: name(), offset: tensor.offset, alignment });
    }
    let start = data_start.saturating_add(tensor.offset);
    match start.checked_add(tensor.bytes) {
        Some(end) if end <= file_len => {}
        _ => return Err(GgufError::PastEnd { tensor: name(), offset: start, bytes: tensor.bytes, file_len }),
    }
    tensor.offset = start;
    Ok(())
}

fn unique_names(tensors: &[TensorInfo]) -> Result<HashMap<String, usize>, GgufError> {
    let mut index = HashMap::with_capacity(tensors.len());
    for (i, tensor) in tensors.iter().enumerate() {
        if index.insert(tensor.name.clone(), i).is_some() {
            return Err(GgufError::DuplicateTensor { tensor: tensor.name.clone() });
        }
    }
    Ok(index)
}

/// Two tensors share no byte, or, where the file `may_share`, all of them. Sums of tensor sizes stay below 2^64 either way.
fn refuse_overlap(tensors: &[TensorInfo], may_share: bool) -> Result<(), GgufError> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|t| t.offset);
    let mut total = 0u64;
    for tensor in &order {
        let overflow = || GgufError::SizeOverflow { tensor: tensor.name.clone(), dims: tensor.dims.clone() };
        total = total.checked_add(tensor.bytes).ok_or_else(overflow)?;
    }
    for pair in order.windows(2) {
        let shares =
            may_share && (pair[0].offset, pair[0].ty, &pair[0].dims) == (pair[1].offset, pair[1].ty, &pair[1].dims);
        if !shares && pair[0].offset + pair[0].bytes > pair[1].offset {
            let (first, second) = (pair[0].name.clone(), pair[1].name.clone());
            return Err(GgufError::Overlap { first, second, offset: pair[1].offset });
        }
    }
    Ok(())
}

/// Names of GGML types that exist but cannot be read, for the message.
fn unsupported_name(id: u32) -> &'static str {
    match id {
        2 => " (Q4_0)",
        3 => " (Q4_1)",
        6 => " (Q5_0)",
        7 => " (Q5_1)",
        9 => " (Q8_1)",
        13 => " (Q5_K)",
        15 => " (Q8_K)",
        17 => " (IQ2_XS)",
        18 => " (IQ3_XXS)",
        19 => " (IQ1_S)",
        20 => " (IQ4_NL)",
        21 => " (IQ3_S)",
        22 => " (IQ2_S)",
        23 => " (IQ4_XS)",
        25 => " (I16)",
        27 => " (I64)",
        28 => " (F64)",
        29 => " (IQ1_M)",
        34 => " (TQ1_0)",
        35 => " (TQ2_0)",
        _ => "",
    }
}

/// A reader that knows how much the file and the header limit leave.
struct Input<R> {
    reader: R,
    position: u64,
    file_len: u64,
}

impl<R: Read> Input<R> {
    /// Checks that `need` bytes are left before anything is reserved for them.
    fn fits(&self, what: &str, need: u64) -> Result<(), GgufError> {
        let left = self.file_len.saturating_sub(self.position);
        if need > left {
            return Err(GgufError::Truncated { what: what.into(), offset: self.position, need, left });
        }
        if self.position.saturating_add(need) > limits::HEADER_BYTES_MAX {
            let limit = limits::HEADER_BYTES_MAX;
            return Err(GgufError::HeaderTooLarge { what: what.into(), offset: self.position, limit });
        }
        Ok(())
    }

    fn bytes(&mut self, out: &mut [u8], what: &str) -> Result<(), GgufError> {
        let need = out.len() as u64;
        self.fits(what, need)?;
        self.reader.read_exact(out).map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof => {
                GgufError::Truncated { what: what.into(), offset: self.position, need, left: 0 }
            }
            _ => GgufError::Io { doing: "cannot read the header", source },
        })?;
        self.position += need;
        Ok(())
    }

    fn scalar<T: Scalar>(&mut self, what: &str) -> Result<T, GgufError> {
        let mut raw = [0u8; 8];
        let raw = &mut raw[..T::BYTES];
        self.bytes(raw, what)?;
        Ok(T::get(raw))
    }

    /// A count of things that take at least `bytes_each`.
    fn count(&mut self, what: &str, limit: u64, bytes_each: u64) -> Result<u64, GgufError> {
        let count: u64 = self.scalar(what)?;
        if count > limit {
            return Err(GgufError::TooMany { what: what.into(), count, limit });
        }
        self.fits(what, count.saturating_mul(bytes_each))?;
        Ok(count)
    }

    /// Appends one string to `out` and returns nothing else, so that many strings can share one buffer.
    fn append_string(&mut self, what: &str, limit: u64, out: &mut String) -> Result<(), GgufError> {
        let offset = self.position;
        let len: u64 = self.scalar(what)?;
        if len > limit {
            return Err(GgufError::TooLong { what: what.into(), offset, len, limit });
        }
        self.fits(what, len)?;
        let utf8 = |_| GgufError::Utf8 { what: what.into(), offset };
        // Short strings, nearly all, are checked on the stack.
        let mut short = [0u8; 256];
        if len as usize <= short.len() {
            let raw = &mut short[..len as usize];
            self.bytes(raw, what)?;
            out.push_str(std::str::from_utf8(raw).map_err(utf8)?);
            return Ok(());
        }
        let raw = self.scalars::<u8>(what, len)?;
        out.push_str(std::str::from_utf8(&raw).map_err(utf8)?);
        Ok(())
    }

    fn name(&mut self, what: &'static str, limit: u64) -> Result<String, GgufError> {
        let offset = self.position;
        let mut name = String::new();
        self.append_string(what, limit, &mut name)?;
        if name.is_empty() {
            return Err(GgufError::EmptyName { what, offset });
        }
        Ok(name)
    }

    /// `count` numbers, whose bytes are known to be left.
    fn scalars<T: Scalar>(&mut self, what: &str, count: u64) -> Result<Vec<T>, GgufError> {
        let mut out = Vec::with_capacity((count as usize).min(PIECE_BYTES / T::BYTES));
        let mut piece = [0u8; PIECE_BYTES];
        while (out.len() as u64) < count {
            let take = ((count - out.len() as u64) as usize).min(PIECE_BYTES / T::BYTES);
            let raw = &mut piece[..take * T::BYTES];
            self.bytes(raw, what)?;
            out.extend(raw.chunks_exact(T::BYTES).map(T::get));
        }
        Ok(out)
    }

    fn value(&mut self, key: &str, type_id: u32) -> Result<Value, GgufError> {
        Ok(match type_id {
            u8::TYPE_ID => Value::U8(self.scalar(key)?),
            i8::TYPE_ID => Value::I8(self.scalar(key)?),
            u16::TYPE_ID => Value::U16(self.scalar(key)?),
            i16::TYPE_ID => Value::I16(self.scalar(key)?),
            u32::TYPE_ID => Value::U32(self.scalar(key)?),
            i32::TYPE_ID => Value::I32(self.scalar(key)?),
            f32::TYPE_ID => Value::F32(self.scalar(key)?),
            u64::TYPE_ID => Value::U64(self.scalar(key)?),
            i64::TYPE_ID => Value::I64(self.scalar(key)?),
            f64::TYPE_ID => Value::F64(self.scalar(key)?),
            BOOL_ID => Value::Bool(boolean(key, self.scalar(key)?)?),
            STRING_ID => {
                let mut text = String::new();
                self.append_string(key, limits::STRING_BYTES_MAX, &mut text)?;
                Value::Str(text)
            }
            ARRAY_ID => Value::Array(self.array(key)?),
            found => return Err(GgufError::ValueType { key: key.into(), found }),
        })
    }

    fn array(&mut self, key: &str) -> Result<Array, GgufError> {
        let element_id: u32 = self.scalar(key)?;
        let element_bytes = match element_id {
            u8::TYPE_ID | i8::TYPE_ID | BOOL_ID => 1,
            u16::TYPE_ID | i16::TYPE_ID => 2,
            u32::TYPE_ID | i32::TYPE_ID | f32::TYPE_ID => 4,
            u64::TYPE_ID | i64::TYPE_ID | f64::TYPE_ID | STRING_ID => 8,
            ARRAY_ID => return Err(GgufError::NestedArray { key: key.into() }),
            found => return Err(GgufError::ValueType { key: key.into(), found }),
        };
        let count = self.count(key, limits::ARRAY_LEN_MAX, element_bytes)?;
        Ok(match element_id {
            u8::TYPE_ID => Array::U8(self.scalars(key, count)?),
            i8::TYPE_ID => Array::I8(self.scalars(key, count)?),
            u16::TYPE_ID => Array::U16(self.scalars(key, count)?),
            i16::TYPE_ID => Array::I16(self.scalars(key, count)?),
            u32::TYPE_ID => Array::U32(self.scalars(key, count)?),
            i32::TYPE_ID => Array::I32(self.scalars(key, count)?),
            f32::TYPE_ID => Array::F32(self.scalars(key, count)?),
            u64::TYPE_ID => Array::U64(self.scalars(key, count)?),
            i64::TYPE_ID => Array::I64(self.scalars(key, count)?),
            f64::TYPE_ID => Array::F64(self.scalars(key, count)?),
            BOOL_ID => {
                let raw = self.scalars::<u8>(key, count)?;
                Array::Bool(raw.into_iter().map(|b| boolean(key, b)).collect::<Result<_, _>>()?)
            }
            _ => Array::Str(self.strings(key, count)?),
        })
    }

    fn strings(&mut self, key: &str, count: u64) -> Result<StringArray, GgufError> {
        let mut out = StringArray::default();
        let mut text = String::new();
        for _ in 0..count {
            text.clear();
            self.append_string(key, limits::STRING_BYTES_MAX, &mut text)?;
            out.push(&text);
        }
        Ok(out)
    }

    /// One entry of the directory; its offset is still relative.
    fn tensor(&mut self) -> Result<TensorInfo, GgufError> {
        let name = self.name("tensor name", limits::NAME_BYTES_MAX)?;
        let dim_count: u32 = self.scalar(&name)?;
        if dim_count == 0 || dim_count > limits::DIMS_MAX {
            return Err(GgufError::DimCount { tensor: name, found: dim_count, limit: limits::DIMS_MAX });
        }
        let dims: Vec<u64> = self.scalars(&name, u64::from(dim_count))?;
        if let Some(dim) = dims.iter().position(|&d| d == 0) {
            return Err(GgufError::ZeroDim { tensor: name, dim });
        }
        let id: u32 = self.scalar(&name)?;
        let Some(ty) = QuantType::from_ggml_id(id) else {
            return Err(GgufError::TensorType { tensor: name, id, known: unsupported_name(id) });
        };
        let offset: u64 = self.scalar(&name)?;
        if !dims[0].is_multiple_of(ty.block_values() as u64) {
            return Err(GgufError::RowBlocks { tensor: name, ty, columns: dims[0], block: ty.block_values() });
        }
        let bytes = ty.row_bytes(dims[0]).and_then(|row| dims[1..].iter().try_fold(row, |a, &d| a.checked_mul(d)));
        match bytes {
            Some(bytes) => Ok(TensorInfo { name, ty, dims, offset, bytes }),
            None => Err(GgufError::SizeOverflow { tensor: name, dims }),
        }
    }
}

fn boolean(key: &str, raw: u8) -> Result<bool, GgufError> {
    match raw {
        0 => Ok(false),
        1 => Ok(true),
        found => Err(GgufError::Bool { key: key.into(), found }),
    }
}
