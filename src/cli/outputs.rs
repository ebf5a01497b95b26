//! Keeps what a run writes apart from what it reads: no output may be the model, an input, or another output.
//! Never opens a file. Surprising fact: names do not tell, since links and dots give one file many; device and inode do, and for a file that
//! is yet to be made the folder it will be in.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::cli::CliError;

/// Which file a name stands for.
#[derive(PartialEq, Eq)]
enum Which {
    There { device: u64, inode: u64 },
    ToBeMade { device: u64, folder: u64, name: OsString },
}

/// `None` for what holds no content to lose: devices, pipes, names that lead nowhere.
fn which(path: &Path) -> Option<Which> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => Some(Which::There { device: found.dev(), inode: found.ino() }),
        Ok(_) => None,
        Err(_) => {
            let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let found = std::fs::metadata(folder).ok()?;
            Some(Which::ToBeMade { device: found.dev(), folder: found.ino(), name: path.file_name()?.into() })
        }
    }
}

/// A file and the flag, or the word, that names it.
pub type Named<'a> = (&'a str, Option<&'a Path>);

/// Flags that may name one file: what a run goes on from it may replace.
const ONE_FILE: [(&str, &str); 2] = [("--load-session", "--save-session"), ("--hotlist", "--save-hotlist")];

/// Refuses an output that is one of the inputs or another output.
///
/// # Errors
/// `Usage`, naming both.
pub fn keep_apart(inputs: &[Named<'_>], outputs: &[Named<'_>]) -> Result<(), CliError> {
    let found = |files: &[Named<'_>]| -> Vec<(String, Option<Which>)> {
        files.iter().map(|(flag, path)| (flag.to_string(), path.and_then(which))).collect()
    };
    let (inputs, outputs_found) = (found(inputs), found(outputs));
    for (at, (flag, file)) in outputs_found.iter().enumerate() {
        let Some(file) = file else { continue };
        let others = inputs.iter().chain(&outputs_found[..at]);
        let is_same = |(_, other): &&(String, Option<Which>)| other.as_ref() == Some(file);
        let is_meant = |other: &str| ONE_FILE.contains(&(other, flag));
        if let Some((other, _)) = others.filter(is_same).find(|(other, _)| !is_meant(other)) {
            let path = outputs[at].1.expect("it was found").display();
            return Err(CliError::usage(format!("{flag}: {path} is the file of {other}, too; name another")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_dots_and_files_to_be_made_are_seen_through() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("m.gguf");
        std::fs::write(&model, "x").unwrap();
        let (link, hard, dots) =
            (folder.path().join("link"), folder.path().join("hard"), folder.path().join("./m.gguf"));
        std::os::unix::fs::symlink(&model, &link).unwrap();
        std::fs::hard_link(&model, &hard).unwrap();
        for path in [&link, &hard, &dots] {
            let error = keep_apart(&[("-m", Some(&model))], &[("--csv", Some(path))]).unwrap_err();
            assert!(
                matches!(&error, CliError::Usage(text) if text.contains("--csv") && text.contains("-m")),
                "{error}"
            );
        }
        let (new, same) =
            (folder.path().join("new"), folder.path().join("../").join(folder.path().file_name().unwrap()).join("new"));
        assert!(keep_apart(&[], &[("--a", Some(&new)), ("--b", Some(&same))]).is_err());
        assert!(keep_apart(&[("-m", Some(&model))], &[("--a", Some(&new)), ("--b", None)]).is_ok());
        let null = Path::new("/dev/null");
        assert!(keep_apart(&[], &[("--a", Some(null)), ("--b", Some(null))]).is_ok());
        assert!(keep_apart(&[("--load-session", Some(&model))], &[("--save-session", Some(&model))]).is_ok());
        assert!(keep_apart(&[("--hotlist", Some(&model))], &[("--save-session", Some(&model))]).is_err());
    }
}
