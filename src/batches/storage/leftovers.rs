//! Removes from a folder what a router that was killed while it wrote an object has left.
//!
//! An object is written beside its place, under its name with `#` and a number, which no listing shows.

use std::path::Path;
use std::time::{Duration, SystemTime};
use std::{fs, io};

/// A file that was written to since may belong to another router that mounts the folder.
const OLD: Duration = Duration::from_secs(24 * 3_600);

/// How many folders deep objects lie.
const MAX_DEPTH: usize = 8;

/// Removes those that nobody has written to for a day, and returns how many there were.
pub(super) fn remove(folder: &Path, now: SystemTime) -> io::Result<usize> {
    remove_below(folder, now, MAX_DEPTH)
}

fn remove_below(folder: &Path, now: SystemTime, depth: usize) -> io::Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            if depth > 0 {
                removed += remove_below(&path, now, depth - 1)?;
            }
            continue;
        }
        let name = entry.file_name();
        if !name.to_str().is_some_and(is_unfinished) {
            continue;
        }
        let written = entry.metadata()?.modified()?;
        if now.duration_since(written).is_ok_and(|age| age >= OLD) {
            fs::remove_file(&path)?;
            removed += 1;
        }
    }
    Ok(removed)
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
