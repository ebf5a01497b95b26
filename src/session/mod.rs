//! One conversation with one model: the timeline, the sampler, stop rules, generation.
//! Never parses flags and never prints. Surprising fact: everything here is the same for every architecture.

pub mod checkpoint;
pub mod consistency;
pub mod generate;
pub mod images;
pub mod importance;
pub mod perplexity;
pub mod prompt;
pub mod sampler;
pub mod stop;
pub mod timeline;
