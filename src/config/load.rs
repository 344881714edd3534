//! Reading a configuration from its file, and again while a router runs with it.

use std::cell::RefCell;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::diff::{Change, Comparable};
use super::effect::Effect;
use super::flags::Flags;
use super::reader::{Outside, Problems, Reader};
use super::settings::Config;
use super::source::Source;
use super::tokenizer::Loaded;
use super::watched::FileHash;
use super::{check, set_flags};

/// How arguments name standard input.
const STANDARD_INPUT: &str = "-";

/// Why a file cannot replace the configuration that runs.
#[derive(Clone, Debug)]
pub enum Refused {
    /// It is no valid configuration.
    Invalid(Problems),
    /// It is valid, and changes keys that need a restart.
    NeedsRestart(Problems),
}

impl Refused {
    pub fn problems(&self) -> &Problems {
        match self {
            Self::Invalid(problems) | Self::NeedsRestart(problems) => problems,
        }
    }
}

impl Config {
    /// Reads a file or standard input, if there is one, puts the values of flags in, and checks the result.
    pub fn load_with(path: Option<&Path>, flags: Flags) -> Result<Self, Problems> {
        let Some(path) = path else {
            return Self::read("", b"", flags, Loaded::default())
                .and_then(|(reader, config)| reader.finish(Some(config)));
        };
        let is_input = path == Path::new(STANDARD_INPUT);
        let (name, read) = if is_input {
            ("standard input".to_owned(), standard_input())
        } else {
            (path.display().to_string(), std::fs::read(path))
        };
        let text = read.map_err(|error| unreadable(&name, &error))?;
        let (reader, config) = Self::read(&name, &text, flags, Loaded::default())?;
        let mut config = reader.finish(Some(config))?;
        // A pipe, as of `<(...)`, gives its text once: later it is empty, or holds up who reads it.
        let is_read_once = is_input || path.metadata().is_ok_and(|seen| !seen.is_file());
        config.source.path = (!is_read_once).then(|| path.to_owned());
        Ok(config)
    }

    pub fn parse(name: &str, text: &str) -> Result<Self, Problems> {
        let (reader, config) =
            Self::read(name, text.as_bytes(), Flags::default(), Loaded::default())?;
        reader.finish(Some(config))
    }

    /// What `text`, the new content of this configuration's file, would change, if it may replace this configuration.
    pub fn successor(&self, text: &[u8]) -> Result<(Self, Vec<Change>), Refused> {
        let Source { path, flags, .. } = &self.source;
        let name = path
            .as_deref()
            .unwrap_or(Path::new(""))
            .display()
            .to_string();
        let read = Self::read(&name, text, flags.clone(), self.loaded.successor());
        let (mut reader, mut config) = read.map_err(Refused::Invalid)?;
        if !reader.is_good() {
            return Err(Refused::Invalid(reader.into_problems()));
        }
        let mut changes = Comparable::of(self).changes(&Comparable::of(&config));
        let changed_files = config.loaded.changed_files();
        changes.extend(changed_files.map(|(model, tokenizer)| Change {
            path: format!("models[{model}].tokenizer"),
            old: Some(tokenizer.path.as_str().into()),
            new: Some("its files have changed".into()),
            effect: Effect::Reload,
            file_path: "models".to_owned(),
        }));
        for change in changes
            .iter()
            .filter(|change| change.effect == Effect::Restart)
        {
            let message = format!(
                "cannot be changed without a restart (`{}`); nothing of this file is used until then",
                change.values()
            );
            reader.problem(&change.file_path, message);
        }
        if !reader.is_good() {
            return Err(Refused::NeedsRestart(reader.into_problems()));
        }
        config.source.path.clone_from(path);
        Ok((config, changes))
    }

    /// A value, and what is wrong with it. `name` is that of the file, for messages.
    fn read(
        name: &str,
        text: &[u8],
        flags: Flags,
        loaded: Loaded,
    ) -> Result<(Reader, Self), Problems> {
        let secret_files = RefCell::new(Vec::new());
        let read_file = |path: &str| {
            let text = std::fs::read_to_string(path)?;
            let hash = FileHash::of(text.as_bytes());
            secret_files.borrow_mut().push((PathBuf::from(path), hash));
            Ok(text)
        };
        let outside = Outside {
            read_file: &read_file,
            may_lack_files: flags.allow_missing_files,
            ..Outside::of_process()
        };
        let (mut reader, config) = Reader::read::<Self>(name, text, outside);
        let Some(mut config) = config else {
            return Err(reader.into_problems());
        };
        config.source = Source {
            path: None,
            flags: flags.clone(),
            hash: FileHash::of(text),
            secret_files: secret_files.into_inner(),
            warnings: reader.warnings(),
            missing_files: Vec::new(),
        };
        set_flags::apply(flags, &mut config, &mut reader);
        config.loaded = loaded;
        check::check(&mut config, &mut reader);
        config.source.missing_files = reader.missing_files();
        Ok((reader, config))
    }
}

/// All of standard input. /dev/stdin would open anew what is behind it: a socket, as of `ssh HOST warmroute check -`, cannot be
/// opened, and neither can what belongs to another user, as with `sudo -u`.
fn standard_input() -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    io::stdin().lock().read_to_end(&mut text)?;
    Ok(text)
}

/// The problem of a file that cannot be read.
pub fn unreadable(name: &str, error: &io::Error) -> Problems {
    Problems::one(name, &format!("cannot be read: {error}"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use super::*;

    const ONE: &str = "workers: ['http://a:1']\n";

    fn successor(rest: &str) -> Result<Vec<Change>, Refused> {
        let running = Config::parse("config.yaml", ONE).unwrap();
        let text = format!("{ONE}{rest}");
        running
            .successor(text.as_bytes())
            .map(|(_, changes)| changes)
    }

    #[test]
    fn a_change_that_needs_a_restart_is_refused_with_its_line_and_all_others() {
        let refused =
            successor("reload: {watch_interval: 5s}\nruntime:\n  threads: 3\npeers:\n  name: x\n");
        let Err(Refused::NeedsRestart(problems)) = refused else {
            panic!("{refused:?}");
        };
        let found: Vec<(usize, &str)> = problems
            .iter()
            .map(|problem| (problem.at.unwrap().line, &*problem.path))
            .collect();
        assert_eq!(found, [(4, "runtime.threads"), (6, "peers.name")]);
        assert!(problems.to_string().contains("`0 -> 3`"), "{problems}");
    }

    #[test]
    fn a_configuration_from_a_pipe_has_no_file_to_read_again() {
        let (pipe, mut writer) = std::io::pipe().unwrap();
        writer.write_all(ONE.as_bytes()).unwrap();
        drop(writer);
        let path = format!("/dev/fd/{}", pipe.as_raw_fd());
        let config = Config::load_with(Some(Path::new(&path)), Flags::default()).unwrap();
        assert_eq!(config.workers.len(), 1);
        assert_eq!(config.source.path(), None);
    }

    #[test]
    fn a_key_that_was_taken_out_is_refused_as_well() {
        let running = Config::parse("", &format!("{ONE}runtime: {{threads: 3}}\n")).unwrap();
        let refused = running.successor(ONE.as_bytes()).unwrap_err();
        assert!(matches!(refused, Refused::NeedsRestart(_)));
        assert!(refused.problems().to_string().contains("runtime.threads"));
    }

    #[test]
    fn a_file_with_mistakes_is_refused_with_all_of_them_and_nothing_else() {
        let refused = successor("runtime: {threads: 3}\nlog: {level: loud}\nnonsense: 1\n");
        let Err(Refused::Invalid(problems)) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!(problems.iter().count(), 2, "{problems}");
    }

    #[test]
    fn what_may_change_is_listed() {
        let changes = successor("reload: {watch_interval: 5s}\n").unwrap();
        assert_eq!(changes.len(), 1);
        assert_eq!(successor("# a comment\n").unwrap(), []);
    }
}
