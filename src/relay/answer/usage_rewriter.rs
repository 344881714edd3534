//! Edits the response to a disaggregated request. `cached_tokens` becomes the prefill leg's number, because the
//! decode worker counts every token that it received as cached, and `kv_transfer_params` becomes `null`. All other
//! bytes pass unchanged. Pure.

mod json_walk;

use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memchr;
use memchr::memmem::Finder;

use self::json_walk::{Counts, JsonWalk};
use super::cut_json::Line;
use super::splice::Splice;

static CACHED: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"cached_tokens\""));
static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\""));
static PARAMS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"kv_transfer_params\""));

/// Edits one response while it passes. Its length may change, so `content-length` must be removed.
#[derive(Debug)]
pub struct UsageRewriter {
    counts: Counts,
    /// True for server-sent events, false for one JSON text.
    is_events: bool,
    line: Line,
    walk: JsonWalk,
}

impl UsageRewriter {
    /// `cached_tokens` is the prefill leg's number. `is_events` is true for server-sent events, false for one JSON text.
    pub fn new(cached_tokens: u64, is_events: bool) -> Self {
        Self {
            counts: Counts {
                cached: cached_tokens.to_string(),
                input: None,
            },
            is_events,
            line: if is_events {
                Line::Begin(0)
            } else {
                Line::Json
            },
            walk: JsonWalk::default(),
        }
    }

    /// For an answer of Messages, whose input tokens do not count the cached ones.
    pub fn of_messages(prompt_tokens: u64, cached_tokens: u64, is_events: bool) -> Self {
        let mut rewriter = Self::new(cached_tokens, is_events);
        rewriter.counts.input = Some(prompt_tokens.saturating_sub(cached_tokens).to_string());
        rewriter
    }

    /// Takes the response's bytes in pieces of any size. The returned piece may be shorter, longer or empty; without a
    /// change it is `data` itself, not a copy.
    pub fn on_data(&mut self, data: Bytes) -> Bytes {
        // Nearly every piece of a stream has whole lines and nothing to change.
        if self.is_events
            && matches!(self.line, Line::Begin(0))
            && data.last() == Some(&b'\n')
            && match self.counts.input {
                Some(_) => USAGE.find(&data).is_none(),
                None => CACHED.find(&data).is_none(),
            }
            && PARAMS.find(&data).is_none()
        {
            return data;
        }
        let mut out = Splice::new(&data);
        let mut position = 0;
        while position < data.len() {
            position = self.step(&data, position, &mut out);
        }
        if self.walk.is_removing() {
            out.leave_out(position);
        }
        let edited = out.finish(position);
        edited.unwrap_or(data)
    }

    /// Consumes the bytes at `position`, or only ends a removal there. Returns the next position.
    fn step(&mut self, data: &[u8], position: usize, out: &mut Splice<'_>) -> usize {
        let byte = data[position];
        // JSON strings contain no raw line breaks, so each line starts a new JSON text.
        if self.is_events && byte == b'\n' {
            if self.walk.is_removing() {
                out.leave_out(position);
            }
            self.line = Line::Begin(0);
            self.walk = JsonWalk::default();
            return position + 1;
        }
        match self.line {
            Line::Begin(_) => {
                self.line = self.line.after(byte);
                position + 1
            }
            Line::Other => {
                let rest = memchr(b'\n', &data[position..]);
                rest.map_or(data.len(), |found| position + found)
            }
            Line::Json => {
                let (counts, is_events) = (&self.counts, self.is_events);
                self.walk.step(data, position, out, counts, is_events)
            }
        }
    }
}

#[cfg(test)]
mod tests;
