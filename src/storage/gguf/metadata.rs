//! The metadata of a file: keys in file order, with getters that name the key in their errors.
//! Owns lookup and conversion; never knows which keys an architecture needs.
//! Surprising fact: integer getters take any integer type that fits, because converters disagree about widths.

use std::collections::HashMap;

use super::error::MetadataError;
use super::value::{Array, StringArray, Value};

/// Ordered map of metadata.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

fn range_error(key: &str, value: impl ToString, expected: &'static str) -> MetadataError {
    MetadataError::Range { key: key.into(), value: value.to_string(), expected }
}

impl Metadata {
    /// An empty map.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a key at the end, or replaces the value of a key in its place; says whether the key was new.
    pub fn insert(&mut self, key: impl Into<String>, value: impl Into<Value>) -> bool {
        let (key, value) = (key.into(), value.into());
        if let Some(&i) = self.index.get(&key) {
            self.entries[i].1 = value;
            return false;
        }
        self.index.insert(key.clone(), self.entries.len());
        self.entries.push((key, value));
        true
    }

    /// Removes a key; says whether it was there.
    pub fn remove(&mut self, key: &str) -> bool {
        let Some(i) = self.index.remove(key) else { return false };
        self.entries.remove(i);
        for position in self.index.values_mut().filter(|p| **p > i) {
            *position -= 1;
        }
        true
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Keys and values in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(k, v)| (k.as_str(), v))
    }

    pub fn contains(&self, key: &str) -> bool {
        self.index.contains_key(key)
    }

    /// The value of `key`, if present.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&i| &self.entries[i].1)
    }

    /// The value of `key`.
    ///
    /// # Errors
    /// `Missing`.
    pub fn require(&self, key: &str) -> Result<&Value, MetadataError> {
        self.get(key).ok_or_else(|| MetadataError::Missing { key: key.into() })
    }

    fn wrong_type<T>(&self, key: &str, expected: &'static str, found: &Value) -> Result<T, MetadataError> {
        Err(MetadataError::Type { key: key.into(), expected, found: found.type_name() })
    }

    fn integer<T: TryFrom<i128>>(&self, key: &str, expected: &'static str) -> Result<T, MetadataError> {
        let value = self.require(key)?;
        let Some(wide) = value.integer() else { return self.wrong_type(key, expected, value) };
        T::try_from(wide).map_err(|_| range_error(key, wide, expected))
    }

    fn integers<T: TryFrom<i128>>(&self, key: &str, expected: &'static str) -> Result<Vec<T>, MetadataError> {
        let value = self.require(key)?;
        let Value::Array(array) = value else { return self.wrong_type(key, expected, value) };
        // An empty array has no type worth insisting on.
        if array.is_empty() {
            return Ok(Vec::new());
        }
        let Some(wide) = array.integers() else { return self.wrong_type(key, expected, value) };
        wide.into_iter().map(|v| T::try_from(v).map_err(|_| range_error(key, v, expected))).collect()
    }

    /// An integer from any integer type.
    ///
    /// # Errors
    /// `Missing`, `Type`, `Range`.
    pub fn u32(&self, key: &str) -> Result<u32, MetadataError> {
        self.integer(key, "u32")
    }

    /// As [`Metadata::u32`].
    pub fn u64(&self, key: &str) -> Result<u64, MetadataError> {
        self.integer(key, "u64")
    }

    /// A float; an f64 is rounded to f32 and must stay finite.
    ///
    /// # Errors
    /// `Missing`, `Type`, `Range`.
    pub fn f32(&self, key: &str) -> Result<f32, MetadataError> {
        match self.require(key)? {
            Value::F32(v) => Ok(*v),
            Value::F64(v) if (*v as f32).is_finite() => Ok(*v as f32),
            Value::F64(v) => Err(range_error(key, v, "f32")),
            other => self.wrong_type(key, "f32", other),
        }
    }

    /// # Errors
    /// `Missing`, `Type`.
    pub fn bool(&self, key: &str) -> Result<bool, MetadataError> {
        match self.require(key)? {
            Value::Bool(v) => Ok(*v),
            other => self.wrong_type(key, "bool", other),
        }
    }

    /// # Errors
    /// `Missing`, `Type`.
    pub fn str(&self, key: &str) -> Result<&str, MetadataError> {
        match self.require(key)? {
            Value::Str(v) => Ok(v),
            other => self.wrong_type(key, "a string", other),
        }
    }

    /// The elements of any integer array.
    ///
    /// # Errors
    /// `Missing`, `Type`, `Range`.
    pub fn u32_array(&self, key: &str) -> Result<Vec<u32>, MetadataError> {
        self.integers(key, "an array of u32")
    }

    /// As [`Metadata::u32_array`].
    pub fn u64_array(&self, key: &str) -> Result<Vec<u64>, MetadataError> {
        self.integers(key, "an array of u64")
    }

    /// As [`Metadata::u32_array`].
    pub fn i32_array(&self, key: &str) -> Result<Vec<i32>, MetadataError> {
        self.integers(key, "an array of i32")
    }

    /// # Errors
    /// `Missing`, `Type`.
    pub fn f32_array(&self, key: &str) -> Result<&[f32], MetadataError> {
        match self.require(key)? {
            Value::Array(Array::F32(v)) => Ok(v),
            other => self.wrong_type(key, "an array of f32", other),
        }
    }

    /// # Errors
    /// `Missing`, `Type`.
    pub fn str_array(&self, key: &str) -> Result<&StringArray, MetadataError> {
        match self.require(key)? {
            Value::Array(Array::Str(v)) => Ok(v),
            other => self.wrong_type(key, "an array of strings", other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Metadata {
        let mut m = Metadata::new();
        m.insert("a.u32", 7u32);
        m.insert("a.i32", -1i32);
        m.insert("a.u64", u64::MAX);
        m.insert("a.f32", 0.5f32);
        m.insert("a.f64", Value::F64(1e300));
        m.insert("a.bool", true);
        m.insert("a.str", "text");
        m.insert("a.array", vec![1i32, 2]);
        m.insert("a.negative", vec![1i32, -2]);
        m.insert("a.strings", ["x", "y"].iter().collect::<StringArray>());
        m.insert("a.empty", Vec::<f32>::new());
        m
    }

    #[test]
    fn getters_return_what_fits() {
        let m = sample();
        assert_eq!(m.u32("a.u32"), Ok(7));
        assert_eq!(m.u64("a.u64"), Ok(u64::MAX));
        assert_eq!(m.f32("a.f32"), Ok(0.5));
        assert_eq!(m.bool("a.bool"), Ok(true));
        assert_eq!(m.str("a.str"), Ok("text"));
        assert_eq!(m.u32_array("a.array"), Ok(vec![1, 2]));
        assert_eq!(m.u64_array("a.array"), Ok(vec![1, 2]));
        assert_eq!(m.u32_array("a.empty"), Ok(vec![]));
        assert_eq!(m.str_array("a.strings").map(|s| s.get(1).map(str::to_owned)), Ok(Some("y".into())));
    }

    #[test]
    fn errors_name_the_key() {
        let m = sample();
        let check = |error: Result<(), MetadataError>, text: &str| assert_eq!(error.unwrap_err().to_string(), text);
        check(m.u32("b").map(drop), "metadata key b is missing");
        check(m.u32("a.i32").map(drop), "metadata key a.i32: -1 does not fit u32");
        check(m.u32("a.u64").map(drop), "metadata key a.u64: 18446744073709551615 does not fit u32");
        check(m.u32("a.f32").map(drop), "metadata key a.f32 is f32, expected u32");
        check(m.f32("a.u32").map(drop), "metadata key a.u32 is u32, expected f32");
        check(m.bool("a.u32").map(drop), "metadata key a.u32 is u32, expected bool");
        check(m.str("a.array").map(drop), "metadata key a.array is an array of i32, expected a string");
        check(m.u32_array("a.negative").map(drop), "metadata key a.negative: -2 does not fit an array of u32");
        check(
            m.u32_array("a.strings").map(drop),
            "metadata key a.strings is an array of strings, expected an array of u32",
        );
        check(m.str_array("a.str").map(drop), "metadata key a.str is a string, expected an array of strings");
        assert!(matches!(m.f32("a.f64"), Err(MetadataError::Range { .. })));
    }

    #[test]
    fn removal_keeps_the_order_and_the_index() {
        let mut m = sample();
        assert!(m.remove("a.f32") && !m.remove("a.f32"));
        assert_eq!(m.bool("a.bool"), Ok(true));
        assert_eq!(m.iter().nth(3).map(|(k, _)| k), Some("a.f64"));
        assert!(!m.insert("a.u32", 8u32));
        assert_eq!(m.iter().next().map(|(k, v)| (k, v.clone())), Some(("a.u32", Value::U32(8))));
    }
}
