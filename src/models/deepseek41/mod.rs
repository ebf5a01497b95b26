//! DeepSeek V4.1 text models. Each file names the section of the specification that it implements: `config` 1.1, 1.3;
//! `schedule` 1.2; `weights` 2; `pass` 3.1; `hyper_connections` 3.2, 3.3; `attention` 3.4, 3.5, 3.8; `compressor` 3.6;
//! `indexer` 3.7; `head` 3.11; `sweep` 3.13; `engram`, `row_feed` 4; `kv`, `snapshot` 5. `architecture` says which file does which step. The
//! order of the steps (3.3), experts (3.9, 7.4), sweeps and the rows that they may leave out (3.13) and other parts that are not of this
//! architecture alone are in `models::blocks`.
//! Never rounds activations to BF16 (spec 3.12 lists where the published code does): they stay F32, as in the golden
//! values. Surprising fact: only what is cached is rounded (spec 3.10), and that rounding is part of the model.

mod architecture;
mod attention;
pub mod chat;
mod compressor;
mod config;
mod engram;
mod head;
mod hyper_connections;
mod indexer;
mod kv;
mod matrix_inputs;
mod pass;
mod row_feed;
mod schedule;
mod snapshot;
mod sweep;
mod weights;
mod workspace;

pub use architecture::DeepSeek41;
pub use config::{ARCH, Config, EngramConfig};
pub use schedule::LayerPlan;
