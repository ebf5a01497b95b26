//! Which file system a path lies on, as /proc/self/mountinfo tells it. Owns the parser; never mounts anything.
//! Surprising fact: the last of several mounts on one point is the one that is seen, so later lines win over equal ones.

use std::path::{Path, PathBuf};

/// One mounted file system.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mount {
    pub at: PathBuf,
    /// Such as "ext4".
    pub kind: String,
    /// Such as "/dev/nvme0n1p2".
    pub source: String,
}

/// The mount that holds `path`; `None` where /proc does not tell.
pub fn mount_of(path: &Path) -> Option<Mount> {
    let path = std::fs::canonicalize(path).ok()?;
    let text = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    mount_in(&text, &path)
}

/// The same over a given text and an absolute path.
pub fn mount_in(text: &str, path: &Path) -> Option<Mount> {
    let mounts = text.lines().filter_map(parse).filter(|mount| path.starts_with(&mount.at));
    // `max_by_key` takes the last of equals.
    mounts.max_by_key(|mount| mount.at.as_os_str().len())
}

/// `36 35 98:0 /root /point rw,noatime master:1 - ext4 /dev/root rw`
fn parse(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let at = left.split(' ').nth(4)?;
    let mut right = right.split(' ');
    let (kind, source) = (right.next()?.to_owned(), right.next()?.to_owned());
    (!kind.is_empty() && at.starts_with('/')).then(|| Mount {
        at: unescape(at).into(),
        kind,
        source: unescape(&source),
    })
}

/// Undoes the octal escapes of blanks.
fn unescape(text: &str) -> String {
    ["\\040", "\\011", "\\012", "\\134"]
        .iter()
        .zip([" ", "\t", "\n", "\\"])
        .fold(text.to_owned(), |text, (code, sign)| text.replace(code, sign))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n\
        2 1 8:2 / /data rw shared:1 - xfs /dev/sdb rw\n\
        3 2 0:9 / /data/my\\040models rw - nfs server:/m rw\n\
        4 1 8:3 / /data rw - btrfs /dev/sdc rw\n\
        broken\n5 1 8:3 / relative rw - x y z\n";

    #[test]
    fn the_deepest_and_latest_mount_wins() {
        let kind = |path: &str| mount_in(TEXT, Path::new(path)).unwrap().kind;
        assert_eq!(kind("/etc/passwd"), "ext4");
        assert_eq!(kind("/data/a"), "btrfs");
        assert_eq!(kind("/data/my models/m.gguf"), "nfs");
        assert_eq!(kind("/database"), "ext4");
        assert_eq!(mount_in("", Path::new("/")), None);
    }

    #[test]
    fn this_file_lies_somewhere() {
        let mount = mount_of(Path::new(env!("CARGO_MANIFEST_DIR")));
        assert!(mount.is_some_and(|m| !m.kind.is_empty()));
        assert_eq!(mount_of(Path::new("/no/such/file")), None);
    }
}
