//! Removes from a folder what a router that was killed while it wrote an object has left.
//!
//! An object is written beside its place, under its name with `#` and a number, which no listing shows.

use std::fs::{self, DirEntry};
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// A file that was written to since may belong to another router that mounts the folder.
const OLD: Duration = Duration::from_secs(24 * 3_600);

/// How many folders deep objects lie.
const MAX_DEPTH: usize = 8;

/// Removes those that nobody has written to for a day, and returns how many there were.
pub(super) fn remove(folder: &Path, now: SystemTime) -> io::Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(folder)? {
        removed += or_gone(remove_entry(&entry?, now, MAX_DEPTH))?;
    }
    Ok(removed)
}

fn remove_entry(entry: &DirEntry, now: SystemTime, depth: usize) -> io::Result<usize> {
    let path = entry.path();
    if entry.file_type()?.is_dir() {
        let mut removed = 0;
        if depth > 0 {
            for entry in fs::read_dir(&path)? {
                removed += or_gone(remove_entry(&entry?, now, depth - 1))?;
            }
        }
        return Ok(removed);
    }
    if !entry.file_name().to_str().is_some_and(is_unfinished) {
        return Ok(0);
    }
    let age = now.duration_since(entry.metadata()?.modified()?);
    if !age.is_ok_and(|age| age >= OLD) {
        return Ok(0);
    }
    fs::remove_file(&path)?;
    Ok(1)
}

/// Another router that mounts the folder finishes and deletes objects meanwhile.
fn or_gone(removed: io::Result<usize>) -> io::Result<usize> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        removed => removed,
    }
}

fn is_unfinished(name: &str) -> bool {
    let number = name.rsplit_once('#').map(|(_, number)| number);
    number.is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_old_unfinished_files_are_removed() {
        let folder =
            std::env::temp_dir().join(format!("warmroute-leftovers-{}", fastrand::u64(..)));
        let files = folder.join("files/0123");
        fs::create_dir_all(&files).unwrap();
        for name in ["file-a", "file-a#1", "file-b#12", "file#b", "file#"] {
            fs::write(files.join(name), "x").unwrap();
        }
        let written = SystemTime::now();
        assert_eq!(remove(&folder, written).unwrap(), 0);
        let later = written + OLD + Duration::from_secs(60);
        assert_eq!(remove(&folder, later).unwrap(), 2);
        let mut left: Vec<_> = fs::read_dir(&files)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["file#", "file#b", "file-a"]);
        fs::remove_dir_all(folder).unwrap();
    }
}
