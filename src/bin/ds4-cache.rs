//! `ds4-cache`: answers what an expert cache of which size and policy is worth. Owns nothing; never computes.
//! Surprising fact: all of it is in `cli::cache_tool`, so that tests can reach it.

fn main() -> std::process::ExitCode {
    ds4::cli::start::start("ds4-cache", ds4::cli::cache_tool::main)
}
