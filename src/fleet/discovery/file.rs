//! Discovery by a file that lists workers.
//!
//! The file is polled, not watched with inotify: polling also notices the symlink swap by which Kubernetes updates a
//! mounted ConfigMap, and works on every file system.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use std::{fmt, io};

use parking_lot::Mutex;

use super::Discovery;
use crate::fleet::Member;
use crate::http::file_thread::FileThread;
use crate::http::tls;
use crate::observe;

/// A list that was refused is parsed again after this time even if its file did not change: what it names, such as the
/// file of a key, may be there now. The configuration's own file is read again as often.
const RETRY: Duration = Duration::from_secs(30);

/// A list that has changed is used once its files were quiet for this long: what writes them may do so in pieces, and
/// the first piece of a list is a valid list, without the workers of the others. While they are not quiet the last list
/// stays. The configuration's own file waits as long.
const SETTLE: Duration = Duration::from_millis(100);

/// Parses the file. The format belongs to the configuration.
pub type Parse = Box<dyn Fn(&str) -> ParsedList + Send + Sync>;

pub struct ParsedList {
    pub members: Result<Vec<Member>, String>,
    /// TLS of the members, whose files are read with the list: who uses the list must read none.
    pub tls: Vec<Arc<tls::Client>>,
    /// Whether a file that the list names, such as that of a key, has changed since it was read or since the last call.
    pub have_files_changed: Box<dyn FnMut() -> bool + Send>,
}

impl fmt::Debug for ParsedList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParsedList")
            .field("members", &self.members)
            .finish_non_exhaustive()
    }
}

pub struct File {
    /// `file:PATH`, unique among the discoveries in use.
    name: String,
    path: PathBuf,
    interval: Duration,
    /// This file's own: a file system that hangs must stop neither the caller nor other files.
    thread: FileThread<Option<Listed>>,
    has_looked: bool,
    /// Whether the file system did not answer since the last look began.
    has_hung: Arc<AtomicBool>,
    /// A list that differs from the one before, until its files are quiet.
    changed: Option<Listed>,
    /// Only the thread locks it, one look after the other.
    watched: Arc<Mutex<Watched>>,
}

type Listed = Result<Vec<Member>, String>;

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("File")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl File {
    pub fn new(path: PathBuf, interval: Duration, parse: Parse) -> io::Result<Self> {
        Ok(Self {
            name: format!("file:{}", path.display()),
            path: path.clone(),
            interval,
            thread: FileThread::start("workers-file")?,
            has_looked: false,
            has_hung: Arc::default(),
            changed: None,
            watched: Arc::new(Mutex::new(Watched::new(path, parse))),
        })
    }

    /// `None` if nothing has changed. An error: that is not known, because the file system does not answer.
    async fn look(&mut self) -> Result<Option<Listed>, String> {
        let (watched, has_hung) = (self.watched.clone(), self.has_hung.clone());
        let look = move || {
            let mut watched = watched.lock();
            if has_hung.swap(false, Relaxed) {
                // Its list is given again, so that who follows it knows that it can be read again.
                watched.last = None;
            }
            watched.look(observe::now())
        };
        let looked = self.thread.look(look).await;
        looked.map_err(|error| {
            self.has_hung.store(true, Relaxed);
            let path = self.path.display();
            format!("cannot read {path}, or a file that it names: {error}")
        })
    }
}

impl Discovery for File {
    fn name(&self) -> &str {
        &self.name
    }

    async fn next(&mut self) -> Result<Vec<Member>, String> {
        let is_first = !std::mem::replace(&mut self.has_looked, true);
        if is_first && let Some(listed) = self.look().await? {
            return listed;
        }
        loop {
            let pause = match self.changed {
                None => self.interval,
                Some(_) => SETTLE,
            };
            tokio::time::sleep(pause).await;
            let looked = self.look().await?;
            match (self.changed.take(), looked) {
                (Some(listed), None) => return listed,
                (_, again) => self.changed = again,
            }
        }
    }
}

/// The file, and what was seen of it last.
struct Watched {
    path: PathBuf,
    parse: Parse,
    /// What was read last, or why it could not be.
    last: Option<Result<String, String>>,
    /// Looks at the files that the last list names.
    have_files_changed: Option<Box<dyn FnMut() -> bool + Send>>,
    /// TLS of the last list's members, which keeps it known.
    _tls: Vec<Arc<tls::Client>>,
    /// When the last list was refused, if it was.
    refused: Option<Instant>,
}

impl Watched {
    fn new(path: PathBuf, parse: Parse) -> Self {
        Self {
            path,
            parse,
            last: None,
            have_files_changed: None,
            _tls: Vec::new(),
            refused: None,
        }
    }

    /// Reads the file, and parses it if that may give something else than before.
    fn look(&mut self, now: Instant) -> Option<Listed> {
        let read = std::fs::read_to_string(&self.path)
            .map_err(|error| format!("cannot read {}: {error}", self.path.display()));
        let is_same = self.last.as_ref() == Some(&read);
        if is_same && !self.is_parsed_again(now) {
            return None;
        }
        self.last = Some(read.clone());
        (self.have_files_changed, self.refused) = (None, None);
        Some(read.and_then(|text| {
            let list = (self.parse)(&text);
            self.have_files_changed = Some(list.have_files_changed);
            self._tls = list.tls;
            self.refused = list.members.is_err().then_some(now);
            list.members
        }))
    }

    /// Whether a text that is as it was is parsed again.
    fn is_parsed_again(&mut self, now: Instant) -> bool {
        let look = self.have_files_changed.as_mut();
        let have_files_changed = look.is_some_and(|have_changed| have_changed());
        let since_refused = self.refused.map(|at| now.saturating_duration_since(at));
        have_files_changed || since_refused.is_some_and(|since| since >= RETRY)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::fleet::registry::tests::member;

    fn list(members: Result<Vec<Member>, String>) -> ParsedList {
        ParsedList {
            members,
            tls: Vec::new(),
            have_files_changed: Box::new(|| false),
        }
    }

    #[tokio::test]
    async fn a_changed_file_gives_a_new_list_and_an_invalid_one_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("workers");
        let parse: Parse = Box::new(|text: &str| {
            list(match text {
                "bad" => Err("bad list".to_owned()),
                names => Ok(names.split_whitespace().map(member).collect()),
            })
        });
        let mut file = File::new(path.clone(), Duration::from_millis(5), parse).unwrap();
        assert!(file.next().await.unwrap_err().contains("cannot read"));
        std::fs::write(&path, "a b").unwrap();
        assert_eq!(file.next().await.unwrap(), [member("a"), member("b")]);
        std::fs::write(&path, "bad").unwrap();
        assert_eq!(file.next().await.unwrap_err(), "bad list");
        std::fs::write(&path, "b").unwrap();
        assert_eq!(file.next().await.unwrap(), [member("b")]);
    }

    /// The file is written on when its first piece was read, so no clock decides what the test sees.
    #[tokio::test]
    async fn a_file_that_is_written_in_pieces_gives_no_list_of_its_first_piece() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("workers");
        std::fs::write(&path, "a b").unwrap();
        let parse: Parse = {
            let path = path.clone();
            Box::new(move |text: &str| {
                match text {
                    "a" => std::fs::write(&path, "a b").unwrap(),
                    "c" => std::fs::write(&path, "c d").unwrap(),
                    "c d" => std::fs::write(&path, "c d e").unwrap(),
                    _ => {}
                }
                list(Ok(text.split_whitespace().map(member).collect()))
            })
        };
        let mut file = File::new(path.clone(), Duration::from_millis(5), parse).unwrap();
        assert_eq!(file.next().await.unwrap(), [member("a"), member("b")]);
        std::fs::write(&path, "a").unwrap();
        assert_eq!(file.next().await.unwrap(), [member("a"), member("b")]);
        std::fs::write(&path, "c").unwrap();
        let expected = ["c", "d", "e"].map(member);
        assert_eq!(file.next().await.unwrap(), expected);
    }

    #[test]
    fn a_refused_list_is_parsed_again_after_a_while() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("workers");
        std::fs::write(&path, "a").unwrap();
        let is_key_there = Arc::new(AtomicBool::new(false));
        let parse: Parse = {
            let is_key_there = is_key_there.clone();
            Box::new(move |text: &str| {
                let is_good = is_key_there.load(Relaxed);
                let members = is_good.then(|| vec![member(text)]);
                list(members.ok_or_else(|| "no key".to_owned()))
            })
        };
        let mut file = Watched::new(path, parse);
        let now = observe::now();
        assert_eq!(file.look(now), Some(Err("no key".to_owned())));
        is_key_there.store(true, Relaxed);
        assert_eq!(file.look(now + RETRY / 2), None);
        assert_eq!(file.look(now + RETRY), Some(Ok(vec![member("a")])));
        assert_eq!(
            file.look(now + 3 * RETRY),
            None,
            "it is not refused any more"
        );
    }

    #[test]
    fn a_changed_file_that_the_list_names_gives_a_new_list() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("workers");
        std::fs::write(&path, "a").unwrap();
        let has_changed = Arc::new(AtomicBool::new(false));
        let parse: Parse = {
            let has_changed = has_changed.clone();
            Box::new(move |text: &str| {
                let has_changed = has_changed.clone();
                ParsedList {
                    members: Ok(vec![member(text)]),
                    tls: Vec::new(),
                    have_files_changed: Box::new(move || has_changed.swap(false, Relaxed)),
                }
            })
        };
        let mut file = Watched::new(path, parse);
        let now = observe::now();
        let listed: Option<Result<Vec<Member>, String>> = Some(Ok(vec![member("a")]));
        assert_eq!(file.look(now), listed);
        assert_eq!(file.look(now), None);
        has_changed.store(true, Relaxed);
        assert_eq!(file.look(now), listed);
        assert_eq!(file.look(now), None);
    }

    /// A pipe that nobody has opened to write hangs each who opens it to read, as a file on a lost server does.
    #[tokio::test]
    async fn a_file_that_hangs_is_an_error_and_its_list_comes_once_it_answers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("workers");
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let parse: Parse = Box::new(|text: &str| list(Ok(vec![member(text)])));
        let mut file = File::new(path.clone(), Duration::from_millis(5), parse).unwrap();
        file.thread = file.thread.with_patience(Duration::from_millis(20));
        for _ in 0..2 {
            let error = file.next().await.unwrap_err();
            assert!(error.ends_with("has not answered for 20ms"), "{error}");
            let named = format!("{}, or a file that it names: ", path.display());
            assert!(error.contains(&named), "{error}");
        }
        // The look that hangs has the pipe open, or opens it now. What is read next is a file.
        let mut pipe = std::fs::File::options().write(true).open(&path).unwrap();
        let new = folder.path().join("new");
        std::fs::write(&new, "b").unwrap();
        std::fs::rename(new, &path).unwrap();
        pipe.write_all(b"a").unwrap();
        drop(pipe);
        file.thread = file.thread.with_patience(Duration::from_secs(60));
        assert_eq!(file.next().await.unwrap(), [member("b")]);
        // After a look that hung, the list is given again though nothing has changed.
        file.has_hung.store(true, Relaxed);
        assert_eq!(file.next().await.unwrap(), [member("b")]);
    }
}
