//! Values of GGUF metadata and their bytes. Owns the type numbers; never reads a file.
//! Must never hold an array of arrays: the reader refuses them.
//! Surprising fact: a string array is one buffer plus end positions, because vocabularies have 10^5 tiny strings.

/// A number with a fixed little-endian form.
pub(crate) trait Scalar: Copy {
    const TYPE_ID: u32;
    const BYTES: usize;
    /// Reads from exactly `BYTES` bytes.
    fn get(bytes: &[u8]) -> Self;
    fn put(self, out: &mut Vec<u8>);
}

macro_rules! scalars {
    ($($t:ty = $id:literal),* $(,)?) => {$(
        impl Scalar for $t {
            const TYPE_ID: u32 = $id;
            const BYTES: usize = size_of::<$t>();
            fn get(bytes: &[u8]) -> Self {
                let mut raw = [0u8; size_of::<$t>()];
                raw.copy_from_slice(bytes);
                <$t>::from_le_bytes(raw)
            }
            fn put(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
scalars!(u8 = 0, i8 = 1, u16 = 2, i16 = 3, u32 = 4, i32 = 5, f32 = 6, u64 = 10, i64 = 11, f64 = 12);

pub(crate) const BOOL_ID: u32 = 7;
pub(crate) const STRING_ID: u32 = 8;
pub(crate) const ARRAY_ID: u32 = 9;

/// Many strings in one buffer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StringArray {
    text: String,
    /// End of each string in `text`. u32: the header limit is far below 4 GiB.
    ends: Vec<u32>,
}

impl StringArray {
    /// Adds one string at the end.
    pub fn push(&mut self, s: &str) {
        self.text.push_str(s);
        self.ends.push(u32::try_from(self.text.len()).expect("a header is far below 4 GiB"));
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// String `i`, or `None` past the end.
    pub fn get(&self, i: usize) -> Option<&str> {
        let end = *self.ends.get(i)? as usize;
        let start = if i == 0 { 0 } else { self.ends[i - 1] as usize };
        Some(&self.text[start..end])
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|i| self.get(i).unwrap_or_default())
    }
}

impl<S: AsRef<str>> FromIterator<S> for StringArray {
    fn from_iter<I: IntoIterator<Item = S>>(iter: I) -> Self {
        let mut out = StringArray::default();
        for s in iter {
            out.push(s.as_ref());
        }
        out
    }
}

/// An array value.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    Str(StringArray),
}

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    U64(u64),
    I64(i64),
    F64(f64),
    Bool(bool),
    Str(String),
    Array(Array),
}

fn put_string(s: &str, out: &mut Vec<u8>) {
    (s.len() as u64).put(out);
    out.extend_from_slice(s.as_bytes());
}

fn put_array<T: Scalar>(values: &[T], out: &mut Vec<u8>) {
    T::TYPE_ID.put(out);
    (values.len() as u64).put(out);
    values.iter().for_each(|v| v.put(out));
}

fn put_scalar<T: Scalar>(value: T, out: &mut Vec<u8>) {
    T::TYPE_ID.put(out);
    value.put(out);
}

impl Array {
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::Str(v) => v.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Name of the type, for messages and listings.
    pub fn type_name(&self) -> &'static str {
        match self {
            Array::U8(_) => "an array of u8",
            Array::I8(_) => "an array of i8",
            Array::U16(_) => "an array of u16",
            Array::I16(_) => "an array of i16",
            Array::U32(_) => "an array of u32",
            Array::I32(_) => "an array of i32",
            Array::F32(_) => "an array of f32",
            Array::U64(_) => "an array of u64",
            Array::I64(_) => "an array of i64",
            Array::F64(_) => "an array of f64",
            Array::Bool(_) => "an array of bool",
            Array::Str(_) => "an array of strings",
        }
    }

    /// The elements as integers of the widest kind, or `None` if they are not integers.
    pub(crate) fn integers(&self) -> Option<Vec<i128>> {
        fn widen<T: Copy + Into<i128>>(v: &[T]) -> Option<Vec<i128>> {
            Some(v.iter().map(|&x| x.into()).collect())
        }
        match self {
            Array::U8(v) => widen(v),
            Array::I8(v) => widen(v),
            Array::U16(v) => widen(v),
            Array::I16(v) => widen(v),
            Array::U32(v) => widen(v),
            Array::I32(v) => widen(v),
            Array::U64(v) => widen(v),
            Array::I64(v) => widen(v),
            Array::F32(_) | Array::F64(_) | Array::Bool(_) | Array::Str(_) => None,
        }
    }

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Array::U8(v) => put_array(v, out),
            Array::I8(v) => put_array(v, out),
            Array::U16(v) => put_array(v, out),
            Array::I16(v) => put_array(v, out),
            Array::U32(v) => put_array(v, out),
            Array::I32(v) => put_array(v, out),
            Array::F32(v) => put_array(v, out),
            Array::U64(v) => put_array(v, out),
            Array::I64(v) => put_array(v, out),
            Array::F64(v) => put_array(v, out),
            Array::Bool(v) => {
                BOOL_ID.put(out);
                (v.len() as u64).put(out);
                out.extend(v.iter().map(|&b| u8::from(b)));
            }
            Array::Str(v) => {
                STRING_ID.put(out);
                (v.len() as u64).put(out);
                v.iter().for_each(|s| put_string(s, out));
            }
        }
    }
}

impl Value {
    /// Name of the type, for messages and listings.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::U8(_) => "u8",
            Value::I8(_) => "i8",
            Value::U16(_) => "u16",
            Value::I16(_) => "i16",
            Value::U32(_) => "u32",
            Value::I32(_) => "i32",
            Value::F32(_) => "f32",
            Value::U64(_) => "u64",
            Value::I64(_) => "i64",
            Value::F64(_) => "f64",
            Value::Bool(_) => "bool",
            Value::Str(_) => "a string",
            Value::Array(a) => a.type_name(),
        }
    }

    /// The value as an integer of the widest kind, or `None` if it is not an integer.
    pub(crate) fn integer(&self) -> Option<i128> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::I8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::I16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::I32(v) => Some(v.into()),
            Value::U64(v) => Some(v.into()),
            Value::I64(v) => Some(v.into()),
            Value::F32(_) | Value::F64(_) | Value::Bool(_) | Value::Str(_) | Value::Array(_) => None,
        }
    }

    /// Appends type number and bytes.
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        match self {
            Value::U8(v) => put_scalar(*v, out),
            Value::I8(v) => put_scalar(*v, out),
            Value::U16(v) => put_scalar(*v, out),
            Value::I16(v) => put_scalar(*v, out),
            Value::U32(v) => put_scalar(*v, out),
            Value::I32(v) => put_scalar(*v, out),
            Value::F32(v) => put_scalar(*v, out),
            Value::U64(v) => put_scalar(*v, out),
            Value::I64(v) => put_scalar(*v, out),
            Value::F64(v) => put_scalar(*v, out),
            Value::Bool(v) => {
                BOOL_ID.put(out);
                out.push(u8::from(*v));
            }
            Value::Str(v) => {
                STRING_ID.put(out);
                put_string(v, out);
            }
            Value::Array(v) => {
                ARRAY_ID.put(out);
                v.put(out);
            }
        }
    }
}

/// Appends a key or a tensor name.
pub(crate) fn put_name(name: &str, out: &mut Vec<u8>) {
    put_string(name, out);
}

macro_rules! into_value {
    ($($from:ty => $variant:ident),* $(,)?) => {$(
        impl From<$from> for Value {
            fn from(v: $from) -> Self {
                Value::$variant(v.into())
            }
        }
    )*};
}
into_value!(u32 => U32, u64 => U64, i32 => I32, f32 => F32, bool => Bool, &str => Str, String => Str, Array => Array);

macro_rules! into_array {
    ($($from:ty => $variant:ident),* $(,)?) => {$(
        impl From<$from> for Value {
            fn from(v: $from) -> Self {
                Value::Array(Array::$variant(v))
            }
        }
    )*};
}
into_array!(Vec<u32> => U32, Vec<i32> => I32, Vec<u64> => U64, Vec<f32> => F32, StringArray => Str);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_string_array_returns_what_was_pushed() {
        let words = ["", "a", "", "bcd", "\u{2581}"];
        let array: StringArray = words.iter().collect();
        assert_eq!(array.len(), words.len());
        assert_eq!(array.iter().collect::<Vec<_>>(), words);
        assert_eq!(array.get(words.len()), None);
        assert!(StringArray::default().is_empty());
    }
}
