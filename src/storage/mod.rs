//! Files and what is cached of them: GGUF, resident weights, row tables, expert cache, readers.
//! Never imports `backend` or `models`: it fills memory that others lend it.

pub mod checksum;
pub mod convert;
pub mod expert_cache;
pub mod gguf;
pub mod identity;
pub mod layout;
pub mod part_file;
pub mod probe;
pub mod reader;
pub mod row_table;
pub mod synth;
pub mod verify;
pub mod weights;
