//! How a model reads the metadata of its file, and why it may refuse it.
//! Never learns the file format: the engine adapts what it has parsed. Surprising fact: every refusal names the key,
//! because that is what somebody who made the file with another tool can look up.

/// One metadata value.
#[derive(Clone, PartialEq, Debug)]
pub enum MetaValue<'a> {
    Uint(u64),
    Float(f32),
    Bool(bool),
    Text(&'a str),
    Uints(Vec<u64>),
    Floats(Vec<f32>),
    /// This many strings.
    Texts(usize),
    /// Anything else, by the name of its type.
    Other(&'static str),
}

impl MetaValue<'_> {
    fn kind(&self) -> &'static str {
        match self {
            Self::Uint(_) => "an unsigned integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a bool",
            Self::Text(_) => "a string",
            Self::Uints(_) => "an array of unsigned integers",
            Self::Floats(_) => "an array of floats",
            Self::Texts(_) => "an array of strings",
            Self::Other(kind) => kind,
        }
    }
}

/// Read access to the metadata of a model file.
pub trait MetadataView {
    /// The value of `key`, if present.
    fn get(&self, key: &str) -> Option<MetaValue<'_>>;
}

/// Why the metadata of a file cannot be used.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ConfigError {
    #[error("the file has no metadata key {key}; convert it again with ds4-gguf convert")]
    Missing { key: String },
    #[error("metadata key {key} is {found}, expected {expected}; convert the file again with ds4-gguf convert")]
    WrongType { key: String, expected: &'static str, found: &'static str },
    #[error("metadata key {key} is {value}: {reason}")]
    Unusable { key: String, value: String, reason: String },
    #[error(
        "metadata key {key} belongs to another dialect ({dialect}) of this architecture; \
             convert the original checkpoint with ds4-gguf convert"
    )]
    Dialect { key: String, dialect: &'static str },
    #[error("architecture {arch} is not supported; this build runs {supported}")]
    Architecture { arch: String, supported: String },
}

impl ConfigError {
    /// A value that contradicts another one or the model.
    pub fn unusable(key: &str, value: impl std::fmt::Debug, reason: impl Into<String>) -> Self {
        Self::Unusable { key: key.into(), value: format!("{value:?}"), reason: reason.into() }
    }
}

/// Typed getters under one prefix.
pub struct Keys<'a> {
    view: &'a dyn MetadataView,
    prefix: &'static str,
}

impl<'a> Keys<'a> {
    /// Keys are `prefix` + `.` + name.
    pub fn new(view: &'a dyn MetadataView, prefix: &'static str) -> Self {
        Self { view, prefix }
    }

    /// The full key of `name`.
    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    /// The value of `name`, if present.
    pub fn get(&self, name: &str) -> Option<MetaValue<'a>> {
        self.view.get(&self.key(name))
    }

    fn require(&self, name: &str) -> Result<MetaValue<'a>, ConfigError> {
        self.get(name).ok_or_else(|| ConfigError::Missing { key: self.key(name) })
    }

    fn wrong<T>(&self, name: &str, expected: &'static str, found: &MetaValue<'_>) -> Result<T, ConfigError> {
        Err(ConfigError::WrongType { key: self.key(name), expected, found: found.kind() })
    }

    /// An integer in `min..=max`.
    pub fn uint(&self, name: &str, min: u64, max: u64) -> Result<usize, ConfigError> {
        match self.require(name)? {
            MetaValue::Uint(v) if (min..=max).contains(&v) => Ok(v as usize),
            MetaValue::Uint(v) => {
                Err(ConfigError::unusable(&self.key(name), v, format!("must be between {min} and {max}")))
            }
            other => self.wrong(name, "an unsigned integer", &other),
        }
    }

    /// A finite float; integers are taken as floats.
    pub fn float(&self, name: &str) -> Result<f32, ConfigError> {
        match self.require(name)? {
            MetaValue::Float(v) if v.is_finite() => Ok(v),
            MetaValue::Float(v) => Err(ConfigError::unusable(&self.key(name), v, "must be finite")),
            MetaValue::Uint(v) => Ok(v as f32),
            other => self.wrong(name, "a float", &other),
        }
    }

    /// As `uint`, with a value for files that lack the key.
    pub fn uint_or(&self, name: &str, min: u64, max: u64, default: usize) -> Result<usize, ConfigError> {
        if self.get(name).is_some() { self.uint(name, min, max) } else { Ok(default) }
    }

    /// As `positive`, with a value for files that lack the key.
    pub fn positive_or(&self, name: &str, default: f32) -> Result<f32, ConfigError> {
        if self.get(name).is_some() { self.positive(name) } else { Ok(default) }
    }

    /// One float for each of `count` layers, none of them NaN: an array that is long enough, or one value for all.
    pub fn floats_by_layer(&self, name: &str, count: usize) -> Result<Vec<f32>, ConfigError> {
        let values = match self.require(name)? {
            MetaValue::Floats(values) => values,
            MetaValue::Uints(values) => values.into_iter().map(|v| v as f32).collect(),
            MetaValue::Float(v) => vec![v; count],
            MetaValue::Uint(v) => vec![v as f32; count],
            other => return self.wrong(name, "a float or an array of floats", &other),
        };
        if values.len() < count || values.iter().any(|v| v.is_nan()) {
            let reason = format!("one number is needed for each of {count} layers");
            return Err(ConfigError::unusable(&self.key(name), values, reason));
        }
        Ok(values[..count].to_vec())
    }

    /// A finite float above zero.
    pub fn positive(&self, name: &str) -> Result<f32, ConfigError> {
        match self.float(name)? {
            v if v > 0.0 => Ok(v),
            v => Err(ConfigError::unusable(&self.key(name), v, "must be above zero")),
        }
    }

    /// Refuses the first of `rules` (whether it holds, name, value, reason) that does not hold.
    pub fn expect(&self, rules: &[(bool, &str, usize, &str)]) -> Result<(), ConfigError> {
        match rules.iter().find(|(holds, ..)| !holds) {
            Some((_, name, value, reason)) => Err(ConfigError::unusable(&self.key(name), value, *reason)),
            None => Ok(()),
        }
    }

    /// A bool.
    pub fn bool(&self, name: &str) -> Result<bool, ConfigError> {
        match self.require(name)? {
            MetaValue::Bool(v) => Ok(v),
            other => self.wrong(name, "a bool", &other),
        }
    }

    /// A string.
    pub fn text(&self, name: &str) -> Result<&'a str, ConfigError> {
        match self.require(name)? {
            MetaValue::Text(v) => Ok(v),
            other => self.wrong(name, "a string", &other),
        }
    }

    /// An array of integers.
    pub fn uints(&self, name: &str) -> Result<Vec<u64>, ConfigError> {
        match self.require(name)? {
            MetaValue::Uints(v) => Ok(v),
            other => self.wrong(name, "an array of unsigned integers", &other),
        }
    }

    /// Refuses a string key, where present, that is not `expected`.
    pub fn expect_text(&self, name: &str, expected: &str) -> Result<(), ConfigError> {
        match self.get(name) {
            None => Ok(()),
            Some(MetaValue::Text(v)) if v == expected => Ok(()),
            Some(MetaValue::Text(v)) => {
                Err(ConfigError::unusable(&self.key(name), v, format!("only {expected} is known")))
            }
            Some(other) => self.wrong(name, "a string", &other),
        }
    }
}
