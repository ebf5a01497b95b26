//! `ds4-gguf`: inspects, converts, re-quantises and compares GGUF files. Owns nothing; never computes.
//! Surprising fact: all of it is in `cli::gguf`, so that tests can reach it.

fn main() -> std::process::ExitCode {
    ds4::cli::start::start("ds4-gguf", ds4::cli::gguf::main)
}
