//! The files of a TLS setting: what they contain, and whether that has changed.
//!
//! A volume of Kubernetes changes by the swap of a symbolic link in the path, which leaves watches on the file itself
//! without an event. So the resolved file's identity and times are looked at, and then its content.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;

use sha2::{Digest, Sha256};

/// A bundle of all public CAs has 250 KB.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// The key of a setting that names a file, and the path.
pub(super) type Named<'s> = (&'static str, &'s str);

/// What is wrong with a setting: its key, and a message.
pub(super) type Problem = (String, String);

/// The files of one setting, as they were read.
#[derive(Debug)]
pub(super) struct Contents(Vec<Content>);

struct Content {
    key: &'static str,
    path: String,
    bytes: Result<Vec<u8>, String>,
}

impl std::fmt::Debug for Content {
    /// Without the bytes, among which are private keys.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Content")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl Contents {
    /// Reads the files that are named; an empty path names none.
    pub(super) fn read(files: &[Named<'_>]) -> Self {
        let named = files.iter().filter(|(_, path)| !path.is_empty());
        let read = |(key, path): &Named<'_>| Content {
            key,
            path: (*path).to_owned(),
            bytes: read(path).map_err(|error| format!("`{path}` cannot be read: {error}")),
        };
        Self(named.map(read).collect())
    }

    /// Path and bytes of the file that a setting names, if it names one.
    pub(super) fn file(&self, key: &'static str) -> Option<Result<(&str, &[u8]), Problem>> {
        let content = self.0.iter().find(|content| content.key == key)?;
        Some(match &content.bytes {
            Ok(bytes) => Ok((content.path.as_str(), bytes)),
            Err(error) => Err((key.to_owned(), error.clone())),
        })
    }

    fn digest(&self) -> [u8; 32] {
        let mut digest = Sha256::new();
        for content in &self.0 {
            let bytes: &[u8] = match &content.bytes {
                Ok(bytes) => bytes,
                Err(error) => error.as_bytes(),
            };
            digest.update([u8::from(content.bytes.is_ok())]);
            digest.update((bytes.len() as u64).to_le_bytes());
            digest.update(bytes);
        }
        digest.finalize().into()
    }
}

/// The path of the file that a key names; empty if it names none.
pub(super) fn path_of<'s>(files: &[Named<'s>], key: &str) -> &'s str {
    let named = files.iter().find(|(name, _)| *name == key);
    named.map_or("", |(_, path)| *path)
}

pub(super) fn one_line(problems: &[Problem]) -> String {
    let lines = problems.iter().map(|(key, text)| format!("{key}: {text}"));
    lines.collect::<Vec<_>>().join("; ")
}

fn read(path: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut file = File::open(path)?.take(MAX_FILE_BYTES + 1);
    file.read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        Err(io::Error::other("it is larger than 4 MiB"))
    } else {
        Ok(bytes)
    }
}

/// A file as the path resolves to it now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    length: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(path: &str) -> Option<Self> {
        let found = fs::metadata(path).ok()?;
        Some(Self {
            device: found.dev(),
            inode: found.ino(),
            length: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }
}

/// What was seen of the files last.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    stamps: Vec<Option<Stamp>>,
    digest: [u8; 32],
    /// Why nothing could be built from what they contained.
    problem: Option<String>,
}

impl Seen {
    /// Reads the files. What they are is noted before they are read, so that a change in between is seen next time.
    pub(super) fn first(files: &[Named<'_>]) -> (Self, Contents) {
        let stamps = stamps(files);
        let contents = Contents::read(files);
        let digest = contents.digest();
        let seen = Self {
            stamps,
            digest,
            problem: None,
        };
        (seen, contents)
    }

    /// Whether what they contain is in use.
    pub(super) fn is_usable(&self) -> bool {
        self.problem.is_none()
    }

    /// Notes that nothing could be built from what the files contain.
    pub(super) fn failed(&mut self, reason: &str) {
        self.problem = Some(reason.to_owned());
    }

    /// Builds from what the files contain if that has changed, or could not be used before: a certificate becomes valid
    /// without a change of its file. `None` if there is nothing new, a failure for the same reason included.
    pub(super) fn rebuild<T>(
        &mut self,
        files: &[Named<'_>],
        build: impl FnOnce(&Contents) -> Result<T, String>,
    ) -> Option<Result<T, String>> {
        if self.problem.is_none() && stamps(files) == self.stamps {
            return None;
        }
        let (now, contents) = Self::first(files);
        let before = std::mem::replace(self, now);
        let has_changed = self.digest != before.digest;
        if !has_changed && before.problem.is_none() {
            return None;
        }
        let built = build(&contents);
        self.problem = built.as_ref().err().cloned();
        let is_new = has_changed || self.problem != before.problem;
        is_new.then_some(built)
    }
}

fn stamps(files: &[Named<'_>]) -> Vec<Option<Stamp>> {
    files.iter().map(|(_, path)| Stamp::of(path)).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// The content of the first file, if that has changed.
    fn changed(seen: &mut Seen, files: &[Named<'_>]) -> Option<Vec<u8>> {
        let built = seen.rebuild(files, |contents| {
            Ok(contents.file("certificate").unwrap().unwrap().1.to_vec())
        });
        built.map(Result::unwrap)
    }

    #[test]
    fn a_change_is_seen_once_and_a_touched_file_is_none() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tls.crt");
        let path = file.to_str().unwrap();
        let files = [("certificate", path), ("key", "")];
        let (mut seen, contents) = Seen::first(&files);
        assert!(contents.file("certificate").unwrap().is_err());
        assert!(contents.file("key").is_none());
        fs::write(&file, "a").unwrap();
        assert_eq!(changed(&mut seen, &files).unwrap(), b"a");
        assert_eq!(changed(&mut seen, &files), None);
        // The same content in another file.
        fs::remove_file(&file).unwrap();
        fs::write(&file, "a").unwrap();
        assert_eq!(changed(&mut seen, &files), None);
        fs::write(&file, "b").unwrap();
        assert!(changed(&mut seen, &files).is_some());
    }

    #[test]
    fn what_cannot_be_used_is_built_from_again_and_reported_once() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tls.crt");
        let path = file.to_str().unwrap();
        let files = [("certificate", path)];
        fs::write(&file, "a").unwrap();
        let (mut seen, _) = Seen::first(&files);
        let look = |seen: &mut Seen, result: Result<u8, &str>| {
            seen.rebuild(&files, |_| result.map_err(str::to_owned))
        };
        seen.failed("too early");
        assert_eq!(look(&mut seen, Err("too early")), None);
        assert_eq!(look(&mut seen, Err("late")), Some(Err("late".to_owned())));
        assert_eq!(look(&mut seen, Err("late")), None);
        assert_eq!(look(&mut seen, Ok(1)), Some(Ok(1)));
        assert_eq!(look(&mut seen, Ok(2)), None);
        fs::write(&file, "bb").unwrap();
        assert_eq!(look(&mut seen, Err("late")), Some(Err("late".to_owned())));
        // Another content with the same problem.
        fs::write(&file, "ccc").unwrap();
        assert_eq!(look(&mut seen, Err("late")), Some(Err("late".to_owned())));
    }

    #[test]
    fn the_swap_of_a_link_in_the_path_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path();
        for (version, text) in [("..1", "a"), ("..2", "b")] {
            fs::create_dir_all(directory.join(version)).unwrap();
            fs::write(directory.join(version).join("tls.crt"), text).unwrap();
        }
        symlink("..1", directory.join("..data")).unwrap();
        symlink("..data/tls.crt", directory.join("tls.crt")).unwrap();
        let path = directory.join("tls.crt");
        let files = [("certificate", path.to_str().unwrap())];
        let (mut seen, _) = Seen::first(&files);
        symlink("..2", directory.join("..new")).unwrap();
        fs::rename(directory.join("..new"), directory.join("..data")).unwrap();
        assert_eq!(changed(&mut seen, &files).unwrap(), b"b");
    }
}
