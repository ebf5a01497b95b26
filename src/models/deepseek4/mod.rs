//! DeepSeek V4 text models (Flash, PRO and their siblings). Each file names the section of the specification deepseek-v4 that it implements:
//! `config` 1; `weights` 2; `pass` 3.2, 3.6; `attention` 3.5; `compressor` 3.7; `indexer` 3.8; `token_experts` 2.6, 3.9; `head` 3.13; `kv`,
//! `snapshot` 4. `architecture` says which file does which step; the order of the steps (3.1, 3.14), sweeps (3.15) and experts (3.10 to 3.12)
//! are in `models::blocks`.
//! Never rounds activations: only what is cached is rounded (3.6), and that rounding is part of the model. Surprising fact: the first layers'
//! experts follow from token ids alone, so they can be read as soon as a token is chosen.

mod architecture;
mod attention;
pub mod chat;
mod compressor;
mod config;
mod head;
mod indexer;
mod kv;
mod matrix_inputs;
mod pass;
mod snapshot;
mod token_experts;
mod weights;
mod workspace;

pub use architecture::DeepSeek4;
pub use config::{ARCH, Config, LayerPlan};
