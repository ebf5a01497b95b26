//! `ds4-gguf checksum`: writes the sidecar that `ds4 --verify-reads` compares with.
//! Owns the flags; never hashes itself. Surprising fact: the sums are of the file as it is now, so a file that is damaged already gets sums
//! that fit its damage; compare the download's own hash first.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::{listen, note, open, step};
use crate::cli::CliError;
use crate::cli::outputs::keep_apart;
use crate::cli::progress::{Meter, Unit};
use crate::storage::checksum::{ChecksumError, Checksums, sidecar_path};
use crate::storage::layout::Layout;
use crate::units::Bytes;

/// Flags of `ds4-gguf checksum`.
#[derive(Args, Debug)]
pub(super) struct ChecksumArgs {
    /// Model file (GGUF)
    file: PathBuf,
    /// File to write [default: FILE.ds4sum, where ds4 --verify-reads looks]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replace an existing output
    #[arg(long)]
    force: bool,
}

/// Runs the command.
///
/// # Errors
/// An output that exists, an unreadable model, a full drive, an interruption; the output is untouched then.
pub(super) fn run(args: &ChecksumArgs) -> Result<ExitCode, CliError> {
    let output = args.output.clone().unwrap_or_else(|| sidecar_path(&args.file));
    keep_apart(&[("the model", Some(&args.file))], &[("-o", Some(&output))])?;
    if !args.force && output.symlink_metadata().is_ok() {
        // Before hours of reads, not after.
        return Err(CliError::failed(ChecksumError::Exists { path: output }));
    }
    let file = open(&args.file)?;
    let layout = Layout::from_gguf(&file).map_err(|e| CliError::Failed(format!("{}: {e}", args.file.display())))?;
    let interrupt = listen()?;
    let mut meter = Meter::new("checksum", Unit::Bytes);
    let sums = Checksums::of_model(&file, &layout, &mut |done, total| step(&mut meter, &interrupt, done, total))
        .map_err(CliError::failed)?;
    drop(meter);
    let bytes = sums.write(&file, &layout, &output, args.force).map_err(CliError::failed)?;
    let experts: u64 = layout.experts.iter().map(|l| u64::from(l.experts)).sum();
    note(&format!(
        "wrote {}: {} for {experts} experts ({}) and {} of n-gram rows",
        output.display(),
        Bytes(bytes),
        layout.expert_bytes_total(),
        layout.table_bytes_total()
    ));
    Ok(ExitCode::SUCCESS)
}
