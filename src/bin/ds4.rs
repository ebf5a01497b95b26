//! `ds4`: answers from a model that may be far larger than memory. Owns nothing; never computes.
//! Surprising fact: all of it is in `cli`, so that tests can reach it.

fn main() -> std::process::ExitCode {
    ds4::cli::start::start("ds4", ds4::cli::main)
}
