//! The metadata of a GGUF file as models and the tokenizer want to see it.
//! Only translates; what a value means is decided above. Surprising fact: every integer width of the file reads the same,
//! because converters disagree about widths.

use crate::models::metadata::{MetaValue, MetadataView};
use crate::storage::gguf::{Array, Metadata, MetadataError, Value};
use crate::text::tokenizer::VocabSource;
use crate::units::TokenId;

/// A file's metadata behind the models' trait.
pub struct FileMetadata<'a>(pub &'a Metadata);

impl MetadataView for FileMetadata<'_> {
    fn get(&self, key: &str) -> Option<MetaValue<'_>> {
        let value = self.0.get(key)?;
        Some(match value {
            Value::U8(v) => MetaValue::Uint(u64::from(*v)),
            Value::U16(v) => MetaValue::Uint(u64::from(*v)),
            Value::U32(v) => MetaValue::Uint(u64::from(*v)),
            Value::U64(v) => MetaValue::Uint(*v),
            Value::I8(v) => signed(i64::from(*v)),
            Value::I16(v) => signed(i64::from(*v)),
            Value::I32(v) => signed(i64::from(*v)),
            Value::I64(v) => signed(*v),
            Value::F32(v) => MetaValue::Float(*v),
            Value::F64(v) => MetaValue::Float(*v as f32),
            Value::Bool(v) => MetaValue::Bool(*v),
            Value::Str(v) => MetaValue::Text(v),
            Value::Array(array) => match (unsigned(array), array) {
                (Some(values), _) => MetaValue::Uints(values),
                (None, Array::F32(values)) => MetaValue::Floats(values.clone()),
                (None, Array::F64(values)) => MetaValue::Floats(values.iter().map(|v| *v as f32).collect()),
                (None, Array::Str(texts)) => MetaValue::Texts(texts.len()),
                (None, _) => MetaValue::Other(value.type_name()),
            },
        })
    }
}

fn signed(value: i64) -> MetaValue<'static> {
    u64::try_from(value).map_or(MetaValue::Other("a negative integer"), MetaValue::Uint)
}

/// The array as unsigned integers; `None` if it holds anything else. An empty array has no type worth insisting on.
fn unsigned(array: &Array) -> Option<Vec<u64>> {
    fn all<T: Copy + TryInto<u64>>(values: &[T]) -> Option<Vec<u64>> {
        values.iter().map(|v| (*v).try_into().ok()).collect()
    }
    match array {
        _ if array.is_empty() => Some(Vec::new()),
        Array::U8(v) => all(v),
        Array::I8(v) => all(v),
        Array::U16(v) => all(v),
        Array::I16(v) => all(v),
        Array::U32(v) => all(v),
        Array::I32(v) => all(v),
        Array::U64(v) => all(v),
        Array::I64(v) => all(v),
        _ => None,
    }
}

/// What the file says about its tokenizer.
///
/// # Errors
/// A missing key or a key of the wrong type, by name.
pub fn vocabulary(metadata: &Metadata) -> Result<VocabSource, MetadataError> {
    let strings = |key: &str| -> Result<Vec<String>, MetadataError> {
        Ok(metadata.str_array(key)?.iter().map(str::to_owned).collect())
    };
    let optional_id = |key: &str| -> Result<Option<TokenId>, MetadataError> {
        if metadata.contains(key) { metadata.u32(key).map(Some) } else { Ok(None) }
    };
    let types = "tokenizer.ggml.token_type";
    let template = "tokenizer.chat_template";
    let add_bos = "tokenizer.ggml.add_bos_token";
    Ok(VocabSource {
        model: metadata.str("tokenizer.ggml.model")?.to_owned(),
        pre: metadata.str("tokenizer.ggml.pre")?.to_owned(),
        tokens: strings("tokenizer.ggml.tokens")?,
        token_types: if metadata.contains(types) { metadata.i32_array(types)? } else { Vec::new() },
        merges: strings("tokenizer.ggml.merges")?,
        bos: optional_id("tokenizer.ggml.bos_token_id")?,
        eos: optional_id("tokenizer.ggml.eos_token_id")?,
        pad: optional_id("tokenizer.ggml.padding_token_id")?,
        add_bos: if metadata.contains(add_bos) { metadata.bool(add_bos)? } else { false },
        chat_template: if metadata.contains(template) { Some(metadata.str(template)?.to_owned()) } else { None },
    })
}
