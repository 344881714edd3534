//! A model's tokenizer: text -> token ids, in pieces that are independent of each other, so that the
//! ids of a piece can be kept. Pure but for loading.
//!
//! `fastokens` does the work; a test holds it to `tokenizers`, token for token. What is ours is where a
//! text may be cut (`pieces`).

mod cuts;

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde_json::Value;

use self::cuts::Cuts;
pub use self::cuts::Pieces;

/// Room for a text's ids before they are known: a token is about four bytes, and rarely below three.
const BYTES_PER_TOKEN_MIN: usize = 3;

pub struct Vocabulary {
    tokenizer: fastokens::Tokenizer,
    cuts: Cuts,
    before: Vec<u32>,
    after: Vec<u32>,
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary")
            .field("tokens", &self.tokenizer.vocab_size())
            .finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// From a `tokenizer.json`. Its truncation and padding are for training and are left out, as the
    /// engine leaves them out.
    pub fn new(mut json: Value) -> Result<Self, String> {
        if let Value::Object(json) = &mut json {
            json.insert("truncation".to_owned(), Value::Null);
            json.insert("padding".to_owned(), Value::Null);
        }
        let cuts = Cuts::new(&json)?;
        let tokenizer = fastokens::Tokenizer::from_json(json).map_err(|error| error.to_string())?;
        let mut vocabulary = Self {
            tokenizer,
            cuts,
            before: Vec::new(),
            after: Vec::new(),
        };
        (vocabulary.before, vocabulary.after) = vocabulary.around()?;
        Ok(vocabulary)
    }

    /// The ids that are put before and after a text where the tokenizer's own marks are asked for.
    pub fn marks(&self) -> (&[u32], &[u32]) {
        (&self.before, &self.after)
    }

    /// The longest added token that is matched in the raw text.
    pub fn token_bytes_max(&self) -> usize {
        self.cuts.token_bytes_max()
    }

    /// A text's pieces: the ids of a text are those of its pieces, one after the other.
    pub fn pieces<'v, 't>(&'v self, text: &'t str) -> Pieces<'v, 't> {
        self.cuts.pieces(text)
    }

    /// The ids of a whole text, or of one of its pieces, without marks.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), String> {
        // The tokenizer reads foreign bytes; should it ever panic, that costs a prediction and no more.
        let found = catch_unwind(AssertUnwindSafe(|| self.tokenizer.encode(text)));
        let found = found
            .map_err(|_| "it panicked".to_owned())?
            .map_err(|error| error.to_string())?;
        if ids.capacity() == 0 {
            ids.reserve(text.len() / BYTES_PER_TOKEN_MIN);
        }
        ids.extend_from_slice(&found);
        Ok(())
    }

    /// The text of some ids, for a person to read: a character that they cut in two is shown as �.
    pub fn decode(&self, ids: &[u32]) -> Option<String> {
        let text = catch_unwind(AssertUnwindSafe(|| self.tokenizer.decode(ids, false)));
        text.ok()?.ok()
    }

    fn around(&self) -> Result<(Vec<u32>, Vec<u32>), String> {
        const SAMPLE: &str = "a";
        let mut bare = Vec::new();
        self.encode(SAMPLE, &mut bare)?;
        let marked = self
            .tokenizer
            .encode_with_special_tokens(SAMPLE, true)
            .map_err(|error| error.to_string())?;
        let at = marked
            .windows(bare.len().max(1))
            .position(|window| window == bare)
            .ok_or("its post-processor changes more than start and end")?;
        Ok((marked[..at].to_vec(), marked[at + bare.len()..].to_vec()))
    }
}

#[cfg(test)]
pub(in crate::prompt) mod tests;
