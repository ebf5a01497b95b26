//! The front end: flags, the interactive session, progress, the closing report.
//! Never computes and never reads a model file itself; `session` and `engine` do.

pub mod args;
pub mod gguf;
pub mod interrupt;
pub mod progress;
pub mod repl_command;
