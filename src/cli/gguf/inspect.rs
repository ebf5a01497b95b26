//! What `ds4-gguf inspect` shows: metadata with long values cut, classes of tensors, sizes of experts.
//! Owns the two forms, text and JSON; never reads the file again.
//! Surprising fact: a file of another architecture is still shown, only its classes are not known.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::json;

use crate::storage::gguf::{Array, GgufFile, StringArray, TensorInfo, Value};
use crate::storage::layout::{Layout, LayoutError};
use crate::units::Bytes;

/// Array elements shown.
const ELEMENTS_SHOWN: usize = 8;
/// Characters of a string shown.
const CHARS_SHOWN: usize = 100;

/// A class of tensors: name, tensors, bytes.
type ClassRow = (&'static str, usize, u64);

fn classes(file: &GgufFile, layout: &Layout) -> Vec<ClassRow> {
    let streamed = 3 * layout.experts.len();
    let known = layout.resident.len() + streamed + layout.tables.len() + layout.drafting.len();
    debug_assert_eq!(known, file.tensors().len());
    let mut classes = vec![
        ("resident", layout.resident.len(), layout.resident_bytes.0),
        ("streamed", streamed, layout.expert_bytes_total().0),
        ("disk_only", layout.tables.len(), layout.table_bytes_total().0),
    ];
    if !layout.drafting.is_empty() {
        classes.push(("drafting", layout.drafting.len(), layout.drafting_bytes.0));
    }
    classes
}

/// Bytes of each type: (tensors, bytes).
fn types(file: &GgufFile) -> BTreeMap<&'static str, (usize, u64)> {
    let mut out = BTreeMap::new();
    for t in file.tensors() {
        let entry: &mut (usize, u64) = out.entry(t.ty.name()).or_default();
        entry.0 += 1;
        entry.1 += t.bytes;
    }
    out
}

/// The human form.
pub(super) fn text(file: &GgufFile, with_tensors: bool) -> String {
    let mut out = String::new();
    let mut line = |args: std::fmt::Arguments| {
        out.write_fmt(args).expect("a string takes everything");
        out.push('\n');
    };
    let (len, count) = (file.file_len(), file.tensors().len());
    line(format_args!("{}: GGUF v{}, {} ({len} bytes)", file.path().display(), file.version(), Bytes(len)));
    line(format_args!("header {} bytes, alignment {}, {count} tensors", file.data_start(), file.alignment()));
    line(format_args!("\nmetadata"));
    for (key, value) in file.metadata().iter() {
        line(format_args!("  {key} = {}", shorten(value)));
    }
    line(format_args!("\ntypes"));
    for (name, (tensors, bytes)) in types(file) {
        line(format_args!("  {name:<8} {tensors:>6} tensors {:>12}", Bytes(bytes).to_string()));
    }
    line(format_args!("\nclasses"));
    match Layout::from_gguf(file) {
        Ok(layout) => {
            for (name, tensors, bytes) in classes(file, &layout) {
                let size = Bytes(bytes).to_string();
                line(format_args!("  {name:<9} {tensors:>6} tensors {size:>12}  {bytes} bytes"));
            }
            line(format_args!("\nexpert sizes"));
            for class in layout.size_classes() {
                let (size, each) = (class.expert_bytes.to_string(), class.expert_bytes.0);
                line(format_args!("  {size:>10} ({each} bytes): {} experts in {} layers", class.experts, class.layers));
            }
        }
        Err(error) => line(format_args!("  not known: {error}")),
    }
    if with_tensors {
        line(format_args!("\ntensors"));
        for t in file.tensors() {
            let TensorInfo { name, ty, dims, offset, bytes } = t;
            line(format_args!("  {name:<36} {ty:<8} {dims:?} at {offset}, {bytes} bytes", ty = ty.name()));
        }
    }
    out
}

/// The machine form.
pub(super) fn json(file: &GgufFile, with_tensors: bool) -> String {
    let layout: Result<Layout, LayoutError> = Layout::from_gguf(file);
    let metadata: serde_json::Map<String, serde_json::Value> =
        file.metadata().iter().map(|(k, v)| (k.to_owned(), json_value(v))).collect();
    let types: serde_json::Map<String, serde_json::Value> = types(file)
        .into_iter()
        .map(|(name, (n, bytes))| (name.into(), json!({"tensors": n, "bytes": bytes})))
        .collect();
    let mut out = json!({
        "path": file.path().display().to_string(),
        "version": file.version(),
        "alignment": file.alignment(),
        "file_len": file.file_len(),
        "data_start": file.data_start(),
        "metadata": metadata,
        "types": types,
        "tensor_count": file.tensors().len(),
    });
    match &layout {
        Ok(layout) => {
            for (name, tensors, bytes) in classes(file, layout) {
                out["classes"][name] = json!({"tensors": tensors, "bytes": bytes});
            }
            let sizes = layout.size_classes();
            let size =
                sizes.iter().map(|c| json!({"bytes": c.expert_bytes.0, "experts": c.experts, "layers": c.layers}));
            out["expert_sizes"] = size.collect();
        }
        Err(error) => out["classes_unknown"] = json!(error.to_string()),
    }
    if with_tensors {
        let tensor = |t: &TensorInfo| json!({"name": t.name, "type": t.ty.name(), "dims": t.dims, "offset": t.offset, "bytes": t.bytes});
        out["tensors"] = file.tensors().iter().map(tensor).collect();
    }
    format!("{out:#}\n")
}

/// One line for any value.
fn shorten(value: &Value) -> String {
    match value {
        Value::Str(s) => quote(s),
        Value::Array(array) => {
            let (shown, len) = (first_elements(array), array.len());
            let more = if len > shown.len() { format!(", ... {len} in all") } else { String::new() };
            format!("[{}{more}]", shown.join(", "))
        }
        Value::U8(v) => v.to_string(),
        Value::I8(v) => v.to_string(),
        Value::U16(v) => v.to_string(),
        Value::I16(v) => v.to_string(),
        Value::U32(v) => v.to_string(),
        Value::I32(v) => v.to_string(),
        Value::F32(v) => format!("{v:?}"),
        Value::U64(v) => v.to_string(),
        Value::I64(v) => v.to_string(),
        Value::F64(v) => format!("{v:?}"),
        Value::Bool(v) => v.to_string(),
    }
}

/// A quoted string on one line, cut when long.
fn quote(s: &str) -> String {
    let chars = s.chars().count();
    let shown: String = s.chars().take(CHARS_SHOWN).collect();
    if chars > CHARS_SHOWN { format!("{shown:?}... {chars} characters in all") } else { format!("{shown:?}") }
}

fn first_elements(array: &Array) -> Vec<String> {
    fn first<T: std::fmt::Debug>(v: &[T]) -> Vec<String> {
        v.iter().take(ELEMENTS_SHOWN).map(|x| format!("{x:?}")).collect()
    }
    fn first_strings(v: &StringArray) -> Vec<String> {
        v.iter().take(ELEMENTS_SHOWN).map(quote).collect()
    }
    match array {
        Array::U8(v) => first(v),
        Array::I8(v) => first(v),
        Array::U16(v) => first(v),
        Array::I16(v) => first(v),
        Array::U32(v) => first(v),
        Array::I32(v) => first(v),
        Array::F32(v) => first(v),
        Array::U64(v) => first(v),
        Array::I64(v) => first(v),
        Array::F64(v) => first(v),
        Array::Bool(v) => first(v),
        Array::Str(v) => first_strings(v),
    }
}

/// Scalars as they are, strings whole, arrays as their length and first elements.
fn json_value(value: &Value) -> serde_json::Value {
    match value {
        Value::Str(s) => json!(s),
        Value::Bool(v) => json!(v),
        Value::F32(v) => json!(v),
        Value::F64(v) => json!(v),
        Value::U64(v) => json!(v),
        Value::I64(v) => json!(v),
        Value::U8(v) => json!(v),
        Value::I8(v) => json!(v),
        Value::U16(v) => json!(v),
        Value::I16(v) => json!(v),
        Value::U32(v) => json!(v),
        Value::I32(v) => json!(v),
        Value::Array(array) => json!({"type": array.type_name(), "len": array.len(), "first": json_elements(array)}),
    }
}

fn json_elements(array: &Array) -> serde_json::Value {
    fn first<T: serde::Serialize>(v: &[T]) -> serde_json::Value {
        json!(v[..v.len().min(ELEMENTS_SHOWN)])
    }
    match array {
        Array::U8(v) => first(v),
        Array::I8(v) => first(v),
        Array::U16(v) => first(v),
        Array::I16(v) => first(v),
        Array::U32(v) => first(v),
        Array::I32(v) => first(v),
        Array::F32(v) => first(v),
        Array::U64(v) => first(v),
        Array::I64(v) => first(v),
        Array::F64(v) => first(v),
        Array::Bool(v) => first(v),
        Array::Str(v) => v.iter().take(ELEMENTS_SHOWN).collect(),
    }
}
