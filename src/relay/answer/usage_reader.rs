//! Finds the usage in an answer while it passes: in a whole answer or in the events of a stream, wherever it stands and however
//! the bytes are cut. Only the answer's own usage counts, never a field of that name deeper in it. Pure.

mod member_search;
mod reported;

use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memchr;
use memchr::memmem::Finder;

use self::member_search::MemberSearch;
use self::reported::Reported;
use super::cut_json::Line;
use super::engine_answer::Usage;
use crate::json_scan::Scan;
use crate::prompt::Api;

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\""));
/// SGLang's, of its own API.
static META_INFO: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"meta_info\""));

#[derive(Debug)]
pub(in crate::relay) struct UsageReader {
    api: Api,
    /// Where the last piece ended.
    at: Line,
    search: MemberSearch,
    /// The first piece of a whole answer. Most have no other, and then little of it is read.
    whole: Option<Bytes>,
    /// The answer is a list of answers, each with its usage.
    is_list: bool,
    last: Option<Reported>,
    /// Of Messages, whose last usage may have the output alone.
    first: Option<Reported>,
}

impl UsageReader {
    /// `api` is the one that the engine was sent.
    pub(in crate::relay) fn new(api: Api) -> Self {
        Self {
            api,
            at: Line::Begin(0),
            search: MemberSearch::default(),
            whole: None,
            is_list: false,
            last: None,
            first: None,
        }
    }

    /// Takes the next piece of a whole answer.
    pub(in crate::relay) fn on_whole(&mut self, data: &Bytes) {
        match self.whole.take() {
            Some(first) => self.read_whole(&first),
            None if self.at == Line::Begin(0) => {
                self.whole = Some(data.clone());
                return;
            }
            None => {}
        }
        self.read_whole(data);
    }

    fn read_whole(&mut self, data: &[u8]) {
        let mut data = data;
        if let Line::Begin(_) = self.at {
            // A byte order mark is no part of the text.
            let is_before =
                |byte: &u8| byte.is_ascii_whitespace() || b"\xef\xbb\xbf".contains(byte);
            let Some(begin) = data.iter().position(|byte| !is_before(byte)) else {
                // What follows is not the first piece.
                self.at = Line::Begin(1);
                return;
            };
            data = &data[begin..];
            self.is_list = data[0] == b'[';
            self.at = match data[0] {
                b'{' | b'[' => Line::Json,
                _ => Line::Other,
            };
        }
        if self.at == Line::Json {
            self.read(data);
        }
    }

    /// Takes the next events of a stream. Returns the position behind the last usage in them, if they have any.
    pub(in crate::relay) fn on_events(&mut self, events: &[u8]) -> Option<usize> {
        let has_whole_lines = self.at == Line::Begin(0) && events.last() == Some(&b'\n');
        if has_whole_lines && !self.may_have_usage(events) {
            return None;
        }
        let (mut position, mut read) = (0, None);
        while position < events.len() {
            let end = memchr(b'\n', &events[position..]).map(|length| position + length);
            let line = &events[position..end.unwrap_or(events.len())];
            if let Some(behind) = self.on_line(line) {
                read = Some(position + behind);
            }
            position += line.len() + 1;
            if end.is_some() {
                self.at = Line::Begin(0);
                self.search = MemberSearch::default();
            }
        }
        read
    }

    /// A line, or the next part of one.
    fn on_line(&mut self, line: &[u8]) -> Option<usize> {
        let mut position = 0;
        while let (Line::Begin(_), Some(byte)) = (self.at, line.get(position)) {
            self.at = self.at.after(*byte);
            position += 1;
        }
        if self.at != Line::Json {
            return None;
        }
        self.read(&line[position..]).map(|behind| position + behind)
    }

    fn read(&mut self, json: &[u8]) -> Option<usize> {
        let is_other = self.api == Api::Other;
        let (mut search, mut behind) = (std::mem::take(&mut self.search), None);
        search.read(json, is_other, |usage, end| {
            if let Some(reported) = Reported::read(usage) {
                self.take(reported);
                behind = Some(end);
            }
        });
        self.search = search;
        behind
    }

    fn take(&mut self, reported: Reported) {
        if self.api == Api::Messages {
            self.first.get_or_insert(reported);
        }
        self.last = Some(match self.last {
            Some(last) if self.is_list => last.plus(reported),
            _ => reported,
        });
    }

    /// Whether some events may have usage: they have the name, and then an object.
    fn may_have_usage(&self, events: &[u8]) -> bool {
        let is_object = |name: &Finder<'_>, at: usize| {
            let value = events[at + name.needle().len()..].trim_ascii_start();
            let value = value.strip_prefix(b":").map(<[u8]>::trim_ascii_start);
            value.is_none_or(|value| value.first() == Some(&b'{'))
        };
        let has = |name: &Finder<'_>| name.find_iter(events).any(|at| is_object(name, at));
        has(&USAGE) || self.api == Api::Other && has(&META_INFO)
    }

    /// What the engine has reported so far.
    pub(in crate::relay) fn usage(&self) -> Option<Usage> {
        match &self.whole {
            Some(whole) => of_whole(self.api, whole),
            None => self.reported(),
        }
    }

    fn reported(&self) -> Option<Usage> {
        match self.api {
            Api::Messages => Reported::usage_of_message(self.last?, self.first?),
            _ => self.last?.usage(),
        }
    }
}

/// The usage of a whole answer that has been read.
pub fn of_whole(api: Api, answer: &[u8]) -> Option<Usage> {
    let mut reader = UsageReader::new(api);
    match only_usage(api, answer) {
        Some(None) => return None,
        Some(Some(reported)) => reader.take(reported),
        None => reader.read_whole(answer),
    }
    reader.reported()
}

/// The usage of an answer in one piece that has the name once, read from there: it is the answer's own if all braces behind it
/// close what is open there and nothing else. `None`: the whole must be read.
fn only_usage(api: Api, whole: &[u8]) -> Option<Option<Reported>> {
    if api == Api::Other || whole.trim_ascii_start().first() != Some(&b'{') {
        return None;
    }
    let mut names = USAGE.find_iter(whole);
    let Some(at) = names.next() else {
        return Some(None);
    };
    if names.next().is_some() || whole[at - 1] == b'\\' {
        return None;
    }
    let value = &whole[at + USAGE.needle().len()..];
    if let Some(reported) = last_members(value) {
        return Some(reported);
    }
    let (mut search, mut reported) = (MemberSearch::in_object(), None);
    search.read(&whole[at..], false, |usage, _| {
        reported = Reported::read(usage);
    });
    search.is_over().then_some(reported)
}

/// The usage that follows its name, if that is an object of JSON and nothing but members of the outermost object follows.
fn last_members(behind_name: &[u8]) -> Option<Option<Reported>> {
    let mut scan = Scan::<true>::of_bytes(behind_name)?;
    scan.open_value()?;
    let reported = Reported::take(&mut scan)?;
    scan.skip_rest_of_object()?;
    scan.is_over().then_some(reported)
}

#[cfg(test)]
mod tests;
