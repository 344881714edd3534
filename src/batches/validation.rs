//! Checks an input file piece by piece, and cuts it into shards. Pure.
//!
//! Memory: the line that is not complete yet, a hash of each `custom_id`, the shards and at most 100 errors; for a
//! file of 200,000 lines below 32 MiB, whatever its size.

use std::mem;

use memchr::memchr;

use super::custom_ids::CustomIds;
use super::line::{self, Flavor, Line, LineEndpoint, LineError, MAX_LINE_BYTES};
use super::shards::{Shard, ShardCutter};

/// Errors that a batch keeps. A file that was made wrong has as many as lines.
pub const MAX_ERRORS: usize = 100;

/// Models whose answers are kept, and of which engines are asked. Most files have one; those of a file with more are
/// asked for again.
pub const MAX_MODELS: usize = 32;

/// What an error names if the model of its line cannot be used, or if the line has no name of a model.
pub const MODEL_PARAM: &str = "body.model";

/// The byte order mark that some editors write.
const BOM: [u8; 3] = [0xef, 0xbb, 0xbf];

/// What is known of a file that can be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub shards: Vec<Shard>,
    /// The lines that are not blank.
    pub total: u32,
    /// The model of all lines, if they have the same.
    pub model: Option<String>,
    /// Those of all lines together, as [`Line::tokens`] estimates them.
    pub tokens: u64,
}

/// Reads a file. `R` says why a model cannot be used: a code and a message.
#[derive(Debug)]
pub struct Validator<R> {
    endpoint: LineEndpoint,
    flavor: Flavor,
    max_lines: u32,
    refusal: R,
    /// The line that is not complete yet. Empty once it is longer than a line may be.
    held: Vec<u8>,
    /// The bytes of that line so far.
    held_bytes: u64,
    /// Where in the file that line begins.
    line_start: u64,
    /// The lines so far, with the blank ones.
    line_number: u32,
    custom_ids: CustomIds,
    shards: ShardCutter,
    models: Vec<(String, Option<(String, String)>)>,
    model: Option<String>,
    has_several_models: bool,
    tokens: u64,
    errors: Vec<LineError>,
    has_too_many_lines: bool,
}

impl<R: FnMut(&str) -> Option<(String, String)>> Validator<R> {
    /// `refusal` is given a model's name, and says with a code and a message why the batch cannot use it.
    ///
    /// A batch of the Messages API does not fail for one line: such a line is refused when it is to be sent, and has
    /// an error among the results. Of such a file only what concerns all of it is an error here.
    pub fn new(endpoint: LineEndpoint, flavor: Flavor, max_lines: u32, refusal: R) -> Self {
        Self {
            endpoint,
            flavor,
            max_lines,
            refusal,
            held: Vec::new(),
            held_bytes: 0,
            line_start: 0,
            line_number: 0,
            custom_ids: CustomIds::default(),
            shards: ShardCutter::default(),
            models: Vec::new(),
            model: None,
            has_several_models: false,
            tokens: 0,
            errors: Vec::new(),
            has_too_many_lines: false,
        }
    }

    /// Reads the next bytes of the file.
    pub fn push(&mut self, mut piece: &[u8]) {
        while !self.is_decided() {
            let Some(end) = memchr(b'\n', piece) else {
                self.hold(piece);
                return;
            };
            self.complete(&piece[..end]);
            piece = &piece[end + 1..];
        }
    }

    /// Whether the file fails whatever follows, so that the rest of it need not be read.
    pub fn is_decided(&self) -> bool {
        self.has_too_many_lines || self.errors.len() >= MAX_ERRORS
    }

    pub fn finish(mut self) -> Result<Plan, Vec<LineError>> {
        if self.held_bytes > 0 && !self.is_decided() {
            self.complete(&[]);
        }
        if !self.errors.is_empty() {
            return Err(self.errors);
        }
        let total = self.shards.lines;
        if total == 0 {
            let message = "The batch input file is empty. Please ensure that it contains at least one request.";
            return Err(vec![LineError::new("empty_file", message, None)]);
        }
        Ok(Plan {
            shards: self.shards.shards,
            total,
            model: self.model.filter(|_| !self.has_several_models),
            tokens: self.tokens,
        })
    }

    fn hold(&mut self, bytes: &[u8]) {
        self.held_bytes += bytes.len() as u64;
        if self.held_bytes <= MAX_LINE_BYTES {
            self.held.extend_from_slice(bytes);
        } else {
            self.held = Vec::new();
        }
    }

    /// The line that is held is complete with these bytes.
    fn complete(&mut self, rest: &[u8]) {
        self.line_number = self.line_number.saturating_add(1);
        let bytes = self.held_bytes + rest.len() as u64;
        if bytes > MAX_LINE_BYTES {
            self.held = Vec::new();
            let message =
                format!("This line is {bytes} bytes long; a line may have {MAX_LINE_BYTES}.");
            self.fail(LineError::new("line_too_long", message, None));
        } else if self.held.is_empty() {
            self.line(rest);
        } else {
            let mut held = mem::take(&mut self.held);
            held.extend_from_slice(rest);
            self.line(&held);
            held.clear();
            self.held = held;
        }
        self.held_bytes = 0;
        self.line_start += bytes + 1;
    }

    fn line(&mut self, mut bytes: &[u8]) {
        let mut start = self.line_start;
        if start == 0
            && let Some(rest) = bytes.strip_prefix(&BOM)
        {
            start += BOM.len() as u64;
            bytes = rest;
        }
        if bytes.trim_ascii().is_empty() {
            return;
        }
        if self.shards.lines >= self.max_lines {
            let message = format!(
                "The batch input file contains too many requests. The maximum number of requests per batch is {}.",
                self.max_lines
            );
            self.errors
                .push(LineError::new("too_many_tasks", message, None));
            self.has_too_many_lines = true;
            return;
        }
        self.shards.push(start..start + bytes.len() as u64);
        let checked = line::read(bytes.trim_ascii(), self.endpoint);
        let tokens = checked.as_ref().map_or(0, Line::tokens);
        self.tokens = self.tokens.saturating_add(tokens);
        match (checked, self.flavor) {
            (Ok(line), Flavor::OpenAi) => self.check(&line),
            (Err(error), Flavor::OpenAi) => self.fail(error),
            (Ok(line), Flavor::Messages) => self.note_model(&line.model),
            (Err(_), Flavor::Messages) => {}
        }
    }

    /// Checks a line for what depends on other lines and on the fleet.
    fn check(&mut self, line: &Line<'_>) {
        if !self.custom_ids.insert(&line.custom_id) {
            let message = "The custom_id for this request is a duplicate of another request. \
                           The custom_id parameter must be unique for each request in a batch.";
            let error = LineError::new("duplicate_custom_id", message, Some("custom_id"));
            self.fail(error);
            return;
        }
        self.note_model(&line.model);
        if let Some((code, message)) = self.refusal_of(&line.model) {
            self.fail(LineError::new(&code, message, Some(MODEL_PARAM)));
        }
    }

    fn note_model(&mut self, model: &str) {
        match &self.model {
            None => self.model = Some(model.to_owned()),
            Some(first) => self.has_several_models |= first != model,
        }
    }

    fn refusal_of(&mut self, model: &str) -> Option<(String, String)> {
        let known = self.models.iter().find(|(name, _)| name == model);
        if let Some((_, answer)) = known {
            return answer.clone();
        }
        let answer = (self.refusal)(model);
        if self.models.len() < MAX_MODELS {
            self.models.push((model.to_owned(), answer.clone()));
        }
        answer
    }

    /// Keeps an error of the line that was completed last.
    fn fail(&mut self, error: LineError) {
        self.errors.push(error.at_line(self.line_number));
    }
}

#[cfg(test)]
mod tests;
