//! Parts of a forward pass that several architectures share: the order of its steps, routed experts and the sweeps that read each of them
//! once, hyper-connections, rotary tables, the runner of a sequence, prompts. Never knows an architecture: what differs comes in as sizes,
//! weights or the traits of `architecture`.
//! Surprising fact: the buffers of a part are declared beside it, and the planner's number comes from the same list.

pub mod ahead;
pub mod architecture;
pub mod attention;
pub mod backbone;
mod buffers;
pub mod dsml;
pub mod dsml_answer;
pub mod grouping;
pub mod guess;
pub mod head;
pub mod hyper_connections;
pub mod indexer;
pub mod layer_tensors;
pub mod matrices;
pub mod moe;
pub mod pass;
pub mod probing;
pub mod ring;
pub mod rotary;
pub mod runner;
pub mod saved;
pub mod spans;
pub mod suffix;
pub mod sweep;
pub mod sweep_rows;
pub mod workspace;

pub(crate) use buffers::buffers;
