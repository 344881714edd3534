//! Finds where a text may be split so that each piece has the same token ids as within the whole text.
//!
//! **Before an added token** such as `<|im_start|>`. A tokenizer first splits a text at added tokens (leftmost,
//! then longest match) and processes the text between them independently; this file repeats that search. It uses
//! only tokens that are matched in the raw text (`normalized: false`) and that take no white space or word boundary
//! with them. A piece starts with such a token, so rules for the start of a text (such as a prepended space)
//! apply to the first piece only, as they must.
//!
//! **After a line end and before an ASCII letter**, with a character other than white space before the line end,
//! and only if words are split by one of the patterns below. With each of them a match that contains the line end
//! cannot continue with a letter; the one rule with a lookahead, `\s+(?!\S)`, sees only the line end on either
//! side, and either matches it in both cases or leaves it to `\s+`, which does; and neither NFC nor byte-level
//! encoding joins anything across it. Such a boundary is used in texts without added tokens, at the first such
//! place after `PIECE_BYTES`, so that appending to a text moves no earlier boundary.

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;

/// Minimum length of a piece that ends at a line. Long enough that a cache look-up costs little per byte, short enough
/// that a text with a changed end is mostly cached.
const PIECE_BYTES: usize = 2_048;

/// The word patterns of common model families for which the second rule above holds.
const WORD_PATTERNS: &[&str] = &[
    // Llama 3 and derived models.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Qwen 2 and 3, GLM.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Qwen 3.5.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // gpt-oss, Llama 4, newer Mistral models and models derived from these.
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

#[derive(Debug)]
pub(super) struct Boundaries {
    /// Search for all added tokens that are matched in the raw text. The flags say whether a piece may start at a token.
    tokens: Option<(AhoCorasick, Vec<bool>)>,
    splits_at_lines: bool,
    /// Length of the longest added token that is matched in the raw text.
    pub(super) max_token_bytes: usize,
}

/// An added token of `tokenizer.json`.
struct AddedToken<'j> {
    content: &'j str,
    /// Matched in the raw text, not in the normalized text.
    is_raw: bool,
    /// Takes no white space or word boundary with it.
    is_plain: bool,
    strips_left: bool,
    is_single_word: bool,
}

impl Boundaries {
    pub(super) fn new(json: &Value) -> Result<Self, String> {
        let added: Vec<AddedToken<'_>> = json["added_tokens"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(AddedToken::read)
            .collect();
        let raw: Vec<&AddedToken<'_>> = added.iter().filter(|token| token.is_raw).collect();
        let tokens = if raw.is_empty() {
            None
        } else {
            let search = AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .build(raw.iter().map(|token| token.content))
                .map_err(|error| error.to_string())?;
            Some((search, raw.iter().map(|token| token.is_plain).collect()))
        };
        let splits_at_lines =
            can_split_at_lines(json) && added.iter().all(AddedToken::allows_line_boundaries);
        let max_token_bytes = raw.iter().map(|token| token.content.len()).max();
        Ok(Self {
            tokens,
            splits_at_lines,
            // At least one byte: the letter after a line end.
            max_token_bytes: max_token_bytes.unwrap_or(0).max(1),
        })
    }

    /// Whether a text begins with an added token that is matched in the raw text.
    pub(super) fn starts_with_token(&self, text: &str) -> bool {
        let tokens = self.tokens.as_ref();
        let first = tokens.and_then(|(search, _)| search.find(text));
        first.is_some_and(|found| found.start() == 0)
    }

    pub(super) fn pieces<'v, 't>(&'v self, text: &'t str) -> Pieces<'v, 't> {
        let mut pieces = Pieces {
            text,
            start: 0,
            next_token: None,
            matches: self
                .tokens
                .as_ref()
                .map(|(search, plain)| (search.find_iter(text), plain.as_slice())),
            splits_at_lines: self.splits_at_lines,
        };
        pieces.next_token = pieces.find_token();
        pieces
    }
}

impl<'j> AddedToken<'j> {
    fn read(token: &'j Value) -> Option<Self> {
        let content = token["content"]
            .as_str()
            .filter(|content| !content.is_empty())?;
        let is = |key: &str| token[key].as_bool().unwrap_or(false);
        // A neighbouring token with `lstrip` or `rstrip` could take white space at the ends of this one.
        let has_no_outer_space = content.trim() == content;
        Some(Self {
            content,
            is_raw: !is("normalized"),
            is_plain: has_no_outer_space && !is("lstrip") && !is("rstrip") && !is("single_word"),
            strips_left: is("lstrip"),
            is_single_word: is("single_word"),
        })
    }

    /// Whether a boundary after a line end neither splits this token nor takes white space from it.
    fn allows_line_boundaries(&self) -> bool {
        let contains_boundary = self
            .content
            .as_bytes()
            .windows(2)
            .any(|pair| pair[0] == b'\n' && pair[1].is_ascii_alphabetic());
        let starts_piece = self.content.starts_with(|c: char| c.is_ascii_alphabetic());
        !(contains_boundary || self.is_single_word || (self.strips_left && starts_piece))
    }
}

/// Whether words are split by one of `WORD_PATTERNS` and the text is not changed in any other way.
fn can_split_at_lines(json: &Value) -> bool {
    let normalizer = &json["normalizer"];
    let is_text_unchanged = normalizer.is_null()
        || normalizer["type"] == "NFC"
        || (normalizer["type"] == "Sequence"
            && normalizer["normalizers"]
                .as_array()
                .is_some_and(|all| all.is_empty()));
    let steps = match json["pre_tokenizer"]["type"].as_str() {
        Some("Sequence") => json["pre_tokenizer"]["pretokenizers"].as_array(),
        _ => None,
    };
    let Some([split, bytes]) = steps.map(Vec::as_slice) else {
        return false;
    };
    let is_known_pattern = split["type"] == "Split"
        && split["behavior"] == "Isolated"
        && split["invert"] == false
        && split["pattern"]["Regex"]
            .as_str()
            .is_some_and(|pattern| WORD_PATTERNS.contains(&pattern));
    let is_plain_byte_level = bytes["type"] == "ByteLevel"
        && bytes["add_prefix_space"] == false
        && bytes["use_regex"] == false;
    let has_dropout = json["model"]["dropout"]
        .as_f64()
        .is_some_and(|dropout| dropout > 0.0);
    is_text_unchanged
        && is_known_pattern
        && is_plain_byte_level
        && json["model"]["type"] == "BPE"
        && !has_dropout
}

/// Iterates over a text's pieces.
#[derive(Debug)]
pub struct Pieces<'v, 't> {
    text: &'t str,
    /// Start of the next piece.
    start: usize,
    /// Start of the next added token after `start`.
    next_token: Option<usize>,
    matches: Option<(aho_corasick::FindIter<'v, 't>, &'v [bool])>,
    splits_at_lines: bool,
}

impl Pieces<'_, '_> {
    fn find_token(&mut self) -> Option<usize> {
        let (matches, plain) = self.matches.as_mut()?;
        matches
            .find(|found| plain[found.pattern().as_usize()] && found.start() > self.start)
            .map(|found| found.start())
    }

    /// The first boundary after a line end, `PIECE_BYTES` after the start of the piece or later.
    fn line_boundary(&self, end: usize) -> Option<usize> {
        let bytes = &self.text.as_bytes()[..end];
        let mut from = self.start + PIECE_BYTES;
        while from + 1 < end {
            let at = from + memchr::memchr(b'\n', bytes.get(from..)?)?;
            let is_boundary = bytes.get(at + 1).is_some_and(u8::is_ascii_alphabetic)
                && ends_with_non_space(&self.text[..at]);
            if is_boundary {
                return Some(at + 1);
            }
            from = at + 1;
        }
        None
    }
}

/// Whether the character before a line end is not white space, as the second rule requires.
fn ends_with_non_space(text: &str) -> bool {
    text.chars().next_back().is_some_and(|c| !c.is_whitespace())
}

impl<'t> Iterator for Pieces<'_, 't> {
    type Item = &'t str;

    fn next(&mut self) -> Option<&'t str> {
        if self.start == self.text.len() {
            return None;
        }
        let mut end = self.next_token.unwrap_or(self.text.len());
        if self.splits_at_lines && end - self.start > PIECE_BYTES {
            end = self.line_boundary(end).unwrap_or(end);
        }
        let piece = &self.text[self.start..end];
        self.start = end;
        if self.next_token == Some(end) {
            self.next_token = self.find_token();
        }
        Some(piece)
    }
}
