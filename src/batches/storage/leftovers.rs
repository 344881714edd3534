//! Removes from a folder what routers before this one have left: unfinished objects of one that was killed while it wrote
//! them, and all objects where the records ended with the process.
//!
//! An object is written beside its place, under its name with `#` and a number, which no listing shows.

use std::fs::{self, DirEntry};
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// The age of what is unfinished: a file that was written to since may belong to another router that mounts the folder.
pub(super) const UNFINISHED_AGE: Duration = Duration::from_secs(24 * 3_600);

/// How many folders deep objects lie.
const MAX_DEPTH: usize = 8;

#[derive(Debug)]
struct Removal<'a> {
    folder: &'a Path,
    now: SystemTime,
    age: Duration,
    /// Whether a file may go, by its path in the folder.
    may_go: fn(&str) -> bool,
}

/// Removes those files that `may_go`, by their paths in the folder, and that were not written to for `age`. Returns how
/// many there were.
pub(super) fn remove(
    folder: &Path,
    now: SystemTime,
    age: Duration,
    may_go: fn(&str) -> bool,
) -> io::Result<usize> {
    let removal = Removal {
        folder,
        now,
        age,
        may_go,
    };
    let mut removed = 0;
    for entry in fs::read_dir(folder)? {
        removed += or_gone(removal.remove(&entry?, MAX_DEPTH))?;
    }
    Ok(removed)
}

/// Whether a path is that of an object that was not finished.
pub(super) fn is_unfinished(path: &str) -> bool {
    let number = path.rsplit_once('#').map(|(_, number)| number);
    number.is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit())
    })
}

impl Removal<'_> {
    fn remove(&self, entry: &DirEntry, depth: usize) -> io::Result<usize> {
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            let mut removed = 0;
            if depth > 0 {
                for entry in fs::read_dir(&path)? {
                    removed += or_gone(self.remove(&entry?, depth - 1))?;
                }
            }
            if removed > 0 {
                // One with something in it stays.
                let _ = fs::remove_dir(&path);
            }
            return Ok(removed);
        }
        let inside = path.strip_prefix(self.folder).ok().and_then(Path::to_str);
        if !inside.is_some_and(self.may_go) {
            return Ok(0);
        }
        let age = self.now.duration_since(entry.metadata()?.modified()?);
        if !age.is_ok_and(|age| age >= self.age) {
            return Ok(0);
        }
        fs::remove_file(&path)?;
        Ok(1)
    }
}

/// Another router that mounts the folder finishes and deletes objects meanwhile.
fn or_gone(removed: io::Result<usize>) -> io::Result<usize> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batches::paths;

    const AGE: Duration = Duration::from_secs(48 * 3_600);

    /// Removes what is so old, and returns what is left in a folder of it.
    fn left(names: &[&str], may_go: fn(&str) -> bool, removed: usize) -> Vec<String> {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path().to_owned();
        for name in names {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
        let written = SystemTime::now();
        let minute = Duration::from_secs(60);
        let too_early = written + AGE - minute;
        assert_eq!(remove(&folder, too_early, AGE, may_go).unwrap(), 0);
        let later = written + AGE + minute;
        assert_eq!(remove(&folder, later, AGE, may_go).unwrap(), removed);
        let is_left = |name: &&&str| folder.join(name).exists();
        let left = names.iter().filter(is_left).map(|name| (*name).to_owned());
        left.collect()
    }

    #[test]
    fn only_old_unfinished_files_are_removed() {
        let names = ["file-a", "file-a#1", "file-b#12", "file#b", "file#"];
        let names = names.map(|name| format!("files/0123/{name}"));
        let names = names.each_ref().map(String::as_str);
        let expected = ["files/0123/file-a", "files/0123/file#b", "files/0123/file#"];
        assert_eq!(left(&names, is_unfinished, 2), expected);
    }

    #[test]
    fn only_old_objects_with_names_of_this_router_are_removed() {
        let file = "files/0123456789abcdef/file-0123456789abcdef01234567";
        let batch = "batches/batch_0123456789abcdef0123456789abcdef";
        let shards = format!("{batch}/shards.json");
        let part = format!("{batch}/parts/000001/0123456789abcdef-000001.jsonl");
        let other = format!("{batch}/notes.txt");
        let names = [
            file,
            &shards,
            &part,
            &other,
            "files/me/file-0123456789abcdef01234567",
            "thesis.tex",
        ];
        assert_eq!(left(&names, paths::is_object, 3), &names[3..]);
    }
}
