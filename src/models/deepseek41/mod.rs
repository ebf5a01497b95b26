//! DeepSeek V4.1: see the spec section named at the top of each file.
pub mod chat;
