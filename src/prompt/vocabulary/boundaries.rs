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

/// Long enough that finding a piece costs little beside its length, short enough that a turn that
/// changes nothing but its end is mostly known.
const PIECE_BYTES: usize = 2_048;

/// How words are cut, by families: the patterns that are known to keep the second rule.
const WORD_PATTERNS: &[&str] = &[
    // Llama 3 and its kin.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Qwen 2 and 3, GLM.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Qwen 3.5.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // gpt-oss, Llama 4, Mistral's newer ones and their kin.
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

#[derive(Debug)]
pub(super) struct Boundaries {
    /// Every added token that is matched in the raw text, and whether one may cut before it.
    tokens: Option<(AhoCorasick, Vec<bool>)>,
    at_lines: bool,
    token_bytes_max: usize,
}

struct Added<'j> {
    content: &'j str,
    is_raw: bool,
    is_plain: bool,
    takes_left: bool,
    is_word: bool,
}

impl Boundaries {
    pub(super) fn new(json: &Value) -> Result<Self, String> {
        let added: Vec<Added<'_>> = json["added_tokens"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Added::read)
            .collect();
        let raw: Vec<&Added<'_>> = added.iter().filter(|token| token.is_raw).collect();
        let tokens = match raw.is_empty() {
            true => None,
            false => {
                let search = AhoCorasick::builder()
                    .match_kind(MatchKind::LeftmostLongest)
                    .build(raw.iter().map(|token| token.content))
                    .map_err(|error| error.to_string())?;
                Some((search, raw.iter().map(|token| token.is_plain).collect()))
            }
        };
        let at_lines = cuts_at_lines(json) && added.iter().all(Added::leaves_lines);
        let token_bytes_max = raw.iter().map(|token| token.content.len()).max();
        Ok(Self {
            tokens,
            at_lines,
            // At least the letter after a line's end.
            token_bytes_max: token_bytes_max.unwrap_or(0).max(1),
        })
    }

    pub(super) fn token_bytes_max(&self) -> usize {
        self.token_bytes_max
    }

    pub(super) fn pieces<'v, 't>(&'v self, text: &'t str) -> Pieces<'v, 't> {
        let mut pieces = Pieces {
            text,
            at: 0,
            token: None,
            matches: self
                .tokens
                .as_ref()
                .map(|(search, plain)| (search.find_iter(text), plain.as_slice())),
            at_lines: self.at_lines,
        };
        pieces.token = pieces.next_token();
        pieces
    }
}

impl<'j> Added<'j> {
    fn read(token: &'j Value) -> Option<Self> {
        let content = token["content"].as_str().filter(|it| !it.is_empty())?;
        let is = |key: &str| token[key].as_bool().unwrap_or(false);
        // White space at a token's rim could be taken by a neighbour that strips.
        let is_bare = content.trim() == content;
        Some(Self {
            content,
            is_raw: !is("normalized"),
            is_plain: is_bare && !is("lstrip") && !is("rstrip") && !is("single_word"),
            takes_left: is("lstrip"),
            is_word: is("single_word"),
        })
    }

    /// Whether a cut after a line's end can neither divide it nor take white space from it.
    fn leaves_lines(&self) -> bool {
        let has_cut = self
            .content
            .as_bytes()
            .windows(2)
            .any(|pair| pair[0] == b'\n' && pair[1].is_ascii_alphabetic());
        let starts_piece = self.content.starts_with(|c: char| c.is_ascii_alphabetic());
        !(has_cut || self.is_word || (self.takes_left && starts_piece))
    }
}

/// Whether the words are cut by a pattern of ours, and nothing else is done to the text.
fn cuts_at_lines(json: &Value) -> bool {
    let normalizer = &json["normalizer"];
    let is_kept = normalizer.is_null()
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
    let is_known = split["type"] == "Split"
        && split["behavior"] == "Isolated"
        && split["invert"] == false
        && split["pattern"]["Regex"]
            .as_str()
            .is_some_and(|pattern| WORD_PATTERNS.contains(&pattern));
    let is_plain = bytes["type"] == "ByteLevel"
        && bytes["add_prefix_space"] == false
        && bytes["use_regex"] == false;
    let has_dropout = json["model"]["dropout"].as_f64().is_some_and(|it| it > 0.0);
    is_kept && is_known && is_plain && json["model"]["type"] == "BPE" && !has_dropout
}

/// Iterates over a text's pieces.
#[derive(Debug)]
pub struct Pieces<'v, 't> {
    text: &'t str,
    at: usize,
    /// Where the next added token begins, beyond `at`.
    token: Option<usize>,
    matches: Option<(aho_corasick::FindIter<'v, 't>, &'v [bool])>,
    at_lines: bool,
}

impl Pieces<'_, '_> {
    fn next_token(&mut self) -> Option<usize> {
        let (matches, plain) = self.matches.as_mut()?;
        matches
            .find(|found| plain[found.pattern().as_usize()] && found.start() > self.at)
            .map(|found| found.start())
    }

    fn line_cut(&self, end: usize) -> Option<usize> {
        let bytes = &self.text.as_bytes()[..end];
        let mut from = self.at + PIECE_BYTES;
        while from + 1 < end {
            let at = from + memchr::memchr(b'\n', bytes.get(from..)?)?;
            let is_cut = bytes.get(at + 1).is_some_and(u8::is_ascii_alphabetic)
                && ends_in_word(&self.text[..at]);
            if is_cut {
                return Some(at + 1);
            }
            from = at + 1;
        }
        None
    }
}

/// Whether the text's last character is one after which a line's end stands alone.
fn ends_in_word(text: &str) -> bool {
    text.chars().next_back().is_some_and(|c| !c.is_whitespace())
}

impl<'t> Iterator for Pieces<'_, 't> {
    type Item = &'t str;

    fn next(&mut self) -> Option<&'t str> {
        if self.at == self.text.len() {
            return None;
        }
        let mut end = self.token.unwrap_or(self.text.len());
        if self.at_lines && end - self.at > PIECE_BYTES {
            end = self.line_cut(end).unwrap_or(end);
        }
        let piece = &self.text[self.at..end];
        self.at = end;
        if self.token == Some(end) {
            self.token = self.next_token();
        }
        Some(piece)
    }
}
