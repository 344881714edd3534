//! Whether a configuration's files have changed: the file itself, and those that its secrets name.
//!
//! They are looked at now and then. That also notices the symlink swap by which Kubernetes updates a mounted volume, on
//! which a watch of the file itself stays silent.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// The first 48 bits of the SHA-256 of a file, which a metric can have exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileHash(u64);

impl FileHash {
    pub fn of(text: &[u8]) -> Self {
        let digest = Sha256::digest(text);
        let bytes = digest.iter().take(6);
        Self(bytes.fold(0, |hash, byte| hash << 8 | u64::from(*byte)))
    }

    pub fn number(self) -> u64 {
        self.0
    }

    /// The hash in hexadecimal: the first twelve digits that `sha256sum` prints.
    pub fn hex(self) -> String {
        format!("{:012x}", self.0)
    }
}

/// What a file is, as far as that can be seen without reading it. `None`: it cannot be seen at all.
pub(super) type Signature = Option<(u64, u64, i64, i64, u64)>;

/// What was seen of some files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WatchedFiles {
    paths: Vec<PathBuf>,
    signatures: Vec<Signature>,
    contents: Vec<Option<FileHash>>,
}

impl WatchedFiles {
    /// Reads files that may have changed since they were used: their contents are known, when that was is not.
    pub fn new(contents: impl IntoIterator<Item = (PathBuf, FileHash)>) -> Self {
        let (paths, contents): (Vec<_>, Vec<_>) = contents
            .into_iter()
            .map(|(path, hash)| (path, Some(hash)))
            .unzip();
        Self {
            signatures: Vec::new(),
            paths,
            contents,
        }
    }

    /// Looks at the files, and reads those that may have changed. True if the content of one has.
    pub fn have_changed(&mut self) -> bool {
        let signatures: Vec<Signature> = self.paths.iter().map(|path| signature(path)).collect();
        if signatures == self.signatures {
            return false;
        }
        let contents: Vec<_> = self.paths.iter().map(|path| content(path)).collect();
        self.signatures = signatures;
        let has_changed = contents != self.contents;
        self.contents = contents;
        has_changed
    }
}

pub(super) fn signature(path: &Path) -> Signature {
    let seen = std::fs::metadata(path).ok()?;
    Some((
        seen.dev(),
        seen.ino(),
        seen.mtime(),
        seen.mtime_nsec(),
        seen.len(),
    ))
}

fn content(path: &Path) -> Option<FileHash> {
    std::fs::read(path).ok().map(|text| FileHash::of(&text))
}

/// Whether a setting names a file or folder that is not there.
pub(super) fn is_missing(path: &str) -> bool {
    !path.is_empty() && Path::new(path).try_exists().is_ok_and(|exists| !exists)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;

    struct Folder(TempDir);

    impl Folder {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn watched(&self, content: &str) -> WatchedFiles {
            let path = self.0.path().join("config.yaml");
            WatchedFiles::new([(path, FileHash::of(content.as_bytes()))])
        }
    }

    #[test]
    fn a_file_has_changed_once_its_content_has() {
        let folder = Folder::new();
        let path = folder.0.path().join("config.yaml");
        fs::write(&path, "a").unwrap();
        let mut files = folder.watched("a");
        assert!(!files.have_changed());
        // Touched, or written again as it was.
        fs::remove_file(&path).unwrap();
        fs::write(&path, "a").unwrap();
        assert!(!files.have_changed());
        fs::write(&path, "ab").unwrap();
        assert!(files.have_changed());
        assert!(!files.have_changed());
        fs::remove_file(&path).unwrap();
        assert!(files.have_changed());
        assert!(!files.have_changed());
        fs::write(&path, "ab").unwrap();
        assert!(files.have_changed());
    }

    #[test]
    fn what_changed_between_the_start_and_the_first_look_is_seen() {
        let folder = Folder::new();
        fs::write(folder.0.path().join("config.yaml"), "b").unwrap();
        assert!(folder.watched("a").have_changed());
    }

    /// As a mounted ConfigMap: `config.yaml -> ..data/config.yaml`, `..data -> ..1`.
    #[test]
    fn the_swap_of_a_symlink_in_the_path_is_seen() {
        let folder = Folder::new();
        let at = |name: &str| folder.0.path().join(name);
        for (name, text) in [("..1", "a"), ("..2", "b")] {
            fs::create_dir(at(name)).unwrap();
            fs::write(at(name).join("config.yaml"), text).unwrap();
        }
        let link = |from: &str, to: &str| std::os::unix::fs::symlink(from, at(to)).unwrap();
        link("..1", "..data");
        link("..data/config.yaml", "config.yaml");
        let mut files = folder.watched("a");
        assert!(!files.have_changed());
        link("..2", "..data_tmp");
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
        assert!(files.have_changed());
        assert!(!files.have_changed());
    }

    #[test]
    fn the_hash_is_how_sha256sum_begins() {
        assert_eq!(FileHash::of(b"abc").hex(), "ba7816bf8f01");
        assert_eq!(FileHash::of(b"abc").number(), 0xba78_16bf_8f01);
    }
}
