//! Every op of the CUDA backend against its CPU twin on fresh random inputs, as a table: op, shape, error, limit, time, bandwidth.
//! Never passes by leaving something out: an op of the trait without a case fails, with or without a GPU.
//! Surprising fact: this is a plain program, so that it can be carried to a machine that has a GPU and no compiler.
//!
//! `cuda_ops [--seed N] [--repeat N] [--only OP] [--token] [--bytes-max N] [--text]`; `--token` leaves out what is not an op of a single row,
//! `--text` compiles the kernels with NVRTC.

#[cfg(feature = "cuda")]
mod attending;
#[cfg(feature = "cuda")]
mod beside;
#[cfg(feature = "cuda")]
mod case;
#[cfg(feature = "cuda")]
mod ends;
#[cfg(feature = "cuda")]
mod grids;
mod in_place;
#[cfg(feature = "cuda")]
#[path = "../kernels_common/mod.rs"]
mod kernels_common;
#[cfg(feature = "cuda")]
mod products;
#[cfg(feature = "cuda")]
mod rows;
#[cfg(feature = "cuda")]
mod selection;
#[cfg(feature = "cuda")]
mod slots;
#[cfg(feature = "cuda")]
mod swept;

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("cuda_ops: built without the feature cuda, nothing to check");
}

#[cfg(feature = "cuda")]
fn main() -> std::process::ExitCode {
    match case::run_all() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(failures) => {
            eprintln!("cuda_ops: {failures}");
            std::process::ExitCode::FAILURE
        }
    }
}
