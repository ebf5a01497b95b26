//! `ds4-bench`: measures prefill, appends and generation against context length and cache budget. Owns nothing; never computes.
//! Surprising fact: all of it is in `cli::bench`, so that tests can reach it.

fn main() -> std::process::ExitCode {
    ds4::cli::start::start("ds4-bench", ds4::cli::bench::main)
}
