//! A model's tokenizer: text to token ids, in pieces that are independent of each other, so that the ids of a
//! piece can be cached. Pure apart from loading.
//!
//! `fastokens` tokenizes; a test compares it with `tokenizers`, token for token. `boundaries` finds where a text may
//! be split.

mod boundaries;

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde_json::Value;

use self::boundaries::Boundaries;
pub use self::boundaries::Pieces;

/// Room for a text's ids before they are known: a token is about four bytes, and rarely below three.
const BYTES_PER_TOKEN_MIN: usize = 3;

pub struct Vocabulary {
    tokenizer: fastokens::Tokenizer,
    boundaries: Boundaries,
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
        let boundaries = Boundaries::new(&json)?;
        let tokenizer = fastokens::Tokenizer::from_json(json).map_err(|error| error.to_string())?;
        let mut vocabulary = Self {
            tokenizer,
            boundaries,
            before: Vec::new(),
            after: Vec::new(),
        };
        (vocabulary.before, vocabulary.after) = vocabulary.around()?;
        Ok(vocabulary)
    }

    /// The BOS and EOS ids, which are added around a text if the request asks for special tokens.
    pub fn bos_eos(&self) -> (&[u32], &[u32]) {
        (&self.before, &self.after)
    }

    /// The longest added token that is matched in the raw text.
    pub fn token_bytes_max(&self) -> usize {
        self.boundaries.token_bytes_max()
    }

    /// A text's pieces: the ids of a text are those of its pieces, one after the other.
    pub fn pieces<'v, 't>(&'v self, text: &'t str) -> Pieces<'v, 't> {
        self.boundaries.pieces(text)
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
