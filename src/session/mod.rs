//! One conversation in progress: how tokens are chosen and when an answer ends.
//! Never touches files or devices. Surprising fact: nothing here depends on how fast experts arrive, so neither does the text.

pub mod sampler;
pub mod stop;
